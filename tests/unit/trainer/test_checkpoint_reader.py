"""`deltashard.open_checkpoint` reads a run without a sidecar and writes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
from deltashard import checkpoint_reader
from deltashard.errors import UserError
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.garbage_collection import collect
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.restore.open_checkpoint import _ranges
from deltashard_checkpoint.stores.abc import BucketMissing
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli import checkpoint_choice
from deltashard_cli import target as targets
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.written_run import HALF, ITEMS, WrittenRun


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenRun]:
    """Write a baseline (step 10, pinned "best") and two deltas (steps 20 and 30)."""
    run = WrittenRun(open_store(f"file://{tmp_path}/store"), "team/r", tmp_path)
    first = run.save(step=10, pins=("best",), metadata={"loss": "0.5"})
    second = run.save(run.train(), step=20, covers=first)
    run.save(run.train(0.01), step=30, covers=second)
    yield run
    run.close()


def _files(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


def test_tables_rows_and_dense_tensors_are_read_as_saved(written: WrittenRun, tmp_path: Path) -> None:
    before = _files(tmp_path / "store")
    with deltashard.open_checkpoint(tmp_path / "store", "team/r") as found:
        assert (found.step, found.run) == (30, "team/r")
        assert set(found.tables) == {ITEMS.fqn, HALF.fqn}
        whole = found.table(ITEMS.fqn)
        assert np.array_equal(whole.weights.numpy(), written.items.weights)
        assert {name: t.shape for name, t in whole.state.items()} == {"sum": (3000,), "exp_avg": (3000, 16)}
        ids = [2999, 5, 5, 700, 0]
        for given_ids in (ids, np.array(ids), torch.tensor(ids)):
            some = found.rows(ITEMS.fqn, given_ids)
            assert torch.equal(some.weights, whole.weights[ids])
            assert all(torch.equal(some.state[name], whole.state[name][ids]) for name in whole.state)
        assert found.rows(ITEMS.fqn, []).weights.shape == (0, 16)
        half = found.table(HALF.fqn).weights
        assert half.dtype == torch.bfloat16
        assert np.array_equal(half.view(torch.uint16).numpy(), written.half.weights)
        assert "mlp.0.weight" in found.dense
        assert np.array_equal(found.dense["mlp.0.weight"].numpy(), written.dense)
    assert _files(tmp_path / "store") == before


def test_missing_items_are_reported(written: WrittenRun, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(CheckpointNotFound):
        deltashard.open_checkpoint(store, "team/other")
    with pytest.raises(CheckpointNotFound, match="live: "):
        deltashard.open_checkpoint(store, "team/r", "step:11")
    with pytest.raises(BucketMissing):
        deltashard.open_checkpoint(tmp_path / "nowhere", "team/r")
    assert not (tmp_path / "nowhere").exists()
    with deltashard.open_checkpoint(store, "team/r") as found:
        with pytest.raises(UserError, match=rf"its tables are .*{ITEMS.fqn}"):
            found.table("items")
        with pytest.raises(UserError, match="rows 0 to 2999"):
            found.rows(ITEMS.fqn, [3000])
        with pytest.raises(UserError, match="integers"):
            found.rows(ITEMS.fqn, [0.5])


@given(st.sets(st.integers(0, 100_000), max_size=200))
def test_ranges_cover_all_ids_and_are_few(ids: set[int]) -> None:
    wanted = np.array(sorted(ids), np.int64)
    ranges = _ranges(wanted)
    assert len(ranges) <= 64
    assert all(any(a <= i < b for a, b in ranges) for i in ids)
    assert all(b <= c for (_, b), (c, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("reader", ["reader", "command line"])
def test_checkpoint_retired_during_open_is_not_reported_corrupt(
    written: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """If the chosen checkpoint is deleted, the newest one replaces it. A deleted name is reported as deleted."""
    place = {"reader": checkpoint_reader, "command line": checkpoint_choice}[reader]
    chosen = place.choose
    store = written.log.store
    steps: list[int] = []

    def choose_and_lose(*args: Any) -> Any:
        found = chosen(*args)
        steps.append(found.step)
        if len(steps) == 1:
            for step in (40, 50):
                written.save(step=step)
            append_retirement(RunLog(store, "team/r"), Retention(keep_last=1))
            assert collect(RunLog(store, "team/r"), grace_s=0).objects
        return found

    monkeypatch.setattr(place, "choose", choose_and_lose)
    if reader == "reader":
        with deltashard.open_checkpoint(tmp_path / "store", "team/r") as found:
            weights = found.table(ITEMS.fqn).weights.numpy()
    else:
        target = targets.find_run(f"file://{tmp_path}/store/team/r", None)
        weights = checkpoint_choice.with_checkpoint(
            target, "latest", lambda one: next(one.tables([ITEMS])).weights
        )
    assert steps == [30, 50]
    assert np.array_equal(weights, written.items.weights)
