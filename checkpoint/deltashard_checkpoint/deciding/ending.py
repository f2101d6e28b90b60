"""What a checkpoint says of its trainer's end: who comes back to one that an end asked for has lost nothing. Pure."""

from __future__ import annotations

from typing import Protocol

ORDINARY = frozenset({"timer", "steps", "baseline", "user"})
"""Reasons of saves that say nothing of the trainer's end."""


class Reasoned(Protocol):
    """A checkpoint's entry, as far as it says what asked for it."""

    @property
    def directive(self) -> str:
        """The reason comes first."""


def ends(checkpoint: Reasoned) -> bool:
    """Whether a trainer's end (a close, an eviction) asked for it, as far as the entry itself tells."""
    return checkpoint.directive.partition(";")[0] not in ORDINARY
