"""Which checkpoints a trainer's end asked for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from deltashard_checkpoint.deciding import ending
from deltashard_checkpoint.deciding.ending import ends


@dataclass(frozen=True)
class Entry:
    """What of a commit is looked at."""

    directive: str


def test_which_saves_a_trainers_end_asks_for() -> None:
    """Whatever reason is none of ordinary saves is the word of an eviction or a drain."""
    assert [ends(Entry(f"{reason}; full: baseline")) for reason in ("timer", "user", "close", "drain")] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "alone", "in_a_group"),
    [("close", True, True), ("sigterm", True, False), ("stopping", True, False), ("drain", False, False)],
)
def test_who_closed_has_ended_and_who_was_told_to_go_if_he_was_alone(
    reason: str, alone: bool, in_a_group: bool
) -> None:
    """In a group the others stay, or come together anew."""
    said = Entry(f"{reason}; q8")
    assert (ending.has_ended(said, 1), ending.has_ended(said, 4)) == (alone, in_a_group)


def test_a_users_word_never_means_an_end() -> None:
    assert ending.reason_of("eval") == "eval"
    for reserved in (ending.CLOSE, *ending.LEAVING):
        assert not ending.has_ended(Entry(ending.reason_of(reserved)), 1)
