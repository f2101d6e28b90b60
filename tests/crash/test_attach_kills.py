"""SIGKILL of the sidecar while its trainer attaches, opens an attempt or restores: the program continues exactly."""

from pathlib import Path

import numpy as np
import pytest
from deltashard.errors import RestoreFailed

from tests.incidents.toys import ToyRun

POINTS = (
    "serve.owned", "serve.before_ready", "attach.admitted", "attempt.before_open", "attempt.after_open",
    "restore.planned", "restore.first_filled",
)  # fmt: skip


@pytest.fixture(scope="module")
def started_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a store with one checkpoint, and the state in it."""
    root = tmp_path_factory.mktemp("started")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        with ToyRun(root / "store") as run:
            run.train(3)
            run.save()
            return root / "store", run.state()


@pytest.mark.parametrize("point", POINTS)
def test_killed_sidecar_is_restarted(point, started_store, tmp_path, monkeypatch):
    store, state = started_store
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DELTASHARD_CRASH_AT", point)
    with ToyRun(store, sidecar={"linger_s": 0.0}) as run:
        assert run.ckpt._launcher._spawned == 2
        assert run.resumed is not None
        assert run.resumed.exact
        for name, kept in state.items():
            assert np.array_equal(run.state()[name], kept), name
        if point == POINTS[-1]:
            run.train()
            run.save()


def test_deadline_stops_retries_with_reasons(started_store, tmp_path, monkeypatch):
    """restore(deadline_s=0) makes no second attempt; a later call finds the next sidecar."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DELTASHARD_CRASH_AT", "restore.planned")
    with ToyRun(started_store[0], restore=False) as run:
        with pytest.raises(
            RestoreFailed, match=r"no sidecar stayed attached within 0 s: UNAVAILABLE: .*restore\(\)"
        ):
            run.ckpt.restore(deadline_s=0)
        restored = run.ckpt.restore()
        assert restored is not None
        assert restored.exact
