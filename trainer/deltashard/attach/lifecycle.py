"""Lifecycle of a trainer's attachment and attempt as a table: NEW -> ATTACHED -> TRAINING -> CLOSED, and failures.

`TABLE` lists the events of each state and the resulting state. Any other event is a bug (`IllegalEvent`).
`TrainingAttempt` holds the state of one Checkpointer and applies events on the training thread. It logs an illegal
event and keeps the state, so that training continues.

- NEW: nothing is started; arguments and program are checked.
- ATTACHED: the sidecar is attached; no attempt is open, so nothing can be saved in this run.
- WAITING: as ATTACHED, with the sidecar disconnected; `restore()` and the first `step()` wait for it.
- TRAINING: an attempt is open, older trainers of the run are fenced, and snapshots are taken. If the store was full or
  read-only, `restore()` starts training without an attempt, which is opened later; no snapshot is taken until then.
- DEGRADED: as TRAINING, with the sidecar disconnected; training continues and saves are skipped.
- FENCED: a newer attempt runs; every boundary raises.
- CLOSED: everything is released; later events have no effect.

docs/reference/trainer-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

import logging
from enum import Enum

from deltashard_checkpoint.transition import IllegalEvent, after, page
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.errors import UserError

log = logging.getLogger("deltashard")


class AttachState(Enum):
    """State of a Checkpointer, as of the applied events."""

    NEW = "NEW"
    ATTACHED = "ATTACHED"
    WAITING = "WAITING"
    TRAINING = "TRAINING"
    DEGRADED = "DEGRADED"
    FENCED = "FENCED"
    CLOSED = "CLOSED"


class AttachEvent(Enum):
    """Event of a Checkpointer's lifecycle."""

    ATTACH = "attach"
    LOSE = "lose"
    OPEN = "open"
    FENCE = "fence"
    CLOSE = "close"


TABLE: dict[AttachState, dict[AttachEvent, AttachState]] = {
    AttachState.NEW: {AttachEvent.ATTACH: AttachState.ATTACHED},
    AttachState.ATTACHED: {
        AttachEvent.ATTACH: AttachState.ATTACHED,
        AttachEvent.LOSE: AttachState.WAITING,
        AttachEvent.OPEN: AttachState.TRAINING,
        AttachEvent.FENCE: AttachState.FENCED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
    AttachState.WAITING: {
        AttachEvent.ATTACH: AttachState.ATTACHED,
        AttachEvent.OPEN: AttachState.DEGRADED,
        AttachEvent.FENCE: AttachState.FENCED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
    AttachState.TRAINING: {
        AttachEvent.ATTACH: AttachState.TRAINING,
        AttachEvent.LOSE: AttachState.DEGRADED,
        AttachEvent.OPEN: AttachState.TRAINING,
        AttachEvent.FENCE: AttachState.FENCED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
    AttachState.DEGRADED: {
        AttachEvent.ATTACH: AttachState.TRAINING,
        AttachEvent.OPEN: AttachState.DEGRADED,
        AttachEvent.FENCE: AttachState.FENCED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
    AttachState.FENCED: {
        AttachEvent.ATTACH: AttachState.FENCED,
        AttachEvent.LOSE: AttachState.FENCED,
        AttachEvent.FENCE: AttachState.FENCED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
    AttachState.CLOSED: {
        AttachEvent.ATTACH: AttachState.CLOSED,
        AttachEvent.LOSE: AttachState.CLOSED,
        AttachEvent.FENCE: AttachState.CLOSED,
        AttachEvent.CLOSE: AttachState.CLOSED,
    },
}

MEANING: dict[AttachEvent, str] = {
    AttachEvent.ATTACH: "the sidecar is attached, for the first time or again, also after a table's schema changed",
    AttachEvent.LOSE: "the sidecar is gone or does not answer; opening and `restore()` start again with the next one",
    AttachEvent.OPEN: "`restore()` or the first `step()` won a slot of the commit log",
    AttachEvent.FENCE: "a newer attempt was opened, or another workload took over the run",
    AttachEvent.CLOSE: "`close()`, or the end of the context manager",
}

ENDED = frozenset({AttachState.CLOSED})


def log_illegal_event(bug: IllegalEvent) -> None:
    """Log an event that the current state does not allow; tests raise it instead."""
    log.error("%s: please report this; training continues", bug)


class TrainingAttempt:
    """State of one Checkpointer and its attempt; changed on the training thread only."""

    def __init__(self) -> None:
        self.state = AttachState.NEW
        self.number: int | None = None
        """Number of the current or last attempt; None before the first."""
        self.resumed_step: int | None = None
        """Step of the restored checkpoint; None if nothing was restored."""
        self.granted: tuple[int | None, str] = None, ""
        """Attempt and layout digest that this rank attaches with; (None, "") before an attempt."""
        self.late: pb.OpenRequest | None = None
        """Request with which the attempt is opened later; None if it is open or was not requested."""
        self._snapshots = 0

    @property
    def opened(self) -> bool:
        """Whether an attempt was opened, or training began with an attempt that is opened later."""
        return self.number is not None or self.late is not None

    @property
    def closed(self) -> bool:
        return self.state in ENDED

    def transition(self, event: AttachEvent) -> AttachState:
        """Apply `event` and return the new state."""
        try:
            self.state = after(TABLE, self.state, event, where="trainer lifecycle")
        except IllegalEvent as bug:
            log_illegal_event(bug)
        return self.state

    def grant(self, number: int, layout: str) -> None:
        """Record attempt `number`, which rank 0 opened for all ranks, before the restore."""
        self.granted = number, layout

    def begin(
        self, number: int | None, *, resumed_step: int | None, late: pb.OpenRequest | None = None
    ) -> None:
        """Begin attempt `number` (None: opened later by `late`); its snapshots are counted from 1."""
        self.transition(AttachEvent.OPEN)
        if self.granted[0] != number:
            self.granted = number, ""
        self.number, self.resumed_step, self._snapshots = number, resumed_step, 0
        self.late = late

    @property
    def next_snapshot(self) -> int:
        return self._snapshots + 1

    def begin_snapshot(self, snapshot_id: int) -> None:
        """Use up the number of snapshot `snapshot_id`, whatever its outcome."""
        self._snapshots = snapshot_id

    def check_open(self, where: str) -> None:
        """Raise `UserError` after `close()`."""
        if self.closed:
            raise UserError(
                "this Checkpointer is closed",
                where=where,
                remedy="build a new one, which resumes with restore()",
            )


def reference() -> str:
    return page("Life of a trainer", "trainer/deltashard/attach/lifecycle.py", TABLE, MEANING)
