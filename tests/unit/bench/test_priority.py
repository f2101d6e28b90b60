"""Priority saves: the right rows come first, memory stays within its bound, what was saved begins anew."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
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
