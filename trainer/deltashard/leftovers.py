"""Arenas that killed sidecars left in memory: found at a spawn, and freed when nobody can want them.

A sidecar that ends by itself takes its arena along; one that was killed, with a trainer that never came back, leaves
the file in /dev/shm, where it holds memory until the machine restarts. The next child sidecar that is started on the
machine, of whatever run, clears up: an arena goes when its directory was idle for a day, no trainer holds a lock in it,
and the sidecar's own `LOCK` can be taken. That one is kept while the file is removed, so no sidecar starts in between.

Only arenas: the log and the other small files may still tell somebody what happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from deltashard.locks import is_free

IDLE_S = 24 * 3600.0
"""A runtime directory is left over when nothing in it was written for so long."""


def free_arenas(base: Path, *, keep: Path, idle_s: float = IDLE_S) -> int:
    """Remove the left-over arenas of the runtime directories in `base`, but for `keep`'s; returns the bytes freed."""
    freed_bytes = 0
    for arena in base.glob("*/arena"):
        home = arena.parent
        if home == keep or home.is_symlink():
            continue
        with contextlib.suppress(
            OSError
        ):  # somebody else clears up, or a file of another kind: not ours to judge
            newest_s = max(path.lstat().st_mtime for path in (home, *home.iterdir()))
            if time.time() - newest_s < idle_s or not all(
                is_free(lock) for lock in home.glob("trainer-*.lock")
            ):
                continue
            freed_bytes += _free(arena, home / "LOCK")
    return freed_bytes


def _free(arena: Path, lock: Path) -> int:
    """Remove one arena under its sidecar's lock; raises `OSError` when that is held or was never there."""
    # No trainer process ever holds this lock itself, so closing it here drops nobody's.
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = arena.lstat().st_size
        arena.unlink()
    finally:
        os.close(fd)
    return size_bytes
