"""Blocks granted to a trainer before its save begins, to copy rows into them while it trains."""

from __future__ import annotations

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.block import Use


class Preparation:
    """Prepared blocks of one stream, used by its thread only. A save that begins on the stream takes them over.

    Without a save, the stream's end releases them if the trainer's copies have stopped (`stopped`), and quarantines
    them otherwise.
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
        """Grant blocks for the trainer to write now; all its earlier copies have stopped."""
        self._keeper.copies_stopped(self._rank)
        granted = self._keeper.grant(self._rank)
        self._blocks.update(granted)
        return granted

    def transfer_blocks(self) -> int:
        blocks, self._blocks = self._blocks, set()
        return len(blocks)
