"""Pack files being filled: reserve a range, write it from any thread, seal the file when it is full.

A pack is a sequence of frames, each at a multiple of 64 bytes, without header or trailer: the frame headers suffice to
walk it. Locally a pack is a file in the cache directory (see `pack_cache`). It is uploaded from a read-only mapping of
that file and then remains as the local cache. Its bytes are never copied to the heap.
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
"""A pack is sealed when the next frame would exceed this size: one PUT, no multipart leftovers."""
MAX_PACK_BYTES = 1 << 32
"""Upper bound that a reader accepts: far above what is written, far below overflow."""
ALIGN = 64

_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CacheFull(EnvironmentFault):
    """The cache's disk or byte budget is full, and eviction cannot make room."""

    cause = Cause.UNAVAILABLE


class CacheUnusable(EnvironmentFault):
    """The cache directory is unusable: another process owns it, or its file system fails."""


def disk_error(error: OSError, path: Path) -> EnvironmentFault:
    """Return the error for a failed file operation in the cache directory."""
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
    """One pack file being filled, created by `PackCache.create`. Callers must serialise `reserve`."""

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
        """Whether `length` bytes (rounded up to 64) fit."""
        return self._end(length) <= self.capacity_bytes

    def _end(self, length: int) -> int:
        return self.size_bytes + -(-length // ALIGN) * ALIGN

    def reserve(self, length: int) -> int:
        """Reserve `length` bytes (rounded up to 64), which must fit. Returns their offset."""
        if not self.fits(length):
            raise InternalBug(f"no place for {length} bytes", where=str(self.path))
        offset, self.size_bytes = self.size_bytes, self._end(length)
        return offset

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at a reserved offset, from any thread. A full disk evicts other packs first.

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
        """Set the file's final size and close it. No write may be in progress. Idempotent.

        No fsync: the store is authoritative, and every frame read from the cache is verified by its hash.
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
