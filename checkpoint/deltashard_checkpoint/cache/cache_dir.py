"""Directories of pack caches, side by side in one parent: each has one owner, and those of ended runs make room.

A directory belongs to the process that holds the POSIX record lock of its `LOCK`. On a machine where many runs come and
go each has a directory of its own, named by its run, and nobody comes back for most of them. So whoever owns one may
`sweep`: together they keep to a budget, and the runs whose packs were used longest ago go first, whole. A directory
whose lock is held is counted and left alone: its sidecar lives, and may hold packs there that the store has not yet.

IMPORTANT: a directory goes by a rename under its lock, and is emptied under its new name. An owner that opened `LOCK`
just before finds, once it has the lock, that the path leads to another file by now, and begins again; so nobody ever
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
"""So long a new owner waits for one that is about to let go, a sweeper for instance."""
_LOCK = "LOCK"
SUFFIXES = (".pack", ".spool")
"""Of the files of a pack cache: whole, and being filled."""
_owned: set[Path] = set()  # a record lock does not exclude its own process
_owned_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What one sweep did."""

    runs: int
    bytes: int


def acquire(directory: Path, *, wait_s: float = ACQUIRE_WAIT_S) -> int:
    """Take a directory, created if missing: the descriptor that `release_lock` closes; raises `CacheUnusable`."""
    until = time.monotonic() + wait_s
    while (fd := _try_acquire(directory)) is None:
        if time.monotonic() >= until:
            raise _owned_elsewhere(directory)
        time.sleep(0.02)
    return fd


def release_lock(directory: Path, fd: int) -> None:
    """Give it up; its packs stay for the next owner. Without effect when `fd` is -1."""
    with _owned_lock:
        if fd >= 0:
            os.close(fd)
        _owned.discard(directory.resolve())


def is_held(directory: Path, fd: int) -> bool:
    """Whether `fd` is the lock of the directory that is there now."""
    try:
        return os.path.samestat((directory / _LOCK).lstat(), os.fstat(fd))
    except OSError:
        return False


def sweep(mine: Path, *, budget_bytes: int) -> SweepResult:
    """Remove caches beside `mine`, least recently used runs first, until all keep to the budget or are in use."""
    found: list[tuple[float, Path, int]] = []
    total_bytes = runs = freed_bytes = 0
    for lock in mine.parent.glob(f"*/{_LOCK}"):
        with suppress(OSError):  # another sweeper was faster, or it is not ours to read
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
    """The descriptor of the held lock; None when another process holds it just now."""
    path = directory / _LOCK
    with _owned_lock:
        # Looked at before the file is opened: closing any descriptor of it would drop the first owner's lock.
        if directory.resolve() in _owned:
            raise _owned_elsewhere(directory)
        try:
            with suppress(FileExistsError):  # `exist_ok` looks again, and raises when it was swept meanwhile
                directory.mkdir(parents=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except FileNotFoundError:  # swept between the two
            return None
        except OSError as error:
            raise disk_error(error, directory) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino != os.fstat(fd).st_ino:  # swept before the lock was ours
                raise FileNotFoundError(path)
            os.utime(fd)  # in use, if only for reading
        except OSError:
            os.close(fd)
            return None
        _owned.add(directory.resolve())
        return fd


def _measure(directory: Path) -> tuple[float, int] | None:
    """(time of the last use, bytes); None for what is no pack cache."""
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
    """Remove a cache that nobody owns; False when somebody does, or it cannot be removed."""
    with _owned_lock:
        if directory.resolve() in _owned:
            return False
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside = directory.with_name(f"{directory.name[:64]}~{secrets.token_hex(4)}")
            directory.rename(aside)
        except OSError:
            return False
        finally:
            os.close(fd)
    try:
        for path in [*aside.iterdir()]:
            if path.name != _LOCK:  # last: killed in between, it is still known for what it is
                path.unlink(missing_ok=True)
        (aside / _LOCK).unlink(missing_ok=True)
        aside.rmdir()
    except OSError:
        return False
    return True
