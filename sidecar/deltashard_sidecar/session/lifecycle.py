"""Life of one session, as data: ATTACHED -> OPEN -> FENCED, and CLOSED from anywhere.

`TABLE` says for every state which events may happen and where they lead; there is no other place that knows. What each
state means to the rest:

- ATTACHED: no attempt is open: there is nothing to save.
- OPEN: its attempt may commit. A trainer whose restore fell back opens another one.
- FENCED: its attempt can never commit again, and every save is refused; only a new attempt helps.
- CLOSED: the end; calls are answered with `UnknownSession`. What had begun before goes on alone, so an attempt may yet
  be opened, or fenced, which concerns nobody here any more.

docs/reference/session-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from deltashard_checkpoint.transition import after, page


class State(Enum):
    """Where a session is."""

    ATTACHED = "ATTACHED"
    OPEN = "OPEN"
    FENCED = "FENCED"
    CLOSED = "CLOSED"


class Event(Enum):
    """What may happen to a session."""

    RESUME = "resume"
    OPEN = "open"
    FENCE = "fence"
    DETACH = "detach"
    LOSE = "lose"
    REPLACE = "replace"
    STOP = "stop"


_ENDS: dict[Event, State] = {
    Event.DETACH: State.CLOSED,
    Event.LOSE: State.CLOSED,
    Event.REPLACE: State.CLOSED,
    Event.STOP: State.CLOSED,
}

TABLE: dict[State, dict[Event, State]] = {
    State.ATTACHED: {Event.RESUME: State.OPEN, Event.OPEN: State.OPEN, **_ENDS},
    State.OPEN: {Event.OPEN: State.OPEN, Event.FENCE: State.FENCED, **_ENDS},
    State.FENCED: {Event.OPEN: State.OPEN, Event.FENCE: State.FENCED, **_ENDS},
    State.CLOSED: {Event.OPEN: State.CLOSED, Event.FENCE: State.CLOSED, **_ENDS},
}

MEANING: dict[Event, str] = {
    Event.RESUME: "it attached in the middle of its attempt (the sidecar was restarted, or the tables changed)",
    Event.OPEN: "an attempt was opened for it",
    Event.FENCE: "a save failed because a newer attempt is open",
    Event.DETACH: "the trainer left",
    Event.LOSE: "the trainer's process is gone",
    Event.REPLACE: "its rank attached again",
    Event.STOP: "the sidecar ends",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """State of one session."""

    state: State = State.ATTACHED

    def on(self, event: Event) -> Lifecycle:
        """Lifecycle after `event`; raises `IllegalEvent` when the table has no such arrow."""
        return replace(self, state=after(TABLE, self.state, event, where="session lifecycle"))


def reference() -> str:
    """The page of the reference, in Markdown."""
    return page("Life of a session", "sidecar/deltashard_sidecar/session/lifecycle.py", TABLE, MEANING)
