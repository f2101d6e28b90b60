"""POSIX record locks of a live trainer, and the registry that keeps them from being dropped by accident.

The sidecar tests a record lock to learn from the kernel whether the writer of an arena line is alive. Such locks belong
to the process: forked DataLoader workers do not inherit them, and they vanish with the process. But closing *any*
descriptor of the file drops all of them. Every arena is therefore opened once per process, kept in a registry by
(device,
inode), counted, and closed with its last user. A mapping contains its own descriptor, which closes when the mapping is
collected. A mapping that is still referenced (by a control line, a tensor) stays in the registry with its file, and is
unmapped when the file is next opened or released, while no lock is held.

A second lock, on a separate file in the runtime directory, is taken before a sidecar is started, because two trainers
of one run on one machine would replace each other's session forever. The lock also lets the next trainer of this user
find and remove the arenas of killed sidecars.
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
"""Seconds without a write after which a runtime directory counts as left over."""
_PF_EXITING = 0x4
"""Flag in /proc/PID/stat: the process is exiting (linux/sched.h)."""

_REMEDY = (
    "stop the other process. Ranks of one training share a run: call torch.distributed.init_process_group() before "
    "Checkpointer(). Use another run name only to train another model"
)

_Key = tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenArena:
    """An arena's file, open in this process."""

    arena: Arena
    users: int = 0
    older: list[Arena] = field(default_factory=list)
    """Earlier mappings of the same descriptor that are still referenced or had become too small."""

    def unmap(self) -> None:
        """Unmap unreferenced mappings. Drops the locks, so it must only be called without users."""
        self.older = [arena for arena in self.older if not arena.unmap()]


_lock = threading.Lock()
_arenas: dict[_Key, _OpenArena] = {}
_files: dict[_Key, tuple[int, int]] = {}


def _after_fork_in_child() -> None:
    # Record locks are not inherited by a child.
    _arenas.clear()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _key(path: Path) -> _Key:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _lock_range(fd: int, start: int, length: int, *, deadline_s: float) -> bool:
    """Lock a range of a file; retries until `deadline_s`, since a killed process frees its locks late."""
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
    """Return this process's only mapping of the arena at `path`, with the sidecar's shape; pair with `release_arena`.

    Raises:
        SidecarUnavailable: The arena does not exist, or the file is too small.
        NotPrivate: The path is a link.
    """
    with _lock:
        try:
            key = _key(path)
            opened = _arenas.get(key)
            if opened is None:
                # The owner may be another user: the pod's sidecar.
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
    """Release one use; the last one drops the lock, and closes the file if its memory is no longer referenced."""
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
        AnotherTrainer: A live process holds it.
    """
    start, length = arena.line_lock_range(local_rank)
    if not _lock_range(arena.fd, start, length, deadline_s=deadline_s):
        raise AnotherTrainer(
            f"local rank {local_rank} already has a live trainer",
            where=str(arena.path),
            remedy=_REMEDY,
        )


def _is_exiting(pid: str) -> bool:
    """Whether the process is exiting: a killed process first frees its memory, which takes time, and last its locks."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except (OSError, ValueError):
        return True  # the process is gone or has not written its pid: the lock is about to be freed
    state, *rest = stat.rpartition(")")[2].split()
    return state in "ZX" or bool(int(rest[5]) & _PF_EXITING)


def hold_file(path: Path, *, deadline_s: float = 10.0, living_s: float = 2.0) -> None:
    """Create `path` and lock it for this process; counted, pair with `release_file`.

    A live holder gets `living_s` seconds to release the lock (it may be about to close), an exiting one `deadline_s`.

    Raises:
        AnotherTrainer: A live process holds it.
        NotPrivate: The path is a link, or belongs to another user.
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
    """Whether this process holds the file that is currently at `path`."""
    with _lock:
        try:
            return _key(path) in _files
        except OSError:
            return False


def trainer_lock(runtime: Path, local: int) -> Path:
    """Return the file that the trainer of local rank `local` locks in the run's runtime directory."""
    return runtime / f"trainer-{local}.lock"


def trainer_locks(runtime: Path) -> list[Path]:
    return list(runtime.glob("trainer-*.lock"))


def is_free(path: Path) -> bool:
    """Whether no process, including this one, holds `path` by `hold_file`; raises `OSError` if it cannot be opened."""
    with _lock:
        if _key(path) in _files:
            return False  # opening and closing the file here would drop our lock
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _lock_range(fd, 0, 0, deadline_s=0.0)
        finally:
            os.close(fd)


def release_file(path: Path) -> None:
    """Release one use of `hold_file`; the last one unlocks. The file is kept, so that its name keeps its inode."""
    with _lock:
        try:
            key = _key(path)
        except OSError:  # the directory was deleted: the lock is on the orphaned inode
            return
        fd, users = _files.get(key, (-1, 0))
        if users > 1:
            _files[key] = (fd, users - 1)
        elif users == 1:
            del _files[key]
            os.close(fd)


def free_arenas(base: Path, *, keep: Path, idle_s: float = IDLE_S) -> int:
    """Remove the left-over arenas of the runtime directories in `base`, except `keep`'s; return the bytes freed."""
    freed_bytes = 0
    for arena in base.glob("*/arena"):
        home = arena.parent
        if home == keep or home.is_symlink():
            continue
        # Another process cleans up concurrently, or the file is of another kind.
        with contextlib.suppress(OSError, NotPrivate):
            newest_s = max(path.lstat().st_mtime for path in (home, *home.iterdir()))
            if time.time() - newest_s < idle_s or not all(is_free(lock) for lock in trainer_locks(home)):
                continue
            freed_bytes += _free_arena(arena, home / "LOCK")
    return freed_bytes


def _free_arena(arena: Path, lock: Path) -> int:
    """Remove one arena under its sidecar's lock; raises `OSError` if the lock is held or does not exist."""
    # Trainer processes never hold this lock, so closing the file here drops none.
    fd = open_private(lock, os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = arena.lstat().st_size
        arena.unlink()
    finally:
        os.close(fd)
    return size_bytes
