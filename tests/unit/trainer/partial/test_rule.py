"""Partial or full: nothing unclear is partial, no rank takes another road, and PLS is what was really lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from deltashard.loader.position import Position
from deltashard.partial.rule import (
    MAX_SHARED_BYTES,
    RecoveryInputs,
    RecoveryReport,
    RecoveryTerms,
    StagedMetadata,
    advance_positions,
    decide,
    unusable_reason,
)
from hypothesis import given
from hypothesis import strategies as st

WORLD = 4
NOW = RecoveryInputs(
    run="store run", world_size=WORLD, layout="laid", lineage="born", previous_attempt=5, seq=9, step=30, attempt=5,
    pls=0.0, recoveries=0, rows=400.0,
)  # fmt: skip
TERMS = RecoveryTerms(pls_target=0.5, planned_steps=1000)


def part(**said: Any) -> StagedMetadata:
    """A part that can be used, but for what is `said`."""
    fits: dict[str, Any] = {
        "run": "store run", "attempt": 5, "rank": 0, "world_size": WORLD, "layout": "laid", "lineage": "born",
        "covers": 9, "step": 40, "clean": True, "ahead": False, "pls": 0.0, "recoveries": 0,
    }  # fmt: skip
    return StagedMetadata(**fits | said)


def word(rank: int, /, *, lost: bool = False, rows: float = 100.0, **said: Any) -> RecoveryReport:
    return RecoveryReport(staged=None if lost else part(**{"rank": rank} | said), location="here", rows=rows)


def test_ranks_of_other_places_are_sent_what_they_take_unless_it_is_too_much() -> None:
    """Which ranks read the donor's part where it lies, and which cannot, all know; where somebody cannot, size counts."""
    words = [dataclasses.replace(word(r), location="here" if r in (1, 3) else f"there {r}") for r in range(4)]
    verdict = decide(words, NOW, TERMS)
    assert verdict.partial
    assert (verdict.donor, verdict.locations) == (0, (0, 1, 2, 1))
    assert (verdict.remote_ranks(0), verdict.remote_ranks(1)) == ((1, 2, 3), (0, 2))
    large = [dataclasses.replace(each, shared_bytes=MAX_SHARED_BYTES + 1) for each in words]
    assert "rank 0" in decide(large, NOW, TERMS).full_reason
    together = [dataclasses.replace(each, location="here") for each in large]
    assert decide(together, NOW, TERMS).partial


OF_ANYTHING_ELSE = [
    ({"run": "another"}, "another run's"),
    ({"rank": 1}, "it is rank 1's"),
    ({"attempt": 4}, "of attempt 4"),
    ({"attempt": 6}, "of attempt 6"),
    ({"world_size": 3}, "of 3 ranks"),
    ({"layout": "other"}, "sharded otherwise"),
    ({"lineage": "wiped"}, "another run of this name"),
    ({"covers": 10}, "builds on checkpoint 10"),
    ({"step": 29}, "of step 29"),
]
ANOTHER_RESUME_POINT = [
    ({"unusual": "restore(which='seq:3') was called"}, "seq:3"),
    ({"previous_attempt": None}, "does not say which attempt"),
    ({"previous_attempt": 7}, "and 7 was the one before"),
    ({"world_size": 5}, "there are 5"),
    ({"lineage": ""}, "not made under partial recovery"),
    ({"seq": 8}, "builds on checkpoint 9, and 8 is resumed"),
    ({"attempt": 3, "seq": 10}, "not of its attempt"),
    ({"step": 41}, "the checkpoint of 41"),
]
OTHERS = [word(r) for r in (1, 2, 3)]
UNCLEAR = {
    "cannot be read": (
        [dataclasses.replace(word(1, lost=True), unusable="its bytes do not have its hash"), *OTHERS[1:]],
        "rank 0's staged part: its bytes",
    ),
    "nobody": ([word(r, lost=True) for r in range(4)], "no rank has staged"),
    "nobody clean": ([word(r, clean=False) for r in range(4)], "every survivor"),
    "the first is torn": ([word(0, step=41, clean=False), *OTHERS], "was ahead"),
    "another's": (
        [dataclasses.replace(word(r, lost=True), misplaced_ranks=(3,) if r == 1 else ()) for r in range(4)],
        "rank 1 finds what rank 3 staged",
    ),
    "off": (
        [word(0), dataclasses.replace(word(1), disabled_reason="there are CUDA devices")],
        "rank 1: there are CUDA devices",
    ),
}


@pytest.mark.parametrize(
    ("words", "now", "why"),
    [
        *(([word(0, **said), *OTHERS], {}, why) for said, why in OF_ANYTHING_ELSE),
        *(([word(0), *OTHERS], now, why) for now, why in ANOTHER_RESUME_POINT),
        *((words, {}, why) for words, why in UNCLEAR.values()),
    ],
)
def test_whatever_is_unclear_makes_all_go_back(
    words: list[RecoveryReport], now: dict[str, Any], why: str
) -> None:
    verdict = decide(words, dataclasses.replace(NOW, **now), TERMS)
    assert not verdict.partial
    assert why in verdict.full_reason


STEPS = st.integers(28, 43)
WORDS = st.lists(
    st.builds(
        lambda **said: (said.pop("lost"), said),
        lost=st.booleans(),
        step=STEPS,
        clean=st.booleans(),
        ahead=st.booleans(),
        attempt=st.sampled_from([5, 5, 5, 5, 4]),
        covers=st.sampled_from([9, 9, 7, 10]),
        pls=st.floats(0, 0.01),
        rows=st.integers(0, 100),
    ),
    min_size=WORLD,
    max_size=WORLD,
)


@given(WORDS, st.floats(0.001, 0.05))
def test_whatever_ranks_say(said: list[tuple[bool, dict[str, Any]]], target: float) -> None:
    """Partial only with usable parts, one clean donor that nobody is beyond, and within the target."""
    words = [
        word(rank, lost=lost, rows=float(each["rows"]), **{k: v for k, v in each.items() if k != "rows"})
        for rank, (lost, each) in enumerate(said)
    ]
    verdict = decide(words, NOW, RecoveryTerms(pls_target=target, planned_steps=1000))
    survivors = {rank: w.staged for rank, w in enumerate(words) if w.staged is not None}
    if not verdict.partial:
        return
    assert not any(unusable_reason(staged, NOW, rank) for rank, staged in survivors.items())
    donor = survivors[verdict.donor]
    assert donor.clean
    assert verdict.step == donor.step == max(staged.step for staged in survivors.values())
    assert set(verdict.lost) == set(range(WORLD)) - survivors.keys()
    lost_steps = 0.0
    for rank, w in enumerate(words):
        at = verdict.steps[rank]
        assert at == (NOW.step if w.staged is None else w.staged.step)
        assert NOW.step <= at <= verdict.step
        torn = w.staged is not None and w.staged.ahead
        lost_steps += max(verdict.step - at, torn) * w.rows
        assert not verdict.own[rank] or (w.staged is not None and w.staged.clean and at == verdict.step)
    assert verdict.added_pls == pytest.approx(lost_steps / 400 / 1000)
    assert verdict.pls == pytest.approx(
        verdict.added_pls + max(staged.pls for staged in survivors.values()), abs=1e-12
    )
    assert verdict.pls <= target


def test_loaders_go_where_the_others_are() -> None:
    mine, theirs = (
        Position(epoch=1, delivered=n, samples=2 * n, start={"g": n}, fingerprint=f"{n}", first="b", own={"g": n}).tree()
        for n in (3, 8)
    )  # fmt: skip
    there = {"delivered": 8, "samples": 16, "fingerprint": None}
    found, notes = advance_positions({"a": mine}, {"a": theirs})
    assert found["a"] == mine | there
    assert notes == []
    found, notes = advance_positions({"a": mine}, {"a": theirs | {"epoch": 2}})
    assert found["a"] == theirs | there | {"epoch": 2, "first": None, "own": {"g": 3}}
    assert "another rank's random order" in notes[0]
    stateful = mine | {"kind": "stateful"}
    found, notes = advance_positions({"a": stateful}, {"a": theirs | {"kind": "stateful", "epoch": 2}})
    assert found["a"] == stateful
    assert "once more" in notes[0]
    assert advance_positions({"a": theirs, "b": mine}, {"a": mine}) == ({"a": theirs, "b": mine}, [])
