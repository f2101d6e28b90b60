"""POSIX record locks that a live trainer holds, and the one rule they impose: never close a locked file twice.

The sidecar asks the kernel whether the writer of an arena line still lives by testing a record lock. Such locks belong
to the process: forked DataLoader workers do not inherit them, and they vanish with the process whatever killed it. But
closing *any* descriptor of the file drops them all. So every arena is opened once per process, kept in a registry by
(device, inode), counted, and closed with its last user. A mapping has a descriptor of its own inside, which closes
whenever it is collected: a mapping that something still looks at (a control line, a tensor) stays in the registry with
its file, and is unmapped when the file is opened or given up the next time, while no lock is held.

A second lock, on a file of its own in the runtime directory, is taken before a sidecar is even started: two trainers
of one run on one machine would replace each other's session for ever. By that lock the next trainer of this user also
tells which arenas killed sidecars left in memory, and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from deltashard_checkpoint.private_file import NotPrivate, open_private
from deltashard_proto.arena_layout import Arena, ArenaError, ArenaShape

from deltashard.errors import AnotherTrainer, SidecarUnavailable

IDLE_S = 24 * 3600.0
"""A runtime directory is left over when nothing in it was written for so long."""
_PF_EXITING = 0x4
"""A flag of /proc/PID/stat: the process is on its way out (linux/sched.h)."""

_REMEDY = (
    "stop the other process. Ranks of one training share a run: call torch.distributed.init_process_group() before "
    "Checkpointer(). Only what trains another model is another run"
)

_Key = tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenArena:
    """An arena's file, open in this process."""

    arena: Arena
    users: int = 0
    older: list[Arena] = field(default_factory=list)
    """Earlier mappings of the same descriptor that could not be unmapped, or had become too small."""

    def unmap(self) -> None:
        """Unmap what nobody looks at any more. Drops the locks: only without users."""
        self.older = [arena for arena in self.older if not arena.unmap()]


_lock = threading.Lock()
_arenas: dict[_Key, _OpenArena] = {}
_files: dict[_Key, tuple[int, int]] = {}


def _after_fork_in_child() -> None:
    # Record locks are not inherited: what the parent holds is not ours.
    _arenas.clear()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _key(path: Path) -> _Key:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _lock_range(fd: int, start: int, length: int, *, deadline_s: float) -> bool:
    """Lock a range of an open file; retries until `deadline_s`: a killed process frees its locks as it is torn down."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def open_arena(path: Path, shape: ArenaShape) -> Arena:
    """This process's only mapping of the arena at `path`, of the shape that its sidecar has; pair with `release_arena`.

    Raises:
        SidecarUnavailable: there is no arena, or the file is smaller.
        NotPrivate: it is a link.
    """
    with _lock:
        try:
            key = _key(path)
            opened = _arenas.get(key)
            if opened is None:
                # Its owner may be another user: the pod's sidecar.
                fd = open_private(path, os.O_RDWR, owned=False)
                try:
                    opened = _arenas[key] = _OpenArena(arena=Arena.mapped(path, fd, shape))
                except BaseException:
                    os.close(fd)
                    raise
            elif opened.users == 0:
                opened.unmap()
                opened.arena = Arena.mapped(path, opened.arena.fd, shape)
            elif opened.arena.shape != shape:
                arena = Arena.mapped(path, opened.arena.fd, shape)
                opened.older.append(opened.arena)
                opened.arena = arena
        except (OSError, ArenaError) as error:
            raise SidecarUnavailable(
                f"the arena cannot be mapped: {error}",
                where=str(path),
                remedy="trainer and sidecar must share the volume",
            ) from error
        opened.users += 1
        return opened.arena


def release_arena(arena: Arena) -> None:
    """Give up one use; the last one drops the lock, and closes the file if nothing looks at its memory any more."""
    with _lock:
        for key, opened in list(_arenas.items()):
            if opened.arena.fd == arena.fd:
                opened.users -= 1
                if opened.users == 0:
                    fcntl.lockf(arena.fd, fcntl.LOCK_UN)
                    opened.older.append(opened.arena)
                    opened.unmap()
                    if not opened.older:
                        del _arenas[key]
                        os.close(arena.fd)
                return


def lock_line(arena: Arena, local_rank: int, *, deadline_s: float = 10.0) -> None:
    """Hold the writer lock of this rank's control line.

    Raises:
        AnotherTrainer: a live process holds it.
    """
    start, length = arena.line_lock_range(local_rank)
    if not _lock_range(arena.fd, start, length, deadline_s=deadline_s):
        raise AnotherTrainer(
            f"local rank {local_rank} already has a live trainer",
            where=str(arena.path),
            remedy=_REMEDY,
        )


def _is_exiting(pid: str) -> bool:
    """Whether the process is being torn down: a killed one frees its memory first, which takes time, its locks last."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except (OSError, ValueError):
        return True  # gone, or never said: its lock goes any moment
    state, *rest = stat.rpartition(")")[2].split()
    return state in "ZX" or bool(int(rest[5]) & _PF_EXITING)


def hold_file(path: Path, *, deadline_s: float = 10.0, living_s: float = 2.0) -> None:
    """Create `path` and lock it for this process; counted, pair with `release_file`.

    A holder that lives gets `living_s` to let go (it may be about to close), one that is ending `deadline_s`.

    Raises:
        AnotherTrainer: a live process holds it.
        NotPrivate: it is a link, or another user's.
    """
    with _lock:
        if path.exists() and (held := _files.get(_key(path))):
            _files[_key(path)] = (held[0], held[1] + 1)
            return
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        taken = _lock_range(fd, 0, 0, deadline_s=min(living_s, deadline_s))
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        if not taken and _is_exiting(pid):
            taken = _lock_range(fd, 0, 0, deadline_s=max(0.0, deadline_s - living_s))
        if not taken:
            os.close(fd)
            raise AnotherTrainer(
                f"process {pid or '?'} already trains this run on this machine",
                where=str(path),
                remedy=_REMEDY,
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _files[_key(path)] = (fd, 1)


def holds_file(path: Path) -> bool:
    """Whether this process holds the file that is at `path` now."""
    with _lock:
        try:
            return _key(path) in _files
        except OSError:
            return False


def trainer_lock(runtime: Path, local: int) -> Path:
    """The file that the trainer of local rank `local` holds in the run's runtime directory."""
    return runtime / f"trainer-{local}.lock"


def trainer_locks(runtime: Path) -> list[Path]:
    return list(runtime.glob("trainer-*.lock"))


def is_free(path: Path) -> bool:
    """Whether no process, this one included, holds `path` by `hold_file`; raises `OSError` when it cannot be opened."""
    with _lock:
        if _key(path) in _files:
            return False  # and it must not be opened: closing it again would drop our lock
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _lock_range(fd, 0, 0, deadline_s=0.0)
        finally:
            os.close(fd)


def release_file(path: Path) -> None:
    """Give up one use of `hold_file`; the last one unlocks. The file stays: its name keeps meaning one inode."""
    with _lock:
        try:
            key = _key(path)
        except OSError:  # somebody wiped the directory: the lock lives on the orphaned inode
            return
        fd, users = _files.get(key, (-1, 0))
        if users > 1:
            _files[key] = (fd, users - 1)
        elif users == 1:
            del _files[key]
            os.close(fd)


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
            freed_bytes += _free_arena(arena, home / "LOCK")
    return freed_bytes


def _free_arena(arena: Path, lock: Path) -> int:
    """Remove one arena under its sidecar's lock; raises `OSError` when that is held or was never there."""
    # No trainer process ever holds this lock itself, so closing it here drops none.
    fd = open_private(lock, os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = arena.lstat().st_size
        arena.unlink()
    finally:
        os.close(fd)
    return size_bytes
