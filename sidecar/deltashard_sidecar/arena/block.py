"""Ownership of the arena's blocks: free list, grants, quarantine. Pure bookkeeping, without the memory.

A block is always in exactly one state:

    FREE -> GRANTED (a trainer may write it) -> FILLED (handed over, being encoded) -> FREE
    FREE -> SERVING (holds frames a trainer reads) -> FREE
    GRANTED | SERVING -> QUARANTINED (its stream broke while the trainer may be alive) -> FREE

IMPORTANT: a block leaves GRANTED only by a message of its trainer (a descriptor, a seal, an abort after its copies
stopped) or through quarantine, which ends when the rank's writer lock is free, or when the same process attached again
or began its next save. Granting a block that still has a live writer would mix two saves. After a restart the grants of
older epochs are unknown: no block is granted while a writer of an older epoch may live (`embargo`).

Saves never take the last `RESERVED_PER_RANK` free blocks per attached rank, so a restore always makes progress. Each
rank holds at most its fair share of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from deltashard_checkpoint.errors import InternalBug, UserError
from deltashard_proto.cause import Cause

RESERVED_PER_RANK = 2
MIN_BLOCKS_PER_RANK = 4


class Use(Enum):
    """What a block is used for."""

    FREE = "free"
    GRANTED = "granted"
    FILLED = "filled"
    SERVING = "serving"
    QUARANTINED = "quarantined"


class BlockError(InternalBug):
    """A block's use does not allow the requested transition."""


class NotGranted(UserError):
    """A trainer named a block that is not granted to it: of an older epoch, of another rank, or already closed."""

    cause = Cause.INVALID


@dataclass(slots=True)
class Block:
    """One block: its use, its rank, and the number of its batches that are not encoded yet."""

    index: int
    use: Use = Use.FREE
    rank: int = -1
    pending: int = 0


@dataclass(slots=True)
class BlockLedger:
    """All blocks of one arena. Not thread-safe: `ArenaKeeper` holds a lock around every call."""

    total: int
    block_bytes: int
    blocks: list[Block] = field(init=False)
    ranks: set[int] = field(default_factory=set)
    embargo: set[int] = field(default_factory=set)
    """Local ranks that held their writer lock when this epoch began and have neither released it nor attached since."""
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [Block(index) for index in range(self.total)]
        # A stack: the block freed last is granted first, because its pages are still in the CPU caches.
        self._free = list(range(self.total - 1, -1, -1))

    def admit(self, rank: int) -> bool:
        """Add `rank`; returns False if the arena is too small for one more."""
        if (len(self.ranks | {rank})) * MIN_BLOCKS_PER_RANK > self.total:
            return False
        self.ranks.add(rank)
        return True

    def remove_rank(self, rank: int) -> None:
        """Remove `rank`, after its streams have freed or quarantined its blocks."""
        self.ranks.discard(rank)

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> dict[str, int]:
        found = Counter(block.use.value for block in self.blocks)
        return {use.value: found.get(use.value, 0) for use in Use}

    def held(self, rank: int, *uses: Use) -> list[int]:
        return [block.index for block in self.blocks if block.rank == rank and block.use in uses]

    def grant(self, rank: int, limit: int = 1 << 30) -> list[int]:
        """Grant `rank` as many blocks as it may have: up to its fair share, without the restore reserve."""
        if self.embargo:
            return []
        ranks = max(1, len(self.ranks))
        reserve = ranks * RESERVED_PER_RANK
        share = max(1, (self.total - reserve) // ranks)
        room = min(share - len(self.held(rank, Use.GRANTED, Use.FILLED)), len(self._free) - reserve, limit)
        return [self._take(rank, Use.GRANTED) for _ in range(max(0, room))]

    def take_serving(self, rank: int) -> int | None:
        """Return a block to hold frames for `rank`, or None if it has all that it may hold.

        A rank can always get its reserved blocks. Beyond them it leaves the reserve of other ranks free.
        """
        ranks = max(1, len(self.ranks))
        mine = len(self.held(rank, Use.SERVING))
        others = (ranks - 1) * RESERVED_PER_RANK
        if self.embargo or not self._free or (mine >= RESERVED_PER_RANK and len(self._free) <= others):
            return None
        return self._take(rank, Use.SERVING)

    def _take(self, rank: int, use: Use) -> int:
        block = self.blocks[self._free.pop()]
        block.use, block.rank, block.pending = use, rank, 0
        return block.index

    def check_granted(self, rank: int, index: int) -> None:
        if not self._is_used_for(index, rank, Use.GRANTED):
            what = f"block {index} is not granted to local rank {rank}"
            remedy = "blocks of an older epoch or stream are void: restart the save"
            raise NotGranted(what, where="arena", remedy=remedy)

    def _is_used_for(self, index: int, rank: int, use: Use) -> bool:
        return 0 <= index < self.total and (self.blocks[index].rank, self.blocks[index].use) == (rank, use)

    def received(self, index: int) -> None:
        block = self._expect(index, Use.GRANTED)
        block.pending += 1

    def closed(self, index: int) -> bool:
        """Close a block after its last batch; returns whether that freed it."""
        block = self._expect(index, Use.GRANTED)
        block.use = Use.FILLED
        return self._free_if_done(block)

    def encoded(self, index: int) -> bool:
        """Count one batch of the block as encoded; returns whether that freed it."""
        block = self._expect(index, Use.GRANTED, Use.FILLED, Use.QUARANTINED)
        if block.pending < 1:
            raise BlockError(f"block {index} has no batch pending", where="arena")
        block.pending -= 1
        return self._free_if_done(block)

    def served(self, rank: int, index: int) -> None:
        if not self._is_used_for(index, rank, Use.SERVING):
            raise NotGranted(f"block {index} does not hold frames for local rank {rank}", where="arena")
        self._release(self.blocks[index])

    def quarantine(self, rank: int, use: Use, indexes: Collection[int] | None = None) -> list[int]:
        """Quarantine blocks (all or `indexes`) of a broken save (GRANTED) or restore (SERVING) stream; returns them."""
        moved = [index for index in self.held(rank, use) if indexes is None or index in indexes]
        for index in moved:
            self.blocks[index].use = Use.QUARANTINED
        return moved

    def release_granted(self, rank: int, indexes: Collection[int] | None = None) -> None:
        """Close the granted blocks of `rank` (only `indexes`, if given): its trainer's copies have stopped."""
        for index in self.held(rank, Use.GRANTED):
            if indexes is None or index in indexes:
                self.closed(index)

    def release_serving(self, rank: int) -> None:
        for index in self.held(rank, Use.SERVING):
            self._release(self.blocks[index])

    def quarantined_ranks(self) -> set[int]:
        return {block.rank for block in self.blocks if block.use is Use.QUARANTINED}

    def release_quarantined(self, rank: int) -> int:
        """Free the quarantined blocks of `rank`, which has no older writer any more; returns their number."""
        freed = 0
        for block in map(self.blocks.__getitem__, self.held(rank, Use.QUARANTINED)):
            block.use = Use.FILLED
            freed += self._free_if_done(block)
        return freed

    def _free_if_done(self, block: Block) -> bool:
        if block.use is Use.FILLED and block.pending == 0:
            self._release(block)
            return True
        return False

    def _release(self, block: Block) -> None:
        block.use, block.rank, block.pending = Use.FREE, -1, 0
        self._free.append(block.index)

    def _expect(self, index: int, *uses: Use) -> Block:
        block = self.blocks[index]
        if block.use not in uses:
            raise BlockError(f"block {index} is {block.use.value}", where="arena")
        return block
