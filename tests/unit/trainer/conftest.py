"""Fixtures that turn events which production only logs into test failures."""

from __future__ import annotations

import pytest
from deltashard.attach import lifecycle


@pytest.fixture(autouse=True)
def _no_unknown_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test on an event that the trainer's state does not know. Production only logs it."""

    def refuse(bug: lifecycle.IllegalEvent) -> None:
        raise bug

    monkeypatch.setattr(lifecycle, "log_illegal_event", refuse)
