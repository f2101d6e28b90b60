"""The lifecycle tables of an attachment, a snapshot and a restore: their pages in docs, and their guarantees."""

from __future__ import annotations

import pytest
from deltashard.attach import lifecycle as attach
from deltashard.attach.lifecycle import AttachEvent, AttachState, TrainingAttempt
from deltashard_checkpoint.transition import IllegalEvent

IN_PRODUCTION = attach.log_illegal_event


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
