"""The life of a trainer's attachment and attempt, as data: NEW -> ATTACHED -> TRAINING -> CLOSED, and what goes wrong.

`TABLE` says for every state which events may happen and where they lead; there is no other place that knows. An event
that a state does not list is a bug of ours (`IllegalEvent`). `TrainingAttempt` keeps the state of one Checkpointer,
applies news on the training thread, and lets no bug of this kind out into training: it is logged, and the state
stays.

- NEW: nothing is started; arguments and the program are looked at.
- ATTACHED: the sidecar is there; no attempt is open, so nothing may be saved under this run's name.
- WAITING: as ATTACHED, and the sidecar is away: `restore()` and the first `step()` wait for it.
- TRAINING: an attempt is open; every older trainer of the run is fenced, and saves are cut. Where the store was full
  or read-only, `restore()` begins training all the same, and the attempt is opened late: no save is cut until then.
- DEGRADED: as TRAINING, and the sidecar is away: training goes on, saves are skipped.
- FENCED: a newer attempt runs: every boundary raises.
- CLOSED: everything is released; late news changes nothing.

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
    """Where a Checkpointer is, as far as news was applied."""

    NEW = "NEW"
    ATTACHED = "ATTACHED"
    WAITING = "WAITING"
    TRAINING = "TRAINING"
    DEGRADED = "DEGRADED"
    FENCED = "FENCED"
    CLOSED = "CLOSED"


class AttachEvent(Enum):
    """What may happen to a Checkpointer."""

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
    AttachEvent.ATTACH: "the sidecar is there, for the first time or again, also after a table's description changed",
    AttachEvent.LOSE: "the sidecar is gone, or did not answer; opening and `restore()` begin again with the next one",
    AttachEvent.OPEN: "`restore()`, or the first `step()`, won a slot of the commit log",
    AttachEvent.FENCE: "a newer attempt was opened, or another workload took the run over",
    AttachEvent.CLOSE: "`close()`, or the context manager's end",
}

ENDED = frozenset({AttachState.CLOSED})


def log_illegal_event(bug: IllegalEvent) -> None:
    """Log an event that the state does not know; tests have it raised instead."""
    log.error("%s: please report this; training goes on", bug)


class TrainingAttempt:
    """State of one Checkpointer and, once it is open, its attempt: written here, on the training thread only."""

    def __init__(self) -> None:
        self.state = AttachState.NEW
        self.number: int | None = None
        """The attempt that is, or was, open; None before the first."""
        self.resumed_step: int | None = None
        """Step that `restore()` left the model at; None when nothing was resumed."""
        self.granted: tuple[int | None, str] = None, ""
        """Attempt and digest of the layout that this rank attaches with; None: none is open."""
        self.late: pb.OpenRequest | None = None
        """What to ask for until the attempt is open; None: it is, or none was asked for."""
        self._snapshots = 0

    @property
    def opened(self) -> bool:
        """Whether an attempt is, or was, open; or training began and it is to be opened late."""
        return self.number is not None or self.late is not None

    @property
    def closed(self) -> bool:
        return self.state in ENDED

    def transition(self, event: AttachEvent) -> AttachState:
        """Apply `event`; returns the state after it."""
        try:
            self.state = after(TABLE, self.state, event, where="trainer lifecycle")
        except IllegalEvent as bug:
            log_illegal_event(bug)
        return self.state

    def grant(self, number: int, layout: str) -> None:
        """Rank 0 opened attempt `number` for all: attach with it, before anything is restored."""
        self.granted = number, layout

    def begin(
        self, number: int | None, *, resumed_step: int | None, late: pb.OpenRequest | None = None
    ) -> None:
        """Attempt `number` is open, or None and `late` will open it; its cuts are counted from 1."""
        self.transition(AttachEvent.OPEN)
        if self.granted[0] != number:
            self.granted = number, ""
        self.number, self.resumed_step, self._snapshots = number, resumed_step, 0
        self.late = late

    @property
    def next_snapshot(self) -> int:
        return self._snapshots + 1

    def begin_snapshot(self, cut: int) -> None:
        """Cut `cut` is asked for: its number is used up, whatever becomes of it."""
        self._snapshots = cut

    def check_open(self, where: str) -> None:
        """Raises `UserError` after `close()`."""
        if self.closed:
            raise UserError(
                "this Checkpointer is closed", where=where, remedy="make a new one, it resumes with restore()"
            )


def reference() -> str:
    return page("Life of a trainer", "trainer/deltashard/attach/lifecycle.py", TABLE, MEANING)
