"""Locks of a live trainer: visible to other processes, not inherited by forked children, and kept on a second use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deltashard.attach.lock import hold_file, lock_line, open_arena, release_arena, release_file
from deltashard.errors import SidecarUnavailable
from deltashard_checkpoint.private_file import NotPrivate
from deltashard_proto.arena_layout import Arena, ArenaShape

SHAPE = ArenaShape(blocks=4, block_bytes=1 << 16)
LARGER = ArenaShape(blocks=9, block_bytes=1 << 16)


def create(path: Path, shape: ArenaShape) -> Arena:
    return Arena.create(path, os.open(path, os.O_RDWR | os.O_CREAT), shape)


def in_child(work: Callable[[], object]) -> str:
    """Return the name of the exception that `work` raises in a forked process, or an empty string."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        raised = ""
        try:
            work()
        except BaseException as error:
            raised = type(error).__name__
        os.write(write, raised.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


def locked_elsewhere(path: Path, line: int = 0) -> str:
    return in_child(lambda: lock_line(open_arena(path, SHAPE), line, deadline_s=0.05))


def grow(path: Path) -> None:
    """Recreate the arena as a sidecar does that restarts with a larger one."""
    assert in_child(lambda: create(path, LARGER)) == ""


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def arena_path(tmp_path: Path) -> Path:
    create(tmp_path / "arena", SHAPE).close()
    return tmp_path / "arena"


def test_writer_lock_excludes_other_processes(arena_path: Path) -> None:
    """Other lines remain free."""
    arena = open_arena(arena_path, SHAPE)
    lock_line(arena, 0)
    assert locked_elsewhere(arena_path, 0) == "AnotherTrainer"
    assert locked_elsewhere(arena_path, 1) == ""
    release_arena(arena)
    assert locked_elsewhere(arena_path, 0) == ""


def test_grown_arena_is_remapped_on_same_descriptor(arena_path: Path) -> None:
    """The sidecar may enlarge the arena while it restarts."""
    first = open_arena(arena_path, SHAPE)
    lock_line(first, 0)
    grow(arena_path)
    second = open_arena(arena_path, LARGER)
    second.block(8)[:4] = b"abcd"
    assert locked_elsewhere(arena_path) == "AnotherTrainer"
    release_arena(first)
    release_arena(second)


def test_collected_mapping_keeps_lock(arena_path: Path) -> None:
    """A mapping has a separate descriptor. Garbage collection must not close it while a newer lock depends on it."""
    before = open_files()
    first = open_arena(arena_path, SHAPE)
    # Like a Checkpointer that was closed, or that does not know of its new sidecar yet.
    line = first.line(0)
    release_arena(first)
    second = open_arena(arena_path, SHAPE)
    lock_line(second, 0)
    del first, line
    gc.collect()
    assert locked_elsewhere(arena_path) == "AnotherTrainer"
    second.line(0)[0] = 7
    release_arena(second)
    assert locked_elsewhere(arena_path) == ""
    third = open_arena(arena_path, SHAPE)
    assert third.line(0)[0] == 7
    release_arena(third)
    assert open_files() <= before


def test_one_trainer_per_run_and_machine(tmp_path: Path) -> None:
    """A second process is refused. The same process may take the lock twice."""
    path = tmp_path / "trainer.lock"
    hold_file(path)
    hold_file(path)
    assert in_child(lambda: hold_file(path, deadline_s=0.05)) == "AnotherTrainer"
    release_file(path)
    assert in_child(lambda: hold_file(path, deadline_s=0.05)) == "AnotherTrainer"
    release_file(path)
    assert in_child(lambda: hold_file(path, deadline_s=0.05)) == ""


def test_non_arena_file_is_refused(tmp_path: Path) -> None:
    """The file is missing or shorter than the sidecar reported."""
    with pytest.raises(SidecarUnavailable):
        open_arena(tmp_path / "none", SHAPE)
    (tmp_path / "short").write_bytes(bytes(SHAPE.total_bytes - 1))
    with pytest.raises(SidecarUnavailable, match="the arena has"):
        open_arena(tmp_path / "short", SHAPE)


def test_symlinks_are_not_followed(arena_path: Path, tmp_path: Path) -> None:
    """Mapping, writing and locking refuse symlinks. The target stays unchanged."""
    (tmp_path / "target").write_text("target")
    for name in ("link.lock", "arena-link"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    with pytest.raises(NotPrivate, match="symbolic link"):
        hold_file(tmp_path / "link.lock")
    with pytest.raises(NotPrivate, match="symbolic link"):
        open_arena(tmp_path / "arena-link", SHAPE)
    (tmp_path / "second").hardlink_to(tmp_path / "target")
    with pytest.raises(NotPrivate, match="another name"):
        hold_file(tmp_path / "second")
    assert (tmp_path / "target").read_text() == "target"
