"""Local pack cache: a directory with a byte budget and LRU eviction.

This process spools every pack into the cache, uploads it from there and keeps it while there is room, so a restarted
container restores without the store. Each pack is one file, named by the hash of its store key:

    LOCK             POSIX record lock of the owner (`cache_dir`)
    {hash}.spool     being filled; leftovers of a dead owner are removed at start
    {hash}.pack      complete

The cache survives a restart and is not authoritative: readers verify the hash of every frame and call `drop` for a
bad pack. Pinned packs (being filled or uploaded) are never evicted. If pinned packs alone fill the budget,
`create_all` waits for an upload to end, with a deadline.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from deltashard_checkpoint.cache import cache_dir
from deltashard_checkpoint.cache.pack_spool import CacheFull, CacheUnusable, PackSpool, disk_error
from deltashard_checkpoint.errors import InternalBug


@dataclass(slots=True)
class _Entry:
    bytes: int
    pins: int


class PackCache:
    """The packs in `directory`, at most `budget_bytes` in total. Thread-safe."""

    def __init__(
        self, directory: Path, *, budget_bytes: int, removed: Callable[[], None] = lambda: None
    ) -> None:
        """Lock the directory (created if missing); raises `CacheUnusable` if another process owns it.

        `removed` is called after the directory was removed externally and has been created again, empty.
        """
        self.directory = directory
        self._removed = removed
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # oldest first
        self._used_bytes = 0
        self._changed = threading.Condition()  # re-entrant
        self._lock_fd = cache_dir.acquire(directory)
        try:
            self._load()
        except OSError as error:
            self.close()
            raise disk_error(error, directory) from error

    @property
    def used_bytes(self) -> int:
        """Bytes of all packs; a pack being filled counts with its full capacity."""
        with self._changed:
            return self._used_bytes

    def create(self, key: str, *, capacity_bytes: int) -> PackSpool:
        """Create a pinned pack file for `key` without waiting; see `create_all`."""
        return self.create_all([key], capacity_bytes=capacity_bytes)[0]

    def create_all(
        self,
        keys: Sequence[str],
        *,
        capacity_bytes: int,
        wait_s: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[PackSpool]:
        """Create pinned pack files, each with a reserved capacity of `capacity_bytes`: all of them or none.

        Evicts as needed. If pinned packs leave no room, waits up to `wait_s` for an upload to end, or until `stopped()`
        (checked after `wake`). The caller must not hold a pack that is being filled: writers could deadlock.
        Raises `CacheFull`.
        """
        names = [_name(key) for key in keys]
        wanted = capacity_bytes * len(keys)
        deadline = time.monotonic() + wait_s
        with self._changed:
            if taken := [key for key, name in zip(keys, names, strict=True) if name in self._entries]:
                raise InternalBug(f"pack {taken[0]} exists in the cache already: names are never reused")
            while not self._evict(self.budget_bytes - wanted):
                left = deadline - time.monotonic()
                if left <= 0 or stopped() or wanted > self.budget_bytes:
                    raise CacheFull(
                        f"the cache budget of {self.budget_bytes} bytes is full of packs that are not uploaded yet",
                        where=str(self.directory),
                        remedy="check that the store is reachable; a larger cache budget bridges longer outages",
                    )
                self._changed.wait(left)
            self._entries |= {name: _Entry(capacity_bytes, 1) for name in names}
            self._used_bytes += wanted
        spools: list[PackSpool] = []
        try:
            for key, name in zip(keys, names, strict=True):
                spools.append(self._spool(key, self.directory / f"{name}.spool", capacity_bytes))
        except BaseException:
            for name in names[len(spools) :]:
                self._forget(name)
            for spool in spools:
                self.discard(spool)
            raise
        return spools

    def _spool(self, key: str, path: Path, capacity_bytes: int) -> PackSpool:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                fd = os.open(path, flags, 0o640)
            except FileNotFoundError:
                self._reacquire()
                fd = os.open(path, flags, 0o640)
        except OSError as error:
            raise disk_error(error, path) from error
        return PackSpool(key=key, path=path, fd=fd, capacity_bytes=capacity_bytes, make_room=self._make_room)

    def seal(self, spool: PackSpool) -> None:
        """Give a complete pack its final name and size. It stays pinned until `unpin`."""
        spool.close()
        path = self._path(spool.key)
        with self._changed:
            entry = self._entries.get(_name(spool.key))
            if entry is None:
                spool.path.unlink(missing_ok=True)
                raise CacheUnusable("the pack was dropped while it was being filled", where=str(spool.path))
            try:
                spool.path.rename(path)
            except OSError as error:
                raise disk_error(error, path) from error
            self._used_bytes += spool.size_bytes - entry.bytes
            entry.bytes = spool.size_bytes
            self._changed.notify_all()

    def discard(self, spool: PackSpool) -> None:
        """Abandon a pack, sealed or not, and delete its files. No write to it may be in progress."""
        with contextlib.suppress(CacheUnusable, CacheFull):
            spool.close()
        self.drop(spool.key)

    def unpin(self, key: str) -> None:
        """Allow eviction of a pack that is now in the store."""
        with self._changed:
            entry = self._entries.get(_name(key))
            if entry is not None:
                entry.pins -= 1
                self._evict(self.budget_bytes)
                self._changed.notify_all()

    def drop(self, key: str) -> None:
        """Remove a pack and its file, pinned or not (its bytes are wrong, or its snapshot was abandoned)."""
        with self._changed:
            self._forget(_name(key))
            for suffix in cache_dir.SUFFIXES:
                self._path(key).with_suffix(suffix).unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        with self._changed:
            return _name(key) in self._entries

    def bytes_of(self, key: str) -> int:
        """Return the bytes of a cached pack (the capacity while it is being filled); 0 if it is not cached."""
        name = _name(key)
        with self._changed:
            entry = self._entries.get(name)
            return 0 if entry is None else entry.bytes

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def mapped(self, key: str) -> Iterator[memoryview]:
        """Map a sealed pack read-only; raises `CacheUnusable` if its file is missing."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            # The traceback of a failed put may still hold slices, which then keep the mapping alive. Raising here
            # would hide why the put failed.
            with contextlib.suppress(BufferError):
                view.release()
                mapping.close()

    def read_into(self, key: str, offset: int, out: memoryview) -> bool:
        """Fill `out` from a cached pack. Returns False if it is missing or too short. Does not verify the bytes."""
        name = _name(key)
        with self._changed:
            if name not in self._entries:
                return False
            recent = next(reversed(self._entries)) == name
            self._entries.move_to_end(name)
            try:  # an open file stays readable after eviction
                fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
        try:
            if not recent:
                os.utime(fd)  # keeps the LRU order across restarts
            while out:
                n = os.preadv(fd, [out], offset)
                if n == 0:
                    return False
                out = out[n:]
                offset += n
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        if self._lock_fd >= 0:
            cache_dir.release_lock(self.directory, self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self) -> None:
        found: list[tuple[float, str, int]] = []
        for path in self.directory.iterdir():
            if path.suffix == ".spool":
                path.unlink(missing_ok=True)
            elif path.suffix == ".pack":
                stat = path.stat()
                found.append((stat.st_mtime, path.stem, stat.st_size))
        with self._changed:
            for _, name, size in sorted(found):
                self._entries[name] = _Entry(size, 0)
                self._used_bytes += size
            self._evict(self.budget_bytes)

    def _reacquire(self) -> None:
        """Create and lock the removed directory again; only pinned packs stay accounted for."""
        with self._changed:
            if cache_dir.is_held(self.directory, self._lock_fd):
                return  # another thread already did it
            cache_dir.release_lock(self.directory, self._lock_fd)
            self._lock_fd = -1
            self._lock_fd = cache_dir.acquire(self.directory)
            for name in [name for name, entry in self._entries.items() if not entry.pins]:
                self._used_bytes -= self._entries.pop(name).bytes
            self._changed.notify_all()
        self._removed()

    def _evict(self, down_to_bytes: int) -> bool:
        """Evict unpinned packs, oldest first, down to `down_to_bytes`. Returns whether that was reached."""
        if self._used_bytes > down_to_bytes:
            for name in [name for name, entry in self._entries.items() if not entry.pins]:
                self._used_bytes -= self._entries.pop(name).bytes
                (self.directory / f"{name}.pack").unlink(missing_ok=True)
                if self._used_bytes <= down_to_bytes:
                    break
        return self._used_bytes <= down_to_bytes

    def _make_room(self) -> bool:
        """Evict one pack because the disk is full before the budget is. Returns False if none can be evicted."""
        with self._changed:
            before = len(self._entries)
            self._evict(self._used_bytes - 1)
            return len(self._entries) < before

    def _forget(self, name: str) -> None:
        with self._changed:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._used_bytes -= entry.bytes
            self._changed.notify_all()

    def _path(self, key: str) -> Path:
        return self.directory / f"{_name(key)}.pack"


def _name(key: str) -> str:
    return xxhash.xxh3_128_hexdigest(key.encode())
