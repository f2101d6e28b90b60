"""Events of this sidecar, kept for the controller and reported by `fleet.report`. Methods do not block."""

from __future__ import annotations

import time

from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.save.save import Save
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.telemetry.incident import Incidents

FENCED = frozenset({Cause.FENCED, Cause.TAKEN_OVER})
"""Causes of a failed save after which the trainer can never commit again."""


class Activity:
    """Incidents of one sidecar, and the outcome of its last save and trainer. Each write is a single assignment."""

    def __init__(self, incidents: Incidents) -> None:
        self.incidents = incidents
        self.consecutive_failures = 0
        self.closed_cleanly = False
        """Whether the last trainer detached at a durable step, with no save in flight."""

    def record_trainer_lost(self, session: Session, *, step: int) -> None:
        if session.attempt is not None:
            self.incidents.add(
                fleet.INCIDENT_KIND_TRAINER_LOST,
                cause=Cause.LOST,
                message=f"the trainer of rank {session.attachment.rank} ended at step {step} without detaching",
                step=step,
            )

    def opened(self, reply: pb.OpenReply) -> None:
        if reply.fell_back:
            why = reply.log_damage or "newer checkpoints are incomplete"
            self.incidents.add(
                fleet.INCIDENT_KIND_FELL_BACK,
                cause=Cause.DAMAGED_LOG if reply.log_damage else Cause.INVALID,
                message=f"attempt {reply.attempt} falls back to step {reply.step}, skipping newer checkpoints: {why}",
                step=reply.step,
                attempt=reply.attempt,
            )

    def restored(self, session: Session, *, step: int, source: str) -> None:
        if (
            not session.mark_restored() or session.attachment.rank != 0
        ):  # a run's restore counts once, however many ranks it has
            return
        seconds = max(0.0, time.time() - session.open_requested_s)
        identity = "the trainer" if session.attempt is None else f"attempt {session.attempt}"
        self.incidents.add(
            fleet.INCIDENT_KIND_RESTORED,
            cause=source,
            message=f"{identity} continues from step {step}, {session.lost_steps} steps were lost; "
            f"read from the {source} in {seconds:.1f} s",
            step=step,
            lost_steps=session.lost_steps,
            seconds=seconds,
            attempt=session.attempt or 0,
        )

    def tracking_fault(self, tables: int, *, step: int) -> None:
        self.incidents.add(
            fleet.INCIDENT_KIND_TRACKING_FAULT,
            cause=Cause.AUDIT,
            message=f"rows of {tables} table(s) changed without a mark: the save of step {step} contains every row, "
            "and such tables are tracked by hashes from now on",
            step=step,
        )

    def fenced(self, cause: Cause, message: str, *, step: int) -> None:
        self.incidents.add(fleet.INCIDENT_KIND_FENCED, cause=cause, message=message, step=step)

    def ended(self, save: Save) -> None:
        if save.commit is not None:
            self.consecutive_failures = 0
            return
        self.consecutive_failures += 1
        cause, message = save.failure
        kind = fleet.INCIDENT_KIND_FENCED if cause in FENCED else fleet.INCIDENT_KIND_SAVE_FAILED
        self.incidents.add(kind, cause=cause, message=message, step=save.decisions.step)
