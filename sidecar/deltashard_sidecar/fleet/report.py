"""Content of a report, read from the sidecar's parts by the reporting thread, and which changes are urgent."""

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
"""Fields of a pod's state whose change is reported at once, like incidents and outcomes of ordered saves."""
MAX_CHECKPOINTS, MAX_PINS = 10, 4
"""Most checkpoints in a report, and most pins of each."""


def pod_identity(settings: Settings) -> fleet.SidecarIdentity:
    other = {"namespace": "pod_namespace", "pod": "pod_name", "node": "node_name"}
    identity = fleet.SidecarIdentity(version=version(), started_at_s=time.time())
    for name in {each.name for each in identity.DESCRIPTOR.fields} - {"version", "started_at_s"}:
        setattr(identity, name, getattr(settings, other.get(name, name)))
    return identity


def needs_report(now: fleet.ReportRequest, last: fleet.ReportRequest) -> bool:
    """Return whether to report `now` before the next report is due; `last` is the last accepted report. Pure."""
    changed = any(getattr(now.pod, name) != getattr(last.pod, name) for name in IMMEDIATE_FIELDS)
    return changed or not _ids(now) <= _ids(last)


def _ids(request: fleet.ReportRequest) -> set[int | str]:
    return {each.id for each in request.incidents} | {each.id for each in request.save_results}


class SidecarState:
    """State of a sidecar and its run for the report client, and the receivers of its replies."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.settings, self.metrics, self.log = sidecar.settings, sidecar.metrics, sidecar.log
        self.incidents, self.orders = sidecar.run.incidents, sidecar.orders
        self.apply_directive = sidecar.control.apply_directive

    @property
    def is_reporter(self) -> bool:
        """Whether this sidecar reports the run's state unasked: it has, or had, rank 0."""
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
            consecutive_save_failures=sidecar.activity.consecutive_failures,
            store_ok=run.health.store_ok,
            credentials_ok=run.health.credentials_ok,
            save_blocked=sidecar.blocked()[1],
            directive=sidecar.control.active_policy.id,
        )

    def _phase(self, sessions: list[Session]) -> fleet.Phase:
        sidecar = self._sidecar
        if sidecar.activity.closed_cleanly and not sessions:
            return fleet.PHASE_CLOSED  # also while the pod is stopping
        if sidecar.stopping:
            return fleet.PHASE_STOPPING
        if not sessions:
            return fleet.PHASE_WAITING
        ready = all(s.attempt is not None and not self._is_restoring(s) for s in sessions)
        return fleet.PHASE_TRAINING if ready else fleet.PHASE_RESTORING

    def _is_restoring(self, session: Session) -> bool:
        if session.restored or not session.resumed:
            return False
        return self._sidecar.keeper.step_time_s(session.attachment.local_rank) < session.open_requested_s

    def run(self) -> fleet.RunState:
        sidecar, state, now_s = self._sidecar, self._sidecar.run.state(), time.time()
        sessions, bits = sidecar.sessions.all(), sidecar.run.bits.decision
        report = fleet.RunState(
            policy=sidecar.control.policy,  # first: the decisions below must not be older
            checkpoints=[_kept(state, c, now_s) for c in _newest(state)],
            checkpoint_count=len(state.checkpoints),
            stored_bytes=sum(held_bytes(state, seq) for seq in state.checkpoints),
            attempts_opened=attempts_opened(state, _attempt(sessions)),
            measured=sidecar.decider.measured(),
            decisions=[*sidecar.decider.decisions(), *([] if bits is None else [bits])],
        )
        if (newest := state.newest()) is not None:
            commits = (s.last_commit for s in sessions)
            # The session's own message has the duration of the commit; the log has not.
            mine = next((c for c in commits if c is not None and c.seq == newest.seq), None)
            report.newest.CopyFrom(mine or commit_message(newest))
            report.newest_age_s = max(0.0, now_s - newest.at_s)
            report.stall_s = newest.stall_s
            report.lost_share = _number(state.inherited_metadata(PLS_KEY, newest))
            report.partial_recoveries = int(_number(state.inherited_metadata(RECOVERIES_KEY, newest)))
        return report


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


def attempts_opened(state: RunState, attempt: int) -> int:
    """Return how often this attempt's workload has opened the run, up to it; 0 if the log is not read that far. Pure.

    A restore that falls back past an incomplete checkpoint opens another attempt, but counts as the same opening: the
    attempt directly follows one without a commit, and resumes from an older checkpoint. A rewind (an attempt without
    ranks) opens nothing.
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


def _number(text: str | None) -> float:
    """Parse a number of a commit's metadata, which the trainer may have written; 0 if it is not valid."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if 0 <= value < 2**53 else 0.0
