"""The life of a `restore()`, as data: OPENING -> RECEIVING -> APPLYING -> ARMING -> DONE, and what goes wrong.

`TABLE` says for every state which events may happen and where they lead; any other raises `IllegalEvent`. Within
RECEIVING and APPLYING the model is neither what it was nor what it will be: from there a restore begins again or fails;
a program that catches the error must build another model before it trains.

- IDLE: `restore()` was not called.
- OPENING: an attempt is asked for; the model is untouched, or what an earlier try left.
- RECEIVING: what is stored is compared with the program, then rows are written into the tables.
- APPLYING: all rows are there: parameters, optimizers, `state=` and the positions of loaders follow.
- ARMING: the model is whole: training begins under the attempt, and the generators are set last.
- DONE: training may begin, or nothing was ever committed.
- FAILED: the error was raised; the call may be repeated.

docs/reference/restore-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import after, page


class RestorePhase(Enum):
    """Where a `restore()` is."""

    IDLE = "IDLE"
    OPENING = "OPENING"
    RECEIVING = "RECEIVING"
    APPLYING = "APPLYING"
    ARMING = "ARMING"
    DONE = "DONE"
    FAILED = "FAILED"


class RestoreEvent(Enum):
    """What may happen to it."""

    CALL = "call"
    CHOSEN = "chosen"
    EMPTY = "empty"
    RECEIVED = "received"
    APPLIED = "applied"
    RETRY = "retry"
    ARMED = "armed"
    FAIL = "fail"


TABLE: dict[RestorePhase, dict[RestoreEvent, RestorePhase]] = {
    RestorePhase.IDLE: {RestoreEvent.CALL: RestorePhase.OPENING},
    RestorePhase.OPENING: {
        RestoreEvent.CHOSEN: RestorePhase.RECEIVING,
        RestoreEvent.EMPTY: RestorePhase.ARMING,
        RestoreEvent.FAIL: RestorePhase.FAILED,
    },
    RestorePhase.RECEIVING: {
        RestoreEvent.RECEIVED: RestorePhase.APPLYING,
        RestoreEvent.RETRY: RestorePhase.OPENING,
        RestoreEvent.FAIL: RestorePhase.FAILED,
    },
    RestorePhase.APPLYING: {
        RestoreEvent.APPLIED: RestorePhase.ARMING,
        RestoreEvent.RETRY: RestorePhase.OPENING,
        RestoreEvent.FAIL: RestorePhase.FAILED,
    },
    RestorePhase.ARMING: {RestoreEvent.ARMED: RestorePhase.DONE, RestoreEvent.FAIL: RestorePhase.FAILED},
    RestorePhase.DONE: {RestoreEvent.CALL: RestorePhase.OPENING},
    RestorePhase.FAILED: {RestoreEvent.CALL: RestorePhase.OPENING},
}

MEANING: dict[RestoreEvent, str] = {
    RestoreEvent.CALL: "`restore()` is called, before the first step",
    RestoreEvent.CHOSEN: "an attempt is open, and the sidecar names the checkpoint to resume",
    RestoreEvent.EMPTY: "an attempt is open, and there is no checkpoint (that is whole)",
    RestoreEvent.RECEIVED: "all ranks have all rows and blobs",
    RestoreEvent.APPLIED: "all ranks hold the whole checkpoint, and their replicas are the same",
    RestoreEvent.RETRY: "the sidecar died, the checkpoint was retired, or is not whole: another attempt is opened",
    RestoreEvent.ARMED: "the step is set, and the next one may be trained",
    RestoreEvent.FAIL: "an error is raised",
}


class RestoreState:
    """State of the restores of one Checkpointer; on the training thread only."""

    def __init__(self) -> None:
        self._now = RestorePhase.IDLE

    @property
    def now(self) -> RestorePhase:
        return self._now

    def transition(self, event: RestoreEvent) -> None:
        """Apply `event`; raises `IllegalEvent` for one that cannot happen now."""
        self._now = after(TABLE, self._now, event, where="restore lifecycle")


def reference() -> str:
    return page("Life of a restore", "trainer/deltashard/restore/lifecycle.py", TABLE, MEANING)
