"""Save reasons that indicate a trainer's shutdown: a restart from such a checkpoint lost nothing. Pure."""

from __future__ import annotations

from typing import Protocol

ROUTINE_REASONS = frozenset({"timer", "steps", "baseline", "user"})
"""Reasons of saves that are unrelated to a shutdown."""
CLOSE = "close"
TERMINATION_REASONS = frozenset({"sigterm", "stopping", "eviction"})
"""Reasons of a pod or process that terminates; other members of a group may stay."""


class HasDirective(Protocol):
    """A checkpoint's entry, as far as its reason is concerned."""

    @property
    def directive(self) -> str:
        """The reason is the first field."""


def user_reason(requested: str) -> str:
    """Return the reason of a save that a user requested: never one that indicates a shutdown."""
    return f"user {requested}" if requested == CLOSE or requested in TERMINATION_REASONS else requested


def has_ended(checkpoint: HasDirective, world_size: int) -> bool:
    """Whether its trainers certainly ended with it: they closed, or the only one was terminated."""
    reason = checkpoint.directive.partition(";")[0]
    return reason == CLOSE or (world_size == 1 and reason in TERMINATION_REASONS)


def is_shutdown_save(checkpoint: HasDirective) -> bool:
    """Whether a trainer's shutdown (a close, an eviction) requested it, as far as the entry shows."""
    return checkpoint.directive.partition(";")[0] not in ROUTINE_REASONS
