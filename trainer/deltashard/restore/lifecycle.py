"""The life of a `restore()`, as data: OPENING -> RECEIVING -> APPLYING -> ARMING -> DONE, and what goes wrong.

`TABLE` says for every state which events may happen and where they lead; any other raises `IllegalEvent`. Within
RECEIVING and APPLYING the model is neither what it was nor what it will be: from there a restore begins again or fails,
and training cannot begin.

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


class State(Enum):
    """Where a `restore()` is."""

    IDLE = "IDLE"
    OPENING = "OPENING"
    RECEIVING = "RECEIVING"
    APPLYING = "APPLYING"
    ARMING = "ARMING"
    DONE = "DONE"
    FAILED = "FAILED"


class Event(Enum):
    """What may happen to it."""

    CALL = "call"
    CHOSEN = "chosen"
    EMPTY = "empty"
    RECEIVED = "received"
    APPLIED = "applied"
    AGAIN = "again"
    ARMED = "armed"
    FAIL = "fail"


TABLE: dict[State, dict[Event, State]] = {
    State.IDLE: {Event.CALL: State.OPENING},
    State.OPENING: {
        Event.CHOSEN: State.RECEIVING,
        Event.EMPTY: State.ARMING,
        Event.FAIL: State.FAILED,
    },
    State.RECEIVING: {
        Event.RECEIVED: State.APPLYING,
        Event.AGAIN: State.OPENING,
        Event.FAIL: State.FAILED,
    },
    State.APPLYING: {
        Event.APPLIED: State.ARMING,
        Event.AGAIN: State.OPENING,
        Event.FAIL: State.FAILED,
    },
    State.ARMING: {Event.ARMED: State.DONE, Event.FAIL: State.FAILED},
    State.DONE: {Event.CALL: State.OPENING},
    State.FAILED: {Event.CALL: State.OPENING},
}

MEANING: dict[Event, str] = {
    Event.CALL: "`restore()` is called, before the first step",
    Event.CHOSEN: "an attempt is open, and the sidecar names the checkpoint to resume",
    Event.EMPTY: "an attempt is open, and there is no checkpoint (that is whole)",
    Event.RECEIVED: "all ranks have all rows and blobs",
    Event.APPLIED: "all ranks hold the whole checkpoint, and their replicas are the same",
    Event.AGAIN: "the sidecar died, the checkpoint was retired, or is not whole: another attempt is opened",
    Event.ARMED: "the step is set, and the next one may be trained",
    Event.FAIL: "an error is raised",
}


class RestoreState:
    """State of the restores of one Checkpointer; on the training thread only."""

    def __init__(self) -> None:
        self._now = State.IDLE

    @property
    def now(self) -> State:
        return self._now

    def happen(self, event: Event) -> None:
        """Apply `event`; raises `IllegalEvent` for one that cannot happen now."""
        self._now = after(TABLE, self._now, event, where="restore lifecycle")


def reference() -> str:
    return page("Life of a restore", "trainer/deltashard/restore/lifecycle.py", TABLE, MEANING)
