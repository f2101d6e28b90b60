"""Which checkpoints a trainer's end asked for."""

from types import SimpleNamespace

import pytest
from deltashard_checkpoint.deciding import ending


@pytest.mark.parametrize(
    ("reason", "asked", "alone", "in_a_group"),
    [
        *(("timer", False, False, False), ("user", False, False, False), ("drain", True, False, False)),
        *(("close", True, True, True), ("sigterm", True, True, False), ("stopping", True, True, False)),
    ],
)
def test_who_closed_has_ended_and_who_was_told_to_go_if_he_was_alone(reason, asked, alone, in_a_group):
    """In a group the others stay, or come together anew. Whatever is no ordinary save's reason is an eviction's."""
    said = SimpleNamespace(directive=f"{reason}; full: baseline")
    assert (ending.ends(said), ending.has_ended(said, 1), ending.has_ended(said, 4)) == (
        asked,
        alone,
        in_a_group,
    )


def test_a_users_word_never_means_an_end():
    assert ending.reason_of("eval") == "eval"
    for reserved in (ending.CLOSE, *ending.LEAVING):
        assert not ending.has_ended(SimpleNamespace(directive=ending.reason_of(reserved)), 1)
