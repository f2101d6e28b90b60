"""Layout of the arena, the shared-memory file of a pod: the part of the trainer-sidecar contract that is not gRPC.

    64 control lines of 64 B | blocks of `block_bytes`

The sidecar creates, sizes, pre-faults and owns the file; trainers map it. The file does not contain its shape, because
every process that maps it can write it: the sidecar takes the shape from its settings and sends it in Attach. Each
control line belongs to one local rank, and each of its fields has a single writer, so aligned 8-byte stores suffice and
`Checkpointer.step()` reads it without a system call. A block holds record batches, with the sections ids, weights and
fields in this order, each at a multiple of 64 bytes (`sections`), or chunks of blobs. Trainers write only blocks that
the sidecar has granted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 64
LINES = 64
BLOCKS_OFFSET = LINES * LINE_BYTES
ALIGN = 64
DEFAULT_BLOCK_BYTES = 8 << 20
MAX_FRAME_BYTES = 8 << 20
"""Maximum size of a stored frame, so a block of the default size always holds one."""
BATCH_BYTES = MAX_FRAME_BYTES - (256 << 10)
"""Maximum size of a record batch's sections, which leaves space for the frame's header, ids and metadata."""

# Positions of the 8-byte fields in a control line. trainer -> sidecar:
STEP, STEP_TIME_NS, STALL_NS = 0, 1, 2
# sidecar -> trainer:
SAVE_AT_STEP, URGENT, HEARTBEAT_NS = 3, 4, 5
# trainer -> sidecar again: since when a due save is blocked (Unix time; 0: not blocked), and why.
BLOCKED_SINCE_NS, BLOCKED_WHY = 6, 7
NEVER = (1 << 64) - 1
"""Value of SAVE_AT_STEP when nothing is due: `step >= line[SAVE_AT_STEP]` is the whole check."""


def aligned(n: int) -> int:
    """Return `n` rounded up to the section alignment of 64 bytes."""
    return -(-n // ALIGN) * ALIGN


def sections(rows: int, *, contiguous: bool, row_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of a batch's sections, and their end, relative to the batch's offset in its block.

    `row_bytes` are the bytes per row of the weights and then of each field, in schema order. The first section holds
    the row ids as int64 [rows], and is empty if the batch is contiguous.
    """
    offsets = []
    at = 0
    for width in (0 if contiguous else 8, *row_bytes):
        offsets.append(at)
        at = aligned(at + rows * width)
    return offsets, at


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShape:
    """Size of the file and its blocks."""

    block_bytes: int
    blocks: int

    @classmethod
    def within(cls, total_bytes: int, *, block_bytes: int) -> ArenaShape:
        """Return the shape with as many whole blocks as a file of `total_bytes` holds."""
        return cls(block_bytes=block_bytes, blocks=max(0, total_bytes - BLOCKS_OFFSET) // max(1, block_bytes))

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return BLOCKS_OFFSET + self.blocks * self.block_bytes


class ArenaError(Exception):
    """The file is smaller than its arena."""


class Arena:
    """A mapping of the arena file, by `create` in the sidecar and `mapped` in trainers; both take ownership of `fd`."""

    def __init__(self, path: Path, fd: int, shape: ArenaShape, mapping: mmap.mmap) -> None:
        self.path = path
        self.fd = fd
        self.shape = shape
        self._map = mapping
        self.view = memoryview(mapping)
        self.words = self.view[:BLOCKS_OFFSET].cast("Q")
        # Forked DataLoader workers must neither write blocks nor keep them alive.
        mapping.madvise(mmap.MADV_DONTFORK)

    @classmethod
    def create(cls, path: Path, fd: int, shape: ArenaShape) -> Arena:
        """Give the open file the shape and allocate every page: ENOSPC here instead of SIGBUS later.

        A live arena is never truncated: a reopened file keeps its size or grows.
        """
        shape = ArenaShape.within(max(shape.total_bytes, os.fstat(fd).st_size), block_bytes=shape.block_bytes)
        os.posix_fallocate(fd, 0, shape.total_bytes)
        return cls.mapped(path, fd, shape)

    @classmethod
    def mapped(cls, path: Path, fd: int, shape: ArenaShape) -> Arena:
        """Map the open arena file; raises `ArenaError` if it is too small for the shape."""
        size = os.fstat(fd).st_size
        if size < shape.total_bytes or shape.blocks < 1:
            raise ArenaError(f"{path}: {size} bytes, the arena has {shape.total_bytes}")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return cls(path, fd, shape, mmap.mmap(fd, shape.total_bytes, flags=flags))

    @property
    def whole(self) -> bool:
        """Return whether the file has its full size; access beyond its end would raise SIGBUS."""
        return os.fstat(self.fd).st_size >= self.shape.total_bytes

    def line(self, local_rank: int) -> memoryview:
        """Return the control line of a local rank as eight 64-bit integers."""
        if not 0 <= local_rank < LINES:
            raise ArenaError(f"local rank {local_rank}: an arena has {LINES} control lines")
        start = local_rank * LINE_BYTES // 8
        return self.words[start : start + LINE_BYTES // 8]

    def line_lock_range(self, local_rank: int) -> tuple[int, int]:
        """Return the control line's (offset, length) in the file; a live trainer holds a POSIX record lock on it."""
        return local_rank * LINE_BYTES, LINE_BYTES

    def block(self, index: int) -> memoryview:
        if not 0 <= index < self.shape.blocks:
            raise ArenaError(f"block {index} of {self.shape.blocks}")
        start = BLOCKS_OFFSET + index * self.shape.block_bytes
        return self.view[start : start + self.shape.block_bytes]

    def release_blocks(self) -> None:
        """Free the memory of all blocks; existing views read zeros. `create` allocates it again."""
        self._map.madvise(mmap.MADV_REMOVE, BLOCKS_OFFSET, len(self.view) - BLOCKS_OFFSET)

    def unmap(self) -> bool:
        """Unmap; return False while views exist: the kernel then unmaps after this object is gone."""
        self.words.release()
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            return False
        return True

    def close(self) -> None:
        """Unmap if no view exists, and close the file (which drops its record locks)."""
        self.unmap()
        os.close(self.fd)
