"""The runtime and cache directories of a live trainer: removed, linked, truncated, or unavailable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deltashard.attach.launcher import cache_dir, normal_url, runtime_dir
from deltashard.errors import UserError
from deltashard_proto.arena_layout import BLOCKS_OFFSET

from tests.incidents.toys import ToyRun, assert_holds, stored
from tests.support.eventually import eventually


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    return tmp_path / "store"


def home_of(store: Path) -> Path:
    return runtime_dir(normal_url(store), "run")


def assert_saves_again(run: ToyRun, store: Path, first: int | None) -> None:
    """Assert that a sidecar other than `first` starts and commits a save."""
    eventually(
        lambda: (run.train(1), run.kinds("attached") and run.ckpt.arena_path)[1], what="another sidecar"
    )
    assert run.ckpt.sidecar_pid != first
    run.save()
    assert_holds(stored(store), run.state())


def test_removed_runtime_directory_is_recreated(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The unreachable sidecar stops, and the trainer logs the reason and starts another."""
    with ToyRun(store) as run:
        run.train(2)
        first = run.ckpt.sidecar_pid
        shutil.rmtree(home_of(store))
        assert_saves_again(run, store, first)
    assert "was removed: it is created again" in caplog.text


def test_removed_pack_cache_is_recreated(store: Path, tmp_path: Path) -> None:
    """No save fails because of it, and the sidecar logs it."""
    with ToyRun(store) as run:
        run.train(2)
        run.save()
        shutil.rmtree(tmp_path / "cache")
        run.train(2)
        run.save()
        assert_holds(stored(store), run.state())
        assert "cache.recreated" in (home_of(store) / "sidecar.log").read_text()


def test_truncated_arena_is_restored_to_size(store: Path) -> None:
    """The sidecar stops before or by SIGBUS. The next one restores the file's size."""
    with ToyRun(store) as run:
        run.train(2)
        first = run.ckpt.sidecar_pid
        # The control lines stay: the trainer itself writes its own line at each step.
        os.truncate(run.ckpt.arena_path or "", BLOCKS_OFFSET)
        assert_saves_again(run, store, first)


@pytest.mark.parametrize("name", ["LOCK", "arena", "sidecar.log", "trainer-0.lock"])
def test_symlink_in_runtime_directory_is_refused(name: str, store: Path, tmp_path: Path) -> None:
    """The error names the link immediately. The target is neither written nor truncated."""
    target = tmp_path / "target"
    target.write_text("target")
    home_of(store).mkdir(parents=True)
    (home_of(store) / name).symlink_to(target)
    with pytest.raises(UserError, match=f"{name} is a symbolic link.*remove it"):
        ToyRun(store)
    assert target.read_text() == "target"


@pytest.mark.parametrize("name", ["ready.json.new", "ready.json", "arguments.json.new"])
def test_symlink_at_replaced_file_is_replaced(name: str, store: Path, tmp_path: Path) -> None:
    """These files are always created new."""
    target = tmp_path / "target"
    target.write_text("target")
    home_of(store).mkdir(parents=True)
    (home_of(store) / name).symlink_to(target)
    with ToyRun(store) as run:
        run.train(1)
    assert target.read_text() == "target"


def test_missing_package_is_named_at_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install deltashard[trainer]` does not install structlog, which the sidecar needs."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "structlog.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'structlog'\", name='structlog')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "without"))
    with pytest.raises(UserError, match=r"'structlog' is not installed.*deltashard\[sidecar\]"):
        ToyRun(store)


def test_missing_torch_names_extra() -> None:
    """Covers `pip install deltashard` without extras."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; import deltashard"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "needs torch -- pip install 'deltashard[trainer,sidecar]'" in done.stderr


def test_cache_is_temporary_without_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user may have no password entry, or a HOME that is not writable."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", no_home)
        assert cache_dir("file:///s", "r").is_relative_to(tmp_path / f"deltashard-{os.getuid()}")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home" / "user")
    assert cache_dir("file:///s", "r").is_relative_to(tmp_path / "home" / "user" / ".cache")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_dir("file:///s", "r").is_relative_to(tmp_path / f"deltashard-{os.getuid()}")
