"""Arenas that killed sidecars left in memory: removed by the next trainer of this user on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from deltashard_checkpoint.private_file import NotPrivate, open_private

from deltashard.attach.lock import is_free, trainer_locks

IDLE_S = 24 * 3600.0
"""A runtime directory is left over when nothing in it was written for so long."""


def free_arenas(base: Path, *, keep: Path, idle_s: float = IDLE_S) -> int:
    """Remove the left-over arenas of the runtime directories in `base`, but for `keep`'s; returns the bytes freed."""
    freed_bytes = 0
    for arena in base.glob("*/arena"):
        home = arena.parent
        if home == keep or home.is_symlink():
            continue
        # Somebody else clears up, or a file of another kind: not ours to judge.
        with contextlib.suppress(OSError, NotPrivate):
            newest_s = max(path.lstat().st_mtime for path in (home, *home.iterdir()))
            if time.time() - newest_s < idle_s or not all(is_free(lock) for lock in trainer_locks(home)):
                continue
            freed_bytes += _free(arena, home / "LOCK")
    return freed_bytes


def _free(arena: Path, lock: Path) -> int:
    """Remove one arena under its sidecar's lock; raises `OSError` when that is held or was never there."""
    # No trainer process ever holds this lock itself, so closing it here drops nobody's.
    fd = open_private(lock, os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = arena.lstat().st_size
        arena.unlink()
    finally:
        os.close(fd)
    return size_bytes
