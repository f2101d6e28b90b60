"""Directories of pack caches under a common parent: each has one owner, and unused ones are evicted.

The owner of a directory holds the POSIX record lock on its `LOCK` file. On a machine with many short runs each run has
its own directory, and most of them are never used again. So every owner may `sweep`: all directories together stay
within a byte budget, and the least recently used runs are removed first, as a whole. A locked directory counts, but is
kept: its sidecar is alive and may hold packs that are not yet in the store.

IMPORTANT: the sweeper renames a directory under its lock and empties it under the new name. An owner that opened `LOCK`
just before compares the path with its descriptor once it holds the lock, and retries if they differ. So no process
works in a directory that is being emptied.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deltashard_checkpoint.cache.pack_spool import CacheUnusable, disk_error

ACQUIRE_WAIT_S = 5.0
"""How long a new owner waits for another process, such as a sweeper, to release the lock."""
_LOCK = "LOCK"
SUFFIXES = (".pack", ".spool")
"""Suffixes of a pack cache's files: complete, and being filled."""
_owned: set[Path] = set()  # a record lock does not exclude other holders in the same process
_owned_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The number of runs and bytes that a sweep removed."""

    runs: int
    bytes: int


def acquire(directory: Path, *, wait_s: float = ACQUIRE_WAIT_S) -> int:
    """Lock a directory, created if missing. Returns the descriptor for `release_lock`; raises `CacheUnusable`."""
    until = time.monotonic() + wait_s
    while (fd := _try_acquire(directory)) is None:
        if time.monotonic() >= until:
            raise _owned_elsewhere(directory)
        time.sleep(0.02)
    return fd


def release_lock(directory: Path, fd: int) -> None:
    """Release the lock; the packs stay for the next owner. Only forgets the directory when `fd` is -1."""
    with _owned_lock:
        if fd >= 0:
            os.close(fd)
        _owned.discard(directory.resolve())


def is_held(directory: Path, fd: int) -> bool:
    """Whether `fd` is the lock file of the directory that exists now."""
    try:
        return os.path.samestat((directory / _LOCK).lstat(), os.fstat(fd))
    except OSError:
        return False


def sweep(mine: Path, *, budget_bytes: int) -> SweepResult:
    """Remove unlocked caches next to `mine`, least recently used runs first, until all fit within the budget."""
    found: list[tuple[float, Path, int]] = []
    total_bytes = runs = freed_bytes = 0
    for lock in mine.parent.glob(f"*/{_LOCK}"):
        with suppress(OSError):  # removed by another sweeper, or not readable
            measured = _measure(lock.parent)
            if measured is None:
                continue
            used_s, size_bytes = measured
            total_bytes += size_bytes
            if lock.parent.name != mine.name:
                found.append((used_s, lock.parent, size_bytes))
    for _, directory, size_bytes in sorted(found):
        if total_bytes <= budget_bytes:
            break
        if _remove(directory):
            total_bytes -= size_bytes
            freed_bytes += size_bytes
            runs += 1
    return SweepResult(runs=runs, bytes=freed_bytes)


def _owned_elsewhere(directory: Path) -> CacheUnusable:
    return CacheUnusable(
        "the cache directory belongs to another running process",
        where=str(directory),
        remedy="one sidecar per cache directory",
    )


def _try_acquire(directory: Path) -> int | None:
    """Return the descriptor of the acquired lock, or None if another process holds it now."""
    path = directory / _LOCK
    with _owned_lock:
        # Check before opening the file: closing any descriptor of it would release this process' existing lock.
        if directory.resolve() in _owned:
            raise _owned_elsewhere(directory)
        try:
            with suppress(FileExistsError):  # `exist_ok` raises if the directory was just swept
                directory.mkdir(parents=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except FileNotFoundError:  # swept between mkdir and open
            return None
        except OSError as error:
            raise disk_error(error, directory) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino != os.fstat(fd).st_ino:  # swept before the lock was acquired
                raise FileNotFoundError(path)
            os.utime(fd)  # marks the run as used even if it only reads
        except OSError:
            os.close(fd)
            return None
        _owned.add(directory.resolve())
        return fd


def _measure(directory: Path) -> tuple[float, int] | None:
    """Return (time of the last use, bytes), or None if the directory is not a pack cache."""
    if directory.is_symlink():
        return None
    used_s, size_bytes = 0.0, 0
    for path in directory.iterdir():
        if path.suffix not in SUFFIXES and path.name != _LOCK:
            return None
        status = path.lstat()
        used_s = max(used_s, status.st_mtime)
        size_bytes += status.st_size
    return used_s, size_bytes


def _remove(directory: Path) -> bool:
    """Remove a cache without an owner. Returns False if it has one or cannot be removed."""
    with _owned_lock:
        if directory.resolve() in _owned:
            return False
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            renamed = directory.with_name(f"{directory.name[:64]}~{secrets.token_hex(4)}")
            directory.rename(renamed)
        except OSError:
            return False
        finally:
            os.close(fd)
    try:
        for path in [*renamed.iterdir()]:
            if path.name != _LOCK:  # removed last: after a kill the remainder is still recognised as a cache
                path.unlink(missing_ok=True)
        (renamed / _LOCK).unlink(missing_ok=True)
        renamed.rmdir()
    except OSError:
        return False
    return True
