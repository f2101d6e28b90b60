"""Checkpointers of one store, for tests with a real sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltashard
import pytest
from deltashard.save import precopy_scheduler
from deltashard.snapshot import precopy

MakeCheckpointer = Callable[..., deltashard.Checkpointer]
"""A function of an object with a `net` and an `optimizer`, and of options."""


def simulate_crash(ckpt: deltashard.Checkpointer) -> None:
    ckpt.__exit__(KeyboardInterrupt, None, None)


@contextmanager
def checkpointers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **defaults: Any
) -> Iterator[MakeCheckpointer]:
    """Build Checkpointers of one store; the fixture releases every open one at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    made: list[deltashard.Checkpointer] = []

    def build(loop: Any, **options: Any) -> deltashard.Checkpointer:
        where = {"url": tmp_path / "store", "run": "r"}
        options = where | {"arena_bytes": 64 << 20, "grace_s": None} | defaults | options
        made.append(deltashard.Checkpointer(loop.net, loop.optimizer, **options))
        return made[-1]

    yield build
    for ckpt in made:
        simulate_crash(ckpt)


@contextmanager
def precopied_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Build programs with a `ckpt` that precopy every snapshot; the fixture releases every open one at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    monkeypatch.setattr(precopy, "MIN_PRECOPY_TABLE_BYTES", 0)
    monkeypatch.setattr(precopy_scheduler, "MIN_PRECOPY_BYTES", 0)
    made: list[Any] = []

    def build(**options: Any) -> Any:
        made.append(program(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        with each.ckpt as ckpt:
            simulate_crash(ckpt)
