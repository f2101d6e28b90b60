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


class SessionState(Enum):
    """Where a session is."""

    ATTACHED = "ATTACHED"
    OPEN = "OPEN"
    FENCED = "FENCED"
    CLOSED = "CLOSED"


class SessionEvent(Enum):
    """What may happen to a session."""

    RESUME = "resume"
    OPEN = "open"
    FENCE = "fence"
    DETACH = "detach"
    LOSE = "lose"
    REPLACE = "replace"
    STOP = "stop"


_ENDS: dict[SessionEvent, SessionState] = {
    SessionEvent.DETACH: SessionState.CLOSED,
    SessionEvent.LOSE: SessionState.CLOSED,
    SessionEvent.REPLACE: SessionState.CLOSED,
    SessionEvent.STOP: SessionState.CLOSED,
}

TABLE: dict[SessionState, dict[SessionEvent, SessionState]] = {
    SessionState.ATTACHED: {
        SessionEvent.RESUME: SessionState.OPEN,
        SessionEvent.OPEN: SessionState.OPEN,
        **_ENDS,
    },
    SessionState.OPEN: {
        SessionEvent.OPEN: SessionState.OPEN,
        SessionEvent.FENCE: SessionState.FENCED,
        **_ENDS,
    },
    SessionState.FENCED: {
        SessionEvent.OPEN: SessionState.OPEN,
        SessionEvent.FENCE: SessionState.FENCED,
        **_ENDS,
    },
    SessionState.CLOSED: {
        SessionEvent.OPEN: SessionState.CLOSED,
        SessionEvent.FENCE: SessionState.CLOSED,
        **_ENDS,
    },
}

MEANING: dict[SessionEvent, str] = {
    SessionEvent.RESUME: "it attached in the middle of its attempt (the sidecar was restarted, or the tables changed)",
    SessionEvent.OPEN: "an attempt was opened for it",
    SessionEvent.FENCE: "a save failed because a newer attempt is open",
    SessionEvent.DETACH: "the trainer left",
    SessionEvent.LOSE: "the trainer's process is gone",
    SessionEvent.REPLACE: "its rank attached again",
    SessionEvent.STOP: "the sidecar ends",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLifecycle:
    """State of one session."""

    state: SessionState = SessionState.ATTACHED

    def on(self, event: SessionEvent) -> SessionLifecycle:
        """Lifecycle after `event`; raises `IllegalEvent` when the table has no such arrow."""
        return replace(self, state=after(TABLE, self.state, event, where="session lifecycle"))


def reference() -> str:
    return page("Life of a session", "sidecar/deltashard_sidecar/session/lifecycle.py", TABLE, MEANING)
