"""Bytes that `make papers` counts are those in the store, and the checkpoints that they are of come back."""

from __future__ import annotations

import numpy as np
import pytest
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema

ROWS, COLUMNS = 3_000, 16


@pytest.fixture
def live(papers):
    rng = np.random.default_rng(0)
    schema = TableSchema(
        fqn="t.weight",
        rows=ROWS,
        columns=COLUMNS,
        dtype="float32",
        fields=(FieldSpec(name="sum", kind="rowwise", dtype="float32"),),
    )
    return papers("store_run").LiveTable(
        schema=schema,
        weights=rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        fields={"sum": rng.random(ROWS).astype(np.float32)},
    )


def train(live, seed: int, share: float = 0.2) -> np.ndarray:
    ids = np.flatnonzero(np.random.default_rng(seed).random(ROWS) < share)
    live.weights[ids] += 1
    live.fields["sum"][ids] += 1
    return ids


@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent"])
def test_every_byte_is_counted_and_the_rows_come_back(papers, live, policy):
    store_run = papers("store_run")
    with store_run.StoreRun(tables=[live], policy=policy, bits=32, keep_last=100) as run:
        begun = run.store.put_bytes
        run.save([np.empty(0, np.int64)])
        for seed in range(4):
            run.save([train(live, seed)])
        assert run.store.put_bytes - begun == sum(each.written_bytes for each in run.saved)
        # Nothing was retired: all that was put is there, but for a probe of the store and hints that newer ones replaced.
        assert 0 < run.store.put_bytes - run.saved[-1].held_bytes < 100 * len(run.saved)
        ((weights, fields),) = run.restored()
        np.testing.assert_array_equal(weights, live.weights)
        np.testing.assert_array_equal(fields["sum"], live.fields["sum"])


def test_what_a_policy_writes_and_needs(papers, live):
    """Rows of each checkpoint: all, those since the baseline, those since the last one."""
    store_run = papers("store_run")
    runs = {
        p: store_run.StoreRun(tables=[live], policy=p, bits=8) for p in ("full", "one-shot", "consecutive")
    }
    for run in runs.values():
        with run:
            changed = [np.empty(0, np.int64), *(train(live, seed) for seed in range(3))]
            for ids in changed:
                run.save([ids])
    union = [len(np.unique(np.concatenate(changed[1 : n + 1]))) for n in range(1, 4)]
    assert [each.rows for each in runs["full"].saved] == [ROWS] * 4
    assert [each.rows for each in runs["one-shot"].saved] == [ROWS, *union]
    assert [each.rows for each in runs["consecutive"].saved] == [ROWS, *map(len, changed[1:])]
    # A baseline and the newest increment, or all of them; what is retired does not count.
    saved = runs["one-shot"].saved
    assert saved[-1].chain_bytes < saved[0].written_bytes + saved[-1].written_bytes + 10_000
    assert saved[-1].held_bytes == saved[-1].chain_bytes
    saved = runs["consecutive"].saved
    assert saved[-1].chain_bytes >= sum(each.written_bytes for each in saved)
    # Full: the second chain is held, and no restore needs it.
    saved = runs["full"].saved
    assert saved[-1].held_bytes > 1.9 * saved[0].written_bytes
    assert saved[-1].chain_bytes < saved[0].written_bytes + 20_000, "the newest baseline, and the log"


def test_the_predictor_remembers_what_retention_took(papers, live):
    """It takes a baseline when it pays, although the log lists the newest increment only."""
    store_run = papers("store_run")
    with store_run.StoreRun(tables=[live], policy="intermittent", bits=32) as run:
        run.save([np.empty(0, np.int64)])
        for seed in range(6):
            run.save([train(live, seed, share=0.35)])
        assert [i for i, each in enumerate(run.saved) if each.baseline] == [0, 4]
