"""Where the removal of a finished run's bytes stands. Pure; `reclaim_judgement` has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_TRIES = 5
"""Jobs that may fail before it is left to a person."""
MAX_MESSAGE = 1024
"""Characters that a status takes."""


class ReclaimState(StrEnum):
    """Where it stands."""

    WAITING = "Waiting"
    """For the grace to end, or for pods to go."""
    REMOVING = "Removing"
    """A Job is at it."""
    REMOVED = "Removed"
    KEPT = "Kept"
    """Something speaks against it."""
    FAILED = "Failed"
    """The Job did not do it; it is tried again, up to `MAX_TRIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Of one run."""

    state: ReclaimState
    since_s: float
    message: str
    due_s: float = 0.0
    """When the bytes are to be removed, or it is to be tried again."""
    tries: int = 0
    """Jobs that were made."""

    @property
    def is_settled(self) -> bool:
        """Whether it is a Job's matter, or was: at work, done, or kept for what the Job found."""
        if self.state is ReclaimState.KEPT:
            return self.tries > 0
        return self.state in {ReclaimState.REMOVING, ReclaimState.REMOVED}

    @property
    def pending(self) -> bool:
        """Whether something is still to be done: the CheckpointRun is kept for it."""
        if self.state is ReclaimState.FAILED:
            return self.tries < MAX_TRIES
        return self.state in {ReclaimState.WAITING, ReclaimState.REMOVING}
