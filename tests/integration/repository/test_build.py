"""`tools/build`, with a Go that does nothing: what a build leaves behind, however it ends, and how often it happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.kubernetes.process import start_time
from tests.support.eventually import eventually
from tests.support.machine import limit_s
from tests.support.tool import ROOT

GO = """#!/usr/bin/env bash
set -eu
echo "$$" >>"$STORY/builds"
while [ "$1" != -o ]; do shift; done
out=$2
echo runtime >&2
if [ -e "$STORY/hang" ]; then
  sleep 1000 &
  echo "$! $$" >"$STORY/children.new"
  mv "$STORY/children.new" "$STORY/children"
  wait
fi
until [ ! -e "$STORY/wait" ]; do sleep 0.05; done
touch "$out/minio"
chmod +x "$out/minio"
"""
Build = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Start `tools/build minio` with that Go and an empty cache."""
    programs = tmp_path / "programs"
    programs.mkdir()
    go = programs / "go"
    go.write_text(GO)
    go.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STORY": str(tmp_path),
        "DELTASHARD_TOOLS": str(tmp_path / "cache"),
    }

    def start(*words: str) -> subprocess.Popen[str]:
        # Tests that run in the background of a shell ignore SIGINT, and so would what they start.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [str(ROOT / "tools" / "build"), *words, "minio"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    return start


def _half_built(folder: Path) -> list[Path]:
    return list(folder.glob("cache/*/*/.building.*"))


def _children(folder: Path) -> list[tuple[int, str | None]]:
    """The build's processes: of the hanging build, its compiler and its go."""
    eventually((folder / "children").exists, what="the build's child")
    return [(int(pid), start_time(int(pid))) for pid in (folder / "children").read_text().split()]


def test_builds_once_whoever_asks(build: Build, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    first, second = build(), build()
    eventually((tmp_path / "builds").exists, what="a build")
    (tmp_path / "wait").unlink()
    found = {each.communicate()[0].strip() for each in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(found) == 1
    assert Path(found.pop()).exists()
    assert len((tmp_path / "builds").read_text().split()) == 1
    asked = build("--where")
    assert Path(asked.communicate()[0].strip()).exists()
    assert _half_built(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_build_leaves_nothing(build: Build, tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "hang").touch()
    running = build()
    children = _children(tmp_path)
    assert len(_half_built(tmp_path)) == 1
    running.send_signal(how)
    running.communicate(timeout=limit_s(60))
    assert running.returncode != 0
    for pid, started in children:
        eventually(lambda pid=pid, started=started: start_time(pid) != started, what=f"the end of {pid}")
    assert _half_built(tmp_path) == []


def test_what_a_killed_build_left_is_removed(build: Build, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    running = build()
    children = _children(tmp_path)
    running.kill()
    (compiler, _), (go, started) = children
    if shutil.which("setpriv"):
        eventually(lambda: start_time(go) != started, what="the end of go")
    else:
        os.kill(go, signal.SIGKILL)
    os.kill(compiler, signal.SIGKILL)  # a real one ends by itself
    running.communicate(timeout=limit_s(60))
    (tmp_path / "hang").unlink()
    again = build()
    assert Path(again.communicate()[0].strip()).exists()
    assert again.returncode == 0
    assert _half_built(tmp_path) == []
