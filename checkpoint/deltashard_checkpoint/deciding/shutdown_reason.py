"""What a checkpoint says of its trainer's end: who comes back to one that an end asked for has lost nothing. Pure."""

from __future__ import annotations

from typing import Protocol

ROUTINE_REASONS = frozenset({"timer", "steps", "baseline", "user"})
"""Reasons of saves that say nothing of the trainer's end."""
CLOSE = "close"
TERMINATION_REASONS = frozenset({"sigterm", "stopping", "eviction"})
"""Reasons of a pod or process that is going; in a group others may stay."""


class HasDirective(Protocol):
    """A checkpoint's entry, as far as it says what asked for it."""

    @property
    def directive(self) -> str:
        """The reason comes first."""


def user_reason(said: str) -> str:
    """The reason of a save that a user asked for: never one that means an end."""
    return f"user {said}" if said == CLOSE or said in TERMINATION_REASONS else said


def has_ended(checkpoint: HasDirective, world_size: int) -> bool:
    """Whether it is certain that its trainers ended with it: they closed, or the only one was told to go."""
    reason = checkpoint.directive.partition(";")[0]
    return reason == CLOSE or (world_size == 1 and reason in TERMINATION_REASONS)


def is_shutdown_save(checkpoint: HasDirective) -> bool:
    """Whether a trainer's end (a close, an eviction) asked for it, as far as the entry itself tells."""
    return checkpoint.directive.partition(";")[0] not in ROUTINE_REASONS
