"""Incident tests use separate caches and shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.attach import lifecycle

from tests.support.forked_sidecar import forked_sidecars  # noqa: F401 - for all tests of this folder


@pytest.fixture(autouse=True)
def _isolated_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)


@pytest.fixture(autouse=True)
def _no_unknown_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose trainer logs an event that is illegal in its state."""

    def refuse(bug: lifecycle.IllegalEvent) -> None:
        raise bug

    monkeypatch.setattr(lifecycle, "log_illegal_event", refuse)
