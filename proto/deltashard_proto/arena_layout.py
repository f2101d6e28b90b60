"""Layout of the arena, the one shared-memory file of a pod: the half of the trainer-sidecar contract that is not gRPC.

    header page (4096 B) | 64 control lines of 64 B | blocks of `block_bytes`

The sidecar creates, sizes, pre-faults and owns it; trainers map it. A control line belongs to one local rank and
every field of it has a single writer, so plain aligned 8-byte stores are enough and `Checkpointer.step()` reads it
without a system call. A block holds record batches: sections in the fixed order ids, weights, fields, each starting
at a multiple of 64 bytes (`sections`), or chunks of blobs. The sidecar grants blocks, trainers write only those.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x31414E4552414453  # "SDARENA1", little endian
VERSION = 1
HEADER_BYTES = 4096
LINE_BYTES = 64
LINES = 64
BLOCKS_OFFSET = HEADER_BYTES + LINES * LINE_BYTES
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

# Words of the header page.
_MAGIC, _VERSION, _EPOCH, _BLOCK_BYTES, _BLOCKS, _SIDECAR_PID = 0, 1, 2, 3, 4, 5


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
    """What the header page says."""

    epoch: int
    block_bytes: int
    blocks: int
    sidecar_pid: int

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return BLOCKS_OFFSET + self.blocks * self.block_bytes


class ArenaError(Exception):
    """The file is not an arena of this version, or is smaller than its header says."""


class Arena:
    """A mapping of the arena file. `create` is the sidecar's, `open` the trainers'."""

    def __init__(self, path: Path, mapping: mmap.mmap, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._map = mapping
        self.view = memoryview(mapping)
        self.words = self.view[:BLOCKS_OFFSET].cast("Q")

    @classmethod
    def create(cls, path: Path, *, blocks: int, block_bytes: int, epoch: int) -> Arena:
        """Create or re-open `path` at exactly this size with every page allocated (ENOSPC here, never SIGBUS later).

        A live arena is never truncated: a re-opened file may only keep or grow its size.
        """
        size = BLOCKS_OFFSET + blocks * block_bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            if os.fstat(fd).st_size > size:
                blocks = (os.fstat(fd).st_size - BLOCKS_OFFSET) // block_bytes
                size = BLOCKS_OFFSET + blocks * block_bytes
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        arena = cls(path, mapping, fd)
        mapping.madvise(mmap.MADV_DONTFORK)
        header = arena.words
        header[_MAGIC] = 0
        header[_VERSION], header[_EPOCH], header[_BLOCK_BYTES] = VERSION, epoch, block_bytes
        header[_BLOCKS], header[_SIDECAR_PID] = blocks, os.getpid()
        header[_MAGIC] = MAGIC
        return arena

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Map an existing arena; raises `ArenaError` when it is not one."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls.mapped(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def mapped(cls, path: Path, fd: int) -> Arena:
        """Map the arena that `fd` has open; raises `ArenaError` when it is not one."""
        size = os.fstat(fd).st_size
        if size < BLOCKS_OFFSET:
            raise ArenaError(f"{path}: {size} bytes is no arena")
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        arena = cls(path, mapping, fd)
        # Forked DataLoader workers must neither write blocks nor keep them alive.
        mapping.madvise(mmap.MADV_DONTFORK)
        if arena.words[_MAGIC] != MAGIC or arena.words[_VERSION] != VERSION:
            raise ArenaError(
                f"{path}: magic or version differs (version {arena.words[_VERSION]}, ours {VERSION})"
            )
        if arena.shape.total_bytes > size:
            raise ArenaError(f"{path}: {size} bytes, header says {arena.shape.total_bytes}")
        return arena

    @property
    def shape(self) -> ArenaShape:
        """The header page, decoded."""
        w = self.words
        return ArenaShape(
            epoch=w[_EPOCH], block_bytes=w[_BLOCK_BYTES], blocks=w[_BLOCKS], sidecar_pid=w[_SIDECAR_PID]
        )

    def line(self, local_rank: int) -> memoryview:
        """The control line of a local rank as 8 words of 64 bits."""
        if not 0 <= local_rank < LINES:
            raise ArenaError(f"local rank {local_rank}: an arena has {LINES} control lines")
        start = (HEADER_BYTES + local_rank * LINE_BYTES) // 8
        return self.words[start : start + LINE_BYTES // 8]

    def line_lock_range(self, local_rank: int) -> tuple[int, int]:
        """(offset, length) of the control line in the file, for the POSIX record lock a live trainer holds on it."""
        return HEADER_BYTES + local_rank * LINE_BYTES, LINE_BYTES

    def block(self, index: int) -> memoryview:
        """The bytes of one block."""
        shape = self.shape
        if not 0 <= index < shape.blocks:
            raise ArenaError(f"block {index} of {shape.blocks}")
        start = BLOCKS_OFFSET + index * shape.block_bytes
        return self.view[start : start + shape.block_bytes]

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
