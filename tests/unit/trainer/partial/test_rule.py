"""Partial or full recovery: unclear cases are full, all ranks decide the same, and PLS is the actual loss."""

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
    run="store run", world_size=WORLD, layout="layout 1", lineage="lineage 1", previous_attempt=5, seq=9, step=30, attempt=5,
    pls=0.0, recoveries=0, rows=400.0,
)  # fmt: skip
TERMS = RecoveryTerms(pls_target=0.5, planned_steps=1000)


def part(**values: Any) -> StagedMetadata:
    """Return a usable part, except for what `values` changes."""
    fits: dict[str, Any] = {
        "run": "store run", "attempt": 5, "rank": 0, "world_size": WORLD, "layout": "layout 1", "lineage": "lineage 1",
        "covers": 9, "step": 40, "clean": True, "ahead": False, "pls": 0.0, "recoveries": 0,
    }  # fmt: skip
    return StagedMetadata(**fits | values)


def vote(rank: int, /, *, lost: bool = False, rows: float = 100.0, **values: Any) -> RecoveryReport:
    return RecoveryReport(
        staged=None if lost else part(**{"rank": rank} | values), location="here", rows=rows
    )


def test_remote_ranks_are_sent_the_part_within_a_size_limit() -> None:
    """All ranks know which ranks can read the donor's part in place. If a rank cannot, the size limit applies."""
    votes = [dataclasses.replace(vote(r), location="here" if r in (1, 3) else f"there {r}") for r in range(4)]
    verdict = decide(votes, NOW, TERMS)
    assert verdict.partial
    assert (verdict.donor, verdict.locations) == (0, (0, 1, 2, 1))
    assert (verdict.remote_ranks(0), verdict.remote_ranks(1)) == ((1, 2, 3), (0, 2))
    large = [dataclasses.replace(each, shared_bytes=MAX_SHARED_BYTES + 1) for each in votes]
    assert "rank 0" in decide(large, NOW, TERMS).full_reason
    together = [dataclasses.replace(each, location="here") for each in large]
    assert decide(together, NOW, TERMS).partial


UNUSABLE_PARTS = [
    ({"run": "another"}, "belongs to another run"),
    ({"rank": 1}, "it belongs to rank 1"),
    ({"attempt": 4}, "of attempt 4"),
    ({"attempt": 6}, "of attempt 6"),
    ({"world_size": 3}, "of 3 ranks"),
    ({"layout": "other"}, "sharded differently"),
    ({"lineage": "lineage 2"}, "another run of this name"),
    ({"covers": 10}, "builds on checkpoint 10"),
    ({"step": 29}, "of step 29"),
]
OTHER_RESUME_POINT = [
    ({"unusual": "restore(which='seq:3') was called"}, "seq:3"),
    ({"previous_attempt": None}, "does not report the previous attempt"),
    ({"previous_attempt": 7}, "but the previous attempt was 7"),
    ({"world_size": 5}, "there are 5"),
    ({"lineage": ""}, "not made under partial recovery"),
    ({"seq": 8}, "builds on checkpoint 9, but 8 is resumed"),
    ({"attempt": 3, "seq": 10}, "not committed by its attempt"),
    ({"step": 41}, "the checkpoint is of step 41"),
]
OTHERS = [vote(r) for r in (1, 2, 3)]
UNCLEAR = {
    "cannot be read": (
        [dataclasses.replace(vote(1, lost=True), unusable="its bytes do not have its hash"), *OTHERS[1:]],
        "rank 0's staged part: its bytes",
    ),
    "no part": ([vote(r, lost=True) for r in range(4)], "no rank has staged"),
    "no clean part": ([vote(r, clean=False) for r in range(4)], "every survivor"),
    "the first is torn": ([vote(0, step=41, clean=False), *OTHERS], "was ahead"),
    "misplaced": (
        [dataclasses.replace(vote(r, lost=True), misplaced_ranks=(3,) if r == 1 else ()) for r in range(4)],
        "rank 1 finds the part of rank 3",
    ),
    "off": (
        [vote(0), dataclasses.replace(vote(1), disabled_reason="there are CUDA devices")],
        "rank 1: there are CUDA devices",
    ),
}


@pytest.mark.parametrize(
    ("votes", "now", "why"),
    [
        *(([vote(0, **values), *OTHERS], {}, why) for values, why in UNUSABLE_PARTS),
        *(([vote(0), *OTHERS], now, why) for now, why in OTHER_RESUME_POINT),
        *((votes, {}, why) for votes, why in UNCLEAR.values()),
    ],
)
def test_unclear_state_forces_full_recovery(
    votes: list[RecoveryReport], now: dict[str, Any], why: str
) -> None:
    verdict = decide(votes, dataclasses.replace(NOW, **now), TERMS)
    assert not verdict.partial
    assert why in verdict.full_reason


STEPS = st.integers(28, 43)
VOTES = st.lists(
    st.builds(
        lambda **values: (values.pop("lost"), values),
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


@given(VOTES, st.floats(0.001, 0.05))
def test_partial_recovery_is_consistent_for_any_votes(
    values: list[tuple[bool, dict[str, Any]]], target: float
) -> None:
    """Partial recovery needs usable parts, one clean donor that no rank is ahead of, and a loss within the target."""
    votes = [
        vote(rank, lost=lost, rows=float(each["rows"]), **{k: v for k, v in each.items() if k != "rows"})
        for rank, (lost, each) in enumerate(values)
    ]
    verdict = decide(votes, NOW, RecoveryTerms(pls_target=target, planned_steps=1000))
    survivors = {rank: w.staged for rank, w in enumerate(votes) if w.staged is not None}
    if not verdict.partial:
        return
    assert not any(unusable_reason(staged, NOW, rank) for rank, staged in survivors.items())
    donor = survivors[verdict.donor]
    assert donor.clean
    assert verdict.step == donor.step == max(staged.step for staged in survivors.values())
    assert set(verdict.lost) == set(range(WORLD)) - survivors.keys()
    lost_steps = 0.0
    for rank, w in enumerate(votes):
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


def test_lost_loader_advances_to_the_survivors_position() -> None:
    behind, ahead = (
        Position(epoch=1, delivered=n, samples=2 * n, start={"g": n}, fingerprint=f"{n}", first="b", own={"g": n}).tree()
        for n in (3, 8)
    )  # fmt: skip
    moved = {"delivered": 8, "samples": 16, "fingerprint": None}
    found, notes = advance_positions({"a": behind}, {"a": ahead})
    assert found["a"] == behind | moved
    assert notes == []
    found, notes = advance_positions({"a": behind}, {"a": ahead | {"epoch": 2}})
    assert found["a"] == ahead | moved | {"epoch": 2, "first": None, "own": {"g": 3}}
    assert "another rank's random order" in notes[0]
    stateful = behind | {"kind": "stateful"}
    found, notes = advance_positions({"a": stateful}, {"a": ahead | {"kind": "stateful", "epoch": 2}})
    assert found["a"] == stateful
    assert "repeats the batches" in notes[0]
    assert advance_positions({"a": ahead, "b": behind}, {"a": behind}) == ({"a": ahead, "b": behind}, [])
