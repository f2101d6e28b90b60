"""The lifecycle tables of an attachment, a snapshot and a restore: their pages in docs, and their guarantees."""

from __future__ import annotations

from types import ModuleType

import pytest
from deltashard.attach import lifecycle as attach
from deltashard.attach.lifecycle import AttachEvent, AttachState, TrainingAttempt
from deltashard.restore import lifecycle as restore
from deltashard.save import lifecycle as save
from deltashard_checkpoint.transition import IllegalEvent

from tests.support.tool import ROOT

IN_PRODUCTION = attach.log_illegal_event


@pytest.mark.parametrize(("table", "page"), [(attach, "trainer"), (save, "snapshot"), (restore, "restore")])
def test_lifecycle_page_is_up_to_date(table: ModuleType, page: str) -> None:
    """To regenerate a page, write what the module's `reference()` returns."""
    assert (ROOT / f"docs/reference/{page}-lifecycle.md").read_text() == table.reference()


def test_unknown_event_is_logged_and_training_continues(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state does not change. The fixture of these tests turns the log record into an error."""
    attempt = TrainingAttempt()
    with pytest.raises(IllegalEvent, match="NEW"):
        attempt.transition(AttachEvent.LOSE)
    monkeypatch.setattr(attach, "log_illegal_event", IN_PRODUCTION)
    assert attempt.transition(AttachEvent.LOSE) is AttachState.NEW
    assert "'lose' in state NEW" in caplog.text
