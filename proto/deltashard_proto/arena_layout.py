"""Layout of the arena, the one shared-memory file of a pod: the half of the trainer-sidecar contract that is not gRPC.

    64 control lines of 64 B | blocks of `block_bytes`

The sidecar creates, sizes, pre-faults and owns it; trainers map it. Its shape is in no byte of it, which anybody who
maps it may write: the sidecar has it from its settings, and tells each trainer at Attach. A control line belongs to one
local rank and every field of it has a single writer, so plain aligned 8-byte stores are enough and
`Checkpointer.step()` reads it without a system call. A block holds record batches: sections in the fixed order ids,
weights, fields, each starting at a multiple of 64 bytes (`sections`), or chunks of blobs. The sidecar grants blocks,
trainers write only those.
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
"""A stored frame is never larger, so a block of the default size always holds one."""
BATCH_BYTES = MAX_FRAME_BYTES - (256 << 10)
"""A record batch's sections together: room is left for the frame's header, ids and metadata."""

# Words (8 bytes each) of a control line. trainer -> sidecar:
STEP, STEP_TIME_NS, STALL_NS = 0, 1, 2
# sidecar -> trainer:
SAVE_AT_STEP, URGENT, HEARTBEAT_NS = 3, 4, 5
# trainer -> sidecar, once more: since when a save that is due is blocked (Unix time; 0: none is), and why.
BLOCKED_SINCE_NS, BLOCKED_WHY = 6, 7
NEVER = (1 << 64) - 1
"""SAVE_AT_STEP when nothing is due: `step >= line[SAVE_AT_STEP]` is the whole test."""


def aligned(n: int) -> int:
    """`n` rounded up to the section alignment of 64 bytes."""
    return -(-n // ALIGN) * ALIGN


def sections(rows: int, *, contiguous: bool, row_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of a batch's sections, and their end, relative to the batch's offset in its block.

    `row_bytes` are the bytes per row of the weights and then of each field, in schema order. The first section is
    the row ids as int64 [rows], empty when the batch is contiguous.
    """
    offsets = []
    at = 0
    for width in (0 if contiguous else 8, *row_bytes):
        offsets.append(at)
        at = aligned(at + rows * width)
    return offsets, at


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShape:
    """How large the file is, and its blocks."""

    block_bytes: int
    blocks: int

    @classmethod
    def within(cls, total_bytes: int, *, block_bytes: int) -> ArenaShape:
        """As many whole blocks as a file of `total_bytes` holds."""
        return cls(block_bytes=block_bytes, blocks=max(0, total_bytes - BLOCKS_OFFSET) // max(1, block_bytes))

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return BLOCKS_OFFSET + self.blocks * self.block_bytes


class ArenaError(Exception):
    """The file is smaller than the arena that it should hold."""


class Arena:
    """A mapping of the arena file. `create` is the sidecar's, `mapped` the trainers'; both take over `fd`."""

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
        """Give the file that `fd` has open this shape, every page allocated: ENOSPC here, not SIGBUS later.

        A live arena is never truncated: a re-opened file may only keep or grow its size.
        """
        shape = ArenaShape.within(max(shape.total_bytes, os.fstat(fd).st_size), block_bytes=shape.block_bytes)
        os.posix_fallocate(fd, 0, shape.total_bytes)
        return cls.mapped(path, fd, shape)

    @classmethod
    def mapped(cls, path: Path, fd: int, shape: ArenaShape) -> Arena:
        """Map the arena that `fd` has open; raises `ArenaError` when the file is too small for the shape."""
        size = os.fstat(fd).st_size
        if size < shape.total_bytes or shape.blocks < 1:
            raise ArenaError(f"{path}: {size} bytes, the arena has {shape.total_bytes}")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return cls(path, fd, shape, mmap.mmap(fd, shape.total_bytes, flags=flags))

    @property
    def whole(self) -> bool:
        """Whether the file still has every byte: what was cut off must not be touched (SIGBUS)."""
        return os.fstat(self.fd).st_size >= self.shape.total_bytes

    def line(self, local_rank: int) -> memoryview:
        """The control line of a local rank as 8 words of 64 bits."""
        if not 0 <= local_rank < LINES:
            raise ArenaError(f"local rank {local_rank}: an arena has {LINES} control lines")
        start = local_rank * LINE_BYTES // 8
        return self.words[start : start + LINE_BYTES // 8]

    def line_lock_range(self, local_rank: int) -> tuple[int, int]:
        """(offset, length) of the control line in the file, for the POSIX record lock a live trainer holds on it."""
        return local_rank * LINE_BYTES, LINE_BYTES

    def block(self, index: int) -> memoryview:
        """The bytes of one block."""
        if not 0 <= index < self.shape.blocks:
            raise ArenaError(f"block {index} of {self.shape.blocks}")
        start = BLOCKS_OFFSET + index * self.shape.block_bytes
        return self.view[start : start + self.shape.block_bytes]

    def release_blocks(self) -> None:
        """Give the memory of all blocks back; whoever still looks at one sees zeros. `create` allocates it anew."""
        self._map.madvise(mmap.MADV_REMOVE, BLOCKS_OFFSET, len(self.view) - BLOCKS_OFFSET)

    def unmap(self) -> bool:
        """Unmap; False when something still looks at the memory: the kernel unmaps it once this object is gone, too."""
        self.words.release()
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            return False
        return True

    def close(self) -> None:
        """Unmap when nothing refers to the mapping any more, and close the file (which drops its record locks)."""
        self.unmap()
        os.close(self.fd)
