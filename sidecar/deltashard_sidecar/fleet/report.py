"""What a report says, read from the sidecar's parts by the reporting thread, and what of it is news."""

from __future__ import annotations

import itertools
import time

from deltashard_checkpoint.log.chain import held_bytes
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.process import version
from deltashard_checkpoint.vocabulary import PLS_KEY, RECOVERIES_KEY
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.run.run import commit_message
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.sidecar import Sidecar

IMMEDIATE_FIELDS = ("phase", "attempt", "store_ok", "credentials_ok", "directive")
"""Fields of a pod's state whose change is told at once, as are incidents and the ends of ordered saves."""
MAX_CHECKPOINTS, MAX_PINS = 10, 4
"""Told of by name."""


def pod_identity(settings: Settings) -> fleet.Who:
    other = {"namespace": "pod_namespace", "pod": "pod_name", "node": "node_name"}
    said = fleet.Who(version=version(), started_at_s=time.time())
    for name in {each.name for each in said.DESCRIPTOR.fields} - {"version", "started_at_s"}:
        setattr(said, name, getattr(settings, other.get(name, name)))
    return said


def needs_report(now: fleet.ReportRequest, last: fleet.ReportRequest) -> bool:
    """Whether a report is worth making before it is due, `last` the last that was taken. Pure."""
    changed = any(getattr(now.pod, name) != getattr(last.pod, name) for name in IMMEDIATE_FIELDS)
    return changed or not _ids(now) <= _ids(last)


def _ids(request: fleet.ReportRequest) -> set[int | str]:
    return {each.id for each in request.incidents} | {each.id for each in request.saves_over}


class SidecarState:
    """A sidecar as the client sees it: how it and its run stand, and who hears what is answered."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.settings, self.metrics, self.log = sidecar.settings, sidecar.metrics, sidecar.log
        self.incidents, self.orders = sidecar.run.incidents, sidecar.orders
        self.apply_directive = sidecar.control.apply_directive

    @property
    def is_reporter(self) -> bool:
        """Whether this sidecar speaks for the run by itself: it has, or had, rank 0."""
        return self._sidecar.metrics.has_rank0

    def pod(self) -> fleet.PodState:
        sidecar, run = self._sidecar, self._sidecar.run
        sessions = sidecar.sessions.all()
        return fleet.PodState(
            run=run.name,
            phase=self._phase(sessions),
            ranks=[
                fleet.Rank(rank=w.rank, world_size=w.world_size, step=sidecar.keeper.step_of(w.local_rank))
                for w in (s.attachment for s in sessions)
            ],
            attempt=_attempt(sessions),
            saves_failed_in_a_row=sidecar.activity.consecutive_failures,
            store_ok=run.health.store_ok,
            credentials_ok=run.health.credentials_ok,
            save_blocked=sidecar.blocked()[1],
            directive=sidecar.control.active_policy.id,
        )

    def _phase(self, sessions: list[Session]) -> fleet.Phase:
        sidecar = self._sidecar
        if sidecar.activity.closed_cleanly and not sessions:
            return fleet.PHASE_CLOSED  # also while its pod goes
        if sidecar.stopping:
            return fleet.PHASE_STOPPING
        if not sessions:
            return fleet.PHASE_WAITING
        ready = all(s.attempt is not None and not self._is_restoring(s) for s in sessions)
        return fleet.PHASE_TRAINING if ready else fleet.PHASE_RESTORING

    def _is_restoring(self, session: Session) -> bool:
        """Until every row is there; a trainer that steps has what it wanted."""
        if session.restored or not session.resumed:
            return False
        return self._sidecar.keeper.step_time_s(session.attachment.local_rank) < session.open_requested_s

    def run(self) -> fleet.RunState:
        sidecar, state, now_s = self._sidecar, self._sidecar.run.state(), time.time()
        sessions, bits = sidecar.sessions.all(), sidecar.run.bits.decision
        said = fleet.RunState(
            policy=sidecar.control.policy,  # first: what is decided later is no older
            checkpoints=[_kept(state, c, now_s) for c in _newest(state)],
            checkpoint_count=len(state.checkpoints),
            stored_bytes=sum(held_bytes(state, seq) for seq in state.checkpoints),
            openings=openings(state, _attempt(sessions)),
            measured=sidecar.decider.measured(),
            decisions=[*sidecar.decider.decisions(), *([] if bits is None else [bits])],
        )
        if (newest := state.newest()) is not None:
            commits = (s.last_commit for s in sessions)
            # Our own says how long the commit took, the log does not.
            mine = next((c for c in commits if c is not None and c.seq == newest.seq), None)
            said.newest.CopyFrom(mine or commit_message(newest))
            said.newest_age_s = max(0.0, now_s - newest.at_s)
            said.stall_s = newest.stall_s
            said.lost_share = _number(state.inherited_metadata(PLS_KEY, newest))
            said.partial_recoveries = int(_number(state.inherited_metadata(RECOVERIES_KEY, newest)))
        return said


def _attempt(sessions: list[Session]) -> int:
    return max((s.attempt or 0 for s in sessions), default=0)


def _newest(state: RunState) -> list[Checkpoint]:
    live = [each for seq, each in state.checkpoints.items() if seq not in state.detached]
    return live[: -MAX_CHECKPOINTS - 1 : -1]


def _kept(state: RunState, checkpoint: Checkpoint, now_s: float) -> fleet.KeptCheckpoint:
    return fleet.KeptCheckpoint(
        seq=checkpoint.seq,
        step=checkpoint.step,
        age_s=max(0.0, now_s - checkpoint.at_s),
        bytes=held_bytes(state, checkpoint.seq),
        pins=state.pins_of(checkpoint.seq)[:MAX_PINS],
    )


def openings(state: RunState, attempt: int) -> int:
    """How often the workload of this attempt has opened the run, up to it; 0 while the log is not known that far. Pure.

    A restore that falls back past a checkpoint that is not whole opens another attempt, which is the same opening:
    right behind the one before, which has committed nothing, and from an older checkpoint. A person's rewind (an
    attempt of no ranks) opens nothing.
    """
    if attempt not in state.attempts:
        return 0
    workload = state.attempts[attempt].workload
    known = [each for n, each in sorted(state.attempts.items()) if n <= attempt]
    mine = sum(each.workload == workload and each.world_size > 0 for each in known)
    fell_back = sum(
        before.workload == after.workload == workload
        and before.world_size > 0 < after.world_size
        and before.last_seq is None
        and before.resumes_from is not None
        and (after.resumes_from is None or after.resumes_from < before.resumes_from)
        for before, after in itertools.pairwise(known)
    )
    return mine - fell_back


def _number(said: str | None) -> float:
    """A number out of a commit's metadata, which is the trainer's word; 0 for what is none."""
    try:
        value = float(said or 0)
    except ValueError:
        return 0.0
    return value if 0 <= value < 2**53 else 0.0
