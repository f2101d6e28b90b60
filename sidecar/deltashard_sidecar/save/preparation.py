"""Blocks that a trainer holds before its cut begins, to copy rows into them while it trains."""

from __future__ import annotations

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.block import Use


class Preparation:
    """Of one stream, used by its thread. The blocks pass to the save that begins on the stream.

    If none does, the stream's end decides about them as it does for a save: with the trainer's word that its copies
    have stopped (`stopped`) they are free, without it they are quarantined.
    """

    def __init__(self, keeper: ArenaKeeper, rank: int) -> None:
        self._keeper = keeper
        self._rank = rank
        self._blocks: set[int] = set()
        self.stopped = False

    def close(self) -> None:
        if self._blocks and self.stopped:
            self._keeper.release_granted(self._rank, self._blocks)
        elif self._blocks:
            self._keeper.quarantine(self._rank, Use.GRANTED, self._blocks)

    def grant(self) -> list[int]:
        """Blocks that the trainer may write now; it has begun anew, whatever it copied before."""
        self._keeper.copies_stopped(self._rank)
        granted = self._keeper.grant(self._rank)
        self._blocks.update(granted)
        return granted

    def transfer_blocks(self) -> int:
        """The blocks are a save's from now on; returns how many."""
        blocks, self._blocks = self._blocks, set()
        return len(blocks)
