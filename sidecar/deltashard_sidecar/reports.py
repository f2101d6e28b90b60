"""What happened in this sidecar, counted and kept for the controller, and the heartbeat that says it.

The pipeline calls the short methods below; none waits, none asks the store. `heartbeat` is called from the fleet's
thread and only reads: what it takes from the pipeline is a handful of attributes and the newest log state any handle
has seen.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from deltashard_checkpoint.folds import RunState
from deltashard_checkpoint.lineages import parts_of
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar import heartbeats
from deltashard_sidecar.incidents import Incidents
from deltashard_sidecar.runs import commit_message

if TYPE_CHECKING:
    from deltashard_sidecar.saves import Save
    from deltashard_sidecar.sessions import Session
    from deltashard_sidecar.sidecars import Sidecar

FENCED = ("fenced", "taken_over")
"""Causes of a save's failure that end the trainer's run."""


class Reports:
    """Counters and incidents of one sidecar. Thread-safe."""

    def __init__(self, incidents: Incidents) -> None:
        self.incidents = incidents
        self._lock = threading.Lock()
        self._restores = 0
        self._saves_failed = 0
        self._failed_in_a_row = 0
        self._closed_in_order = False
        self._sizes: tuple[int, int, int] = (-1, 0, 0)

    # What happened.

    def attached(self) -> None:
        """A trainer came."""
        self._closed_in_order = False

    def left(self, session: Session, *, step: int, idle: bool) -> None:
        """A trainer detached at `step`; `idle`: no save of it is in flight."""
        self._closed_in_order = idle and session.attempt is not None and session.durable_step == step

    def lost(self, session: Session, *, step: int) -> None:
        """A trainer is gone without a word."""
        if session.attempt is None:
            return
        self.incidents.add(
            fleet.INCIDENT_KIND_TRAINER_LOST,
            cause="lost",
            message=f"the trainer of rank {session.rank} went away at step {step} without detaching",
            step=step,
        )

    def opened(self, session: Session, reply: pb.OpenReply) -> None:
        """An attempt was opened."""
        if reply.fell_back:
            why = reply.log_damage or "newer checkpoints are not whole"
            self.incidents.add(
                fleet.INCIDENT_KIND_FELL_BACK,
                cause="damaged_log" if reply.log_damage else "invalid",
                message=f"attempt {reply.attempt} goes back to step {reply.step}, past newer checkpoints: {why}",
                step=reply.step,
            )
        lost = reply.last_step_seen - reply.step if reply.HasField("last_step_seen") else 0
        session.lost_steps = max(0, lost)

    def restored(self, session: Session, *, step: int, source: str) -> None:
        """A trainer has every row of what it resumes from."""
        if session.restored:
            return
        session.restored = True
        with self._lock:
            self._restores += 1
        if session.rank == 0:  # one restore of a run, however many ranks
            seconds = time.monotonic() - session.opened_s
            self.incidents.add(
                fleet.INCIDENT_KIND_RESTORED,
                cause=source,
                message=f"attempt {session.attempt} goes on from step {step}, {session.lost_steps} steps were lost; "
                f"read from the {source} in {seconds:.1f} s",
                step=step,
                lost_steps=session.lost_steps,
                seconds=seconds,
            )

    def tracking_fault(self, tables: int, *, step: int) -> None:
        """The trainer's audit found rows that changed without a mark."""
        self.incidents.add(
            fleet.INCIDENT_KIND_TRACKING_FAULT,
            cause="audit",
            message=f"rows of {tables} table(s) changed without a mark: the save of step {step} holds every row, and "
            "such tables are tracked by hashes from now on",
            step=step,
        )

    def fenced(self, cause: str, message: str, *, step: int) -> None:
        """Another process trains this run now."""
        self.incidents.add(fleet.INCIDENT_KIND_FENCED, cause=cause, message=message, step=step)

    def ended(self, save: Save) -> None:
        """A save committed or failed."""
        with self._lock:
            if save.commit is not None:
                self._failed_in_a_row = 0
                return
            self._saves_failed += 1
            self._failed_in_a_row += 1
        cause, message = save.failure
        if cause in FENCED:
            self.fenced(cause, message, step=save.cut.step)
        else:
            self.incidents.add(
                fleet.INCIDENT_KIND_SAVE_FAILED, cause=cause, message=message, step=save.cut.step
            )

    # The heartbeat.

    def heartbeat(self, sidecar: Sidecar) -> fleet.Heartbeat:
        """How it stands now."""
        run, sessions = sidecar.run, sidecar.sessions.all()
        state = run.state()
        in_force = sidecar.in_force
        opened = [s for s in sessions if s.attempt is not None]
        beat = fleet.Heartbeat(
            run=run.name if run.named.is_set() else "",
            phase=heartbeats.phase(
                stopping=sidecar.stopping,
                attached=len(sessions),
                opened=len(opened) == len(sessions),
                restoring=any(self._restores_now(s, sidecar) for s in opened),
                saving=bool(sidecar.in_flight()),
                closed=self._closed_in_order,
            ),
            ranks=[
                fleet.Rank(rank=s.rank, world_size=s.world_size, step=sidecar.keeper.step_of(s.local_rank))
                for s in sessions
            ],
            attempt=max((s.attempt or 0 for s in opened), default=0),
            policy=in_force.policy.message(),
            saves_failed=self._saves_failed,
            saves_failed_in_a_row=self._failed_in_a_row,
            restores=self._restores,
            store_ok=run.health.store_ok,
            credentials_ok=run.health.credentials_ok,
            directive=in_force.generation,
            incidents=self.incidents.kept(),
        )
        beat.stored_bytes, beat.checkpoints = self._held(state)
        newest = state.newest()
        if newest is not None:
            mine = next((s.last_commit for s in opened if s.last_commit is not None), None)
            known = mine is not None and mine.seq == newest.seq
            beat.last_commit.CopyFrom(mine if known and mine is not None else commit_message(newest))
            beat.last_commit_at_s = newest.at_s
        return beat

    def _restores_now(self, session: Session, sidecar: Sidecar) -> bool:
        """Until every row is there; a trainer that steps has what it wanted."""
        if session.restored or not session.resumed:
            return False
        return sidecar.keeper.step_time_s(session.local_rank) < session.opened_at_s

    def _held(self, state: RunState) -> tuple[int, int]:
        """(bytes, checkpoints) live in the store, counted anew only when the log went on."""
        if self._sizes[0] != state.tip:
            parts = {part.index_key: part for seq in state.checkpoints for part in parts_of(state, seq)}
            held = sum(part.stored_bytes for part in parts.values())
            self._sizes = state.tip, held, len(state.checkpoints)
        return self._sizes[1:]
