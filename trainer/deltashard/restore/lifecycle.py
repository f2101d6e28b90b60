"""Lifecycle of a `restore()`, as data: OPENING -> RECEIVING -> APPLYING -> ARMING -> DONE, and its failures.

`TABLE` lists the allowed events of each state and the state that follows; any other event raises `IllegalEvent`. In
RECEIVING and APPLYING the model is in an intermediate state: the restore is retried or fails. A program that catches
the error must rebuild the model before it trains.

- IDLE: `restore()` was not called.
- OPENING: an attempt is requested; the model is unchanged, or as an earlier try left it.
- RECEIVING: the checkpoint is compared with the program, then rows are written into the tables.
- APPLYING: all rows are written; parameters, optimizers, `state=` and loader positions follow.
- ARMING: the model is complete; training begins under the attempt, and the generators are set last.
- DONE: training can begin, with a restored model or a run without commits.
- FAILED: the error was raised; the call can be repeated.

docs/reference/restore-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import after, page


class RestorePhase(Enum):
    """Phase of a `restore()`."""

    IDLE = "IDLE"
    OPENING = "OPENING"
    RECEIVING = "RECEIVING"
    APPLYING = "APPLYING"
    ARMING = "ARMING"
    DONE = "DONE"
    FAILED = "FAILED"


class RestoreEvent(Enum):
    """Event in a `restore()`."""

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
    RestoreEvent.EMPTY: "an attempt is open, and there is no valid checkpoint",
    RestoreEvent.RECEIVED: "all ranks have received all rows and blobs",
    RestoreEvent.APPLIED: "all ranks have restored the checkpoint, and their replicas are equal",
    RestoreEvent.RETRY: "the sidecar died, or the checkpoint was retired or is invalid: another attempt is opened",
    RestoreEvent.ARMED: "the step is set, and training can begin",
    RestoreEvent.FAIL: "an error is raised",
}


class RestoreState:
    """State of one Checkpointer's restores; on the training thread only."""

    def __init__(self) -> None:
        self._now = RestorePhase.IDLE

    @property
    def now(self) -> RestorePhase:
        return self._now

    def transition(self, event: RestoreEvent) -> None:
        """Apply `event`; raises `IllegalEvent` if the state does not allow it."""
        self._now = after(TABLE, self._now, event, where="restore lifecycle")


def reference() -> str:
    return page("Life of a restore", "trainer/deltashard/restore/lifecycle.py", TABLE, MEANING)
