"""Reasons for which a due save is blocked, shared by trainer and sidecar, and their encoding in a control line.

The values are short because events, counts of skipped saves and the CheckpointRun use them. The log has details.
"""

from __future__ import annotations

from enum import StrEnum


class BlockReason(StrEnum):
    """A closed set. The position is the number in a control line, so new members are appended."""

    TORN = "torn"
    STEPPED = "stepped"
    ACCUMULATING = "accumulating"
    MOVED = "moved on"
    IN_FLIGHT = "in flight"
    SIDECAR_DISCONNECTED = "sidecar disconnected"
    BACK_OFF = "backing off"
    RANKS = "ranks differ"
    VETOED = "vetoed"
    NOT_REQUESTED = "not requested"
    UNOPENED = "attempt not open"


_ALL = tuple(BlockReason)


def encode_block_reason(reason: BlockReason, rank: int | None = None) -> int:
    """Encode a reason for a control line; `rank` is the one that blocks the save."""
    return 1 + _ALL.index(reason) + (0 if rank is None else (1 + rank) << 8)


def format_block_reason(word: int) -> str:
    """Format a control line's reason for display; empty for none, or one of a newer trainer."""
    number, rank = (word & 0xFF) - 1, (word >> 8) - 1
    if not 0 <= number < len(_ALL):
        return ""
    return _ALL[number] + (f" (rank {rank})" if rank >= 0 else "")
