"""The life of one save, as data: IDLE -> STAGING -> STAGED -> UPLOADING -> COMMITTED | ABORTED.

`TABLE` says for every state which events may happen and where they lead; there is no other place that knows. An event
that a state does not list is a bug of ours (`IllegalEvent`), never silently ignored. What each state means to the rest:

- STAGING: the trainer holds blocks and stands still. Its death ends the save; nothing of it is in the log.
- STAGED: every byte is the sidecar's. From here the trainer may die and the save still commits.
- UPLOADING: every batch is encoded and every block back on the free list; packs, index and log entry remain.
- COMMITTED, ABORTED: the end; the rank may begin another.

docs/reference/save-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from deltashard_checkpoint.transition import after, page


class State(Enum):
    """Where a save is."""

    IDLE = "IDLE"
    STAGING = "STAGING"
    STAGED = "STAGED"
    UPLOADING = "UPLOADING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class Event(Enum):
    """What may happen to a save."""

    BEGIN = "begin"
    SEAL = "seal"
    ABORT = "abort"
    BREAK = "break"
    ENCODED = "encoded"
    COMMIT = "commit"
    FAIL = "fail"


TABLE: dict[State, dict[Event, State]] = {
    State.IDLE: {Event.BEGIN: State.STAGING},
    State.STAGING: {
        Event.SEAL: State.STAGED,
        Event.ABORT: State.ABORTED,
        Event.BREAK: State.ABORTED,
        Event.FAIL: State.ABORTED,
    },
    State.STAGED: {Event.ENCODED: State.UPLOADING, Event.FAIL: State.ABORTED},
    State.UPLOADING: {Event.COMMIT: State.COMMITTED, Event.FAIL: State.ABORTED},
    State.COMMITTED: {},
    State.ABORTED: {},
}

MEANING: dict[Event, str] = {
    Event.BEGIN: "the trainer begins a cut",
    Event.SEAL: "every block is handed over",
    Event.ABORT: "the trainer gives up (stall budget, veto); its copies have stopped",
    Event.BREAK: "the stream broke or went silent; the trainer may still be writing",
    Event.ENCODED: "the last batch is encoded",
    Event.COMMIT: "the log entry exists",
    Event.FAIL: "the sidecar gives up (error, deadline, fenced, superseded)",
}

ENDED = frozenset(state for state, arrows in TABLE.items() if not arrows)
IN_FLIGHT = frozenset({State.STAGED, State.UPLOADING})
"""The sidecar alone can finish these; a new periodic save is skipped while one lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The state of one save and, once it aborted, why."""

    state: State = State.IDLE
    cause: str = ""

    def on(self, event: Event, cause: str = "") -> Lifecycle:
        """Lifecycle after `event`; raises `IllegalEvent` when the table has no such arrow."""
        return replace(self, state=after(TABLE, self.state, event, where="save lifecycle"), cause=cause)

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to this save any more."""
        return self.state in ENDED


def reference() -> str:
    """The lifecycle page of the reference, in Markdown."""
    return page("Life of a save", "sidecar/deltashard_sidecar/save/lifecycle.py", TABLE, MEANING)
