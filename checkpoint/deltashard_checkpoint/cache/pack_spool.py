"""Pack files while they are being filled: reserve a place, write at it from any thread, seal when full.

A pack is frames one after another, each at a multiple of 64 bytes, without header or trailer: a frame's own header is
enough to walk it. On this machine a pack is a file in the cache directory (see `pack_cache`); it is uploaded from a
mapping of that file, whose bytes no longer change, and then stays there as the local cache. Nothing of it lives on the
heap.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import EnvironmentFault, InternalBug

PACK_BYTES = 64 << 20
"""A pack is sealed when the next frame would make it larger: one PUT, no multipart debris."""
MAX_PACK_BYTES = 1 << 32
"""What a reader accepts: far above what is written, far below overflow."""
ALIGN = 64

_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CacheFull(EnvironmentFault):
    """The cache directory's disk or byte budget has no room that could be made by evicting."""

    cause = Cause.UNAVAILABLE


class CacheUnusable(EnvironmentFault):
    """The cache directory cannot be used: owned by another process, or its file system fails."""


def disk_error(error: OSError, path: Path) -> EnvironmentFault:
    """The named error for a failed file operation in the cache directory."""
    if error.errno in _NO_SPACE_ERRNOS:
        return CacheFull(
            f"no room on the cache disk ({error.strerror})",
            where=str(path),
            remedy="give the cache volume more space, or lower the cache budget below its size",
        )
    return CacheUnusable(
        f"cache file cannot be written: {error}", where=str(path), remedy="check the cache volume"
    )


class PackSpool:
    """One pack file being filled; created by `PackCache.create`. `reserve` is the caller's to serialise."""

    def __init__(
        self, *, key: str, path: Path, fd: int, capacity_bytes: int, make_room: Callable[[], bool]
    ) -> None:
        self.key = key
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.size_bytes = 0
        self._fd = fd
        self._make_room = make_room
        self._closing = threading.Lock()

    def fits(self, length: int) -> bool:
        """Whether there is a place of `length` bytes (rounded up to 64)."""
        return self._end(length) <= self.capacity_bytes

    def _end(self, length: int) -> int:
        return self.size_bytes + -(-length // ALIGN) * ALIGN

    def reserve(self, length: int) -> int:
        """Offset of a fresh place of `length` bytes (rounded up to 64), which must fit."""
        if not self.fits(length):
            raise InternalBug(f"no place for {length} bytes", where=str(self.path))
        offset, self.size_bytes = self.size_bytes, self._end(length)
        return offset

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at a reserved offset; from any thread. On a full disk others' packs are evicted first.

        Raises `CacheFull`, or `CacheUnusable` for any other failure of the disk.
        """
        view = data.cast("B")
        while view:
            try:
                written = os.pwrite(self._fd, view, offset)
            except OSError as error:
                if error.errno in _NO_SPACE_ERRNOS and self._make_room():
                    continue
                raise disk_error(error, self.path) from error
            view = view[written:]
            offset += written

    def close(self) -> None:
        """Set the file's final size and close it; no more writes may be under way. Idempotent.

        No fsync: the store is the authority, and every frame read from the cache is hash-checked.
        """
        with self._closing:
            fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.ftruncate(fd, self.size_bytes)
        except OSError as error:
            raise disk_error(error, self.path) from error
        finally:
            os.close(fd)

    @property
    def closed(self) -> bool:
        return self._fd < 0
