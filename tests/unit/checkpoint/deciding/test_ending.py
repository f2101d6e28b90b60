"""Which checkpoints a trainer's end asked for."""

from __future__ import annotations

from dataclasses import dataclass

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
