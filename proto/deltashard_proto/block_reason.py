"""Why a save that is due does not happen: the words that trainer and sidecar share, and their form in a control line.

The values are short: events, counts of skipped saves and the CheckpointRun use them. The log has more.
"""

from __future__ import annotations

from enum import StrEnum


class BlockReason(StrEnum):
    """A closed set; the place in it is the number in a control line, so that new ones come last."""

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
    """The word of a control line that says it; `rank`: the one that blocks the save."""
    return 1 + _ALL.index(reason) + (0 if rank is None else (1 + rank) << 8)


def format_block_reason(word: int) -> str:
    """What a word of a control line says, for people; empty: nothing, or of a newer trainer."""
    number, rank = (word & 0xFF) - 1, (word >> 8) - 1
    if not 0 <= number < len(_ALL):
        return ""
    return _ALL[number] + (f" (rank {rank})" if rank >= 0 else "")
