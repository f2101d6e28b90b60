"""Priority saves: the right rows come first, memory stays within its bound, what was saved begins anew."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

PRIORITY = runpy.run_path(str(Path(__file__).parents[3] / "bench" / "papers" / "priority.py"))
EVERY, AccessCounts = PRIORITY["EVERY"], PRIORITY["AccessCounts"]
SampledReads, scar, top = PRIORITY["SampledReads"], PRIORITY["scar"], PRIORITY["top"]

ROWS = 40
ids = st.lists(st.integers(0, ROWS - 1), max_size=30).map(lambda rows: np.array(rows, np.int64))
reads = st.lists(ids, max_size=12)


@given(scores=st.lists(st.integers(0, 9), max_size=50), k=st.integers(0, 60))
def test_the_top_are_the_largest_above_zero_and_of_equals_the_lowest_ids(scores, k):
    wanted = sorted((i for i, score in enumerate(scores) if score), key=lambda i: (-scores[i], i))[:k]
    assert top(np.array(scores, np.float32), k).tolist() == sorted(wanted)


@given(moved=st.sets(st.integers(0, ROWS - 1)), k=st.integers(0, ROWS))
def test_scar_scores_are_distances_and_its_top_rows_moved_farthest(moved, k):
    saved = np.random.default_rng(1).normal(size=(ROWS, 8)).astype(np.float32)
    weights = saved.copy()
    for row in moved:
        weights[row, row % 8] += np.float32(row + 1)
    scores = scar(weights, saved)
    assert scores.dtype == np.float32
    assert np.allclose(scores, np.linalg.norm(weights - saved, axis=1), rtol=1e-6)
    assert top(scores, k).tolist() == sorted(sorted(moved, reverse=True)[:k])
    weights[top(scores, ROWS)] = saved[top(scores, ROWS)]
    assert not scar(weights, saved).any()


def test_scar_of_more_rows_than_it_takes_at_a_time():
    rng = np.random.default_rng(2)
    weights, saved = (rng.normal(size=(40_000, 4)).astype(np.float32) for _ in range(2))
    assert np.allclose(scar(weights, saved), np.linalg.norm(weights - saved, axis=1), rtol=1e-5)


@given(steps=reads, k=st.integers(0, ROWS), more=reads)
def test_counts_are_those_since_the_row_was_saved(steps, k, more):
    counts, model = AccessCounts(ROWS), np.zeros(ROWS, np.int64)
    for step in steps:
        counts.read(step)
        np.add.at(model, step, 1)
    chosen = counts.top(k)
    assert chosen.tolist() == top(model, k).tolist()
    counts.saved(chosen)
    model[chosen] = 0
    for step in more:
        counts.read(step)
        np.add.at(model, step, 1)
    assert counts.counts.tolist() == model.tolist()
    assert counts.counts.nbytes == 4 * ROWS


def test_a_full_counter_does_not_wrap():
    counts = AccessCounts(2)
    counts.counts[1] = np.iinfo(np.uint32).max - 1
    counts.read(np.array([1, 1, 1]))
    assert counts.counts.tolist() == [0, np.iinfo(np.uint32).max]
    assert counts.top(1).tolist() == [1]


@given(steps=reads, capacity=st.integers(0, 15), seed=st.integers(0, 5))
def test_a_sample_holds_rows_of_every_second_step_within_its_capacity(steps, capacity, seed):
    sample = SampledReads(capacity, seed=seed)
    seen: set[int] = set()
    for at, step in enumerate(steps):
        sample.read(step)
        if at % EVERY == 0:
            seen |= set(step.tolist())
        assert sample.ids.nbytes <= 4 * capacity
    size = len(sample.ids)
    taken = sample.take()
    assert taken.dtype == np.int64
    assert len(set(taken.tolist())) == len(taken) == size
    assert set(taken.tolist()) <= seen
    if len(seen) <= capacity:
        assert taken.tolist() == sorted(seen)
    assert len(sample.take()) == 0


def test_a_full_sample_stays_full_and_keeps_old_and_new_rows_alike():
    kept = np.zeros(200)
    for seed in range(400):
        sample = SampledReads(50, seed=seed)
        for step in (np.arange(100), np.empty(0, np.int64), np.arange(100, 200)):
            sample.read(step)
        taken = sample.take()
        assert len(taken) == 50
        kept[taken] += 1
    # Old ones had to survive twice, 50 of 100 and then 50 of 150; new ones once.
    assert kept[:100].mean() / 400 == pytest.approx(1 / 6, rel=0.1)
    assert kept[100:].mean() / 400 == pytest.approx(1 / 3, rel=0.1)


def test_the_same_seed_discards_the_same_rows():
    one, other = (SampledReads(10, seed=3) for _ in range(2))
    for sample in (one, other):
        sample.read(np.arange(100))
    assert one.take().tolist() == other.take().tolist()


def test_a_sample_goes_on_by_step_after_it_was_taken():
    sample = SampledReads(10, seed=0)
    sample.read(np.array([1]))
    assert sample.take().tolist() == [1]
    sample.read(np.array([2]))
    sample.read(np.array([3]))
    assert sample.take().tolist() == [3]
