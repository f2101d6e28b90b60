"""Tests of the trainer hear of bugs that production only logs."""

from __future__ import annotations

import pytest
from deltashard.attach import lifecycle


@pytest.fixture(autouse=True)
def _no_unknown_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """What production logs, a news item that the trainer's state does not know, fails the test."""

    def refuse(bug: lifecycle.IllegalEvent) -> None:
        raise bug

    monkeypatch.setattr(lifecycle, "log_illegal_event", refuse)
