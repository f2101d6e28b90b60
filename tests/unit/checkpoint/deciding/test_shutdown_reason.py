"""Which checkpoints were requested by a trainer's shutdown."""

from types import SimpleNamespace

import pytest
from deltashard_checkpoint.deciding import shutdown_reason


@pytest.mark.parametrize(
    ("reason", "asked", "alone", "in_a_group"),
    [
        *(("timer", False, False, False), ("user", False, False, False), ("drain", True, False, False)),
        *(("close", True, True, True), ("sigterm", True, True, False), ("stopping", True, True, False)),
    ],
)
def test_close_is_an_end_and_termination_only_without_a_group(reason, asked, alone, in_a_group):
    """In a group, the other ranks stay or form a new group. An unknown reason counts as an eviction."""
    checkpoint = SimpleNamespace(directive=f"{reason}; full: baseline")
    assert (
        shutdown_reason.is_shutdown_save(checkpoint),
        shutdown_reason.has_ended(checkpoint, 1),
        shutdown_reason.has_ended(checkpoint, 4),
    ) == (
        asked,
        alone,
        in_a_group,
    )


def test_user_requested_save_is_never_an_end():
    assert shutdown_reason.user_reason("eval") == "eval"
    for reserved in (shutdown_reason.CLOSE, *shutdown_reason.TERMINATION_REASONS):
        assert not shutdown_reason.has_ended(
            SimpleNamespace(directive=shutdown_reason.user_reason(reserved)), 1
        )
