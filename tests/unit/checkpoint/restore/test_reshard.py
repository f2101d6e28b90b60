"""Any history of shardings and policies restores to any sharding, with random runs through log, parts and plans."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.restore import checkpoint_reader
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.restore.plan import Want
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, box, schema

TABLE = schema(rows=90, columns=12)


@st.composite
def shardings(draw: st.DrawFn) -> list[Box]:
    """Draw a partition of the table: rows are split at most twice, and the columns of each band at most twice."""

    def splits(size: int) -> list[int]:
        return [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))), size]

    rows = splits(TABLE.rows)
    bands = list(itertools.pairwise(rows))
    found = []
    for start, stop in bands:
        columns = splits(TABLE.columns)
        found += [box(TABLE, start, stop, a, b) for a, b in itertools.pairwise(columns)]
    return found


saves = st.tuples(
    shardings(), st.lists(st.sampled_from(["full", "since_commit", "since_baseline"]), min_size=1, max_size=3)
)


@settings(max_examples=12, deadline=None)
@given(history=st.lists(saves, min_size=1, max_size=3), after=shardings(), seed=st.integers(0, 99))
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.slow
def test_any_history_restores_to_any_sharding(
    history: list, after: list[Box], seed: int, *, listed: bool
) -> None:
    """Parts are in the entry or in a manifest with a layout. With a layout, the first snapshot of each is a baseline.

    Weights and all state are exact: every shard of a row has the row's value of row-wise state.
    """
    model = SampleModel(TABLE, seed)
    with tempfile.TemporaryDirectory() as directory:
        first = history[0][0]
        run = SampleRun(
            Path(directory), world_size=len(first), layout=[[b] for b in first] if listed else None
        )
        commit = baseline = None
        dirty_commit: set[int] = set()
        dirty_baseline: set[int] = set()
        step = seq = 0
        for attempt, (boxes, modes) in enumerate(history):
            if attempt:
                run.open(len(boxes), [[b] for b in boxes] if listed else None)
                if listed and set(boxes) != set(history[attempt - 1][0]):
                    baseline = None
            for wanted in modes:
                mode = "full" if baseline is None else wanted
                step += 1
                changed = set(model.train(0.15).tolist())
                dirty_commit |= changed
                dirty_baseline |= changed
                ids, covers = {
                    "full": (range(TABLE.rows), None),
                    "since_commit": (sorted(dirty_commit), commit),
                    "since_baseline": (sorted(dirty_baseline), baseline),
                }[mode]
                ranks = [
                    ([b], model.frames(np.array(ids, np.int64), b, step=step, per_frame=11)) for b in boxes
                ]
                seq = commit = run.save([TABLE], ranks, step=step, covers=covers)
                dirty_commit = set()
                if mode == "full":
                    baseline, dirty_baseline = seq, set()
        state = run.log.refresh()
        targets = []
        for held in after:
            rows, columns = held.row_stop - held.row_start, held.col_stop - held.col_start
            targets.append(
                TableTarget(
                    schema=TABLE, box=held, weights=np.zeros((rows, columns), np.float32),
                    fields={"sum": np.zeros(rows, np.float32), "exp_avg": np.zeros((rows, columns), np.float32)},
                )
            )  # fmt: skip
        plan = checkpoint_reader.plan_restore(run.store, state, seq, [Want(schema=TABLE, boxes=tuple(after))])
        applier = FrameApplier(targets)
        for fetched in Fetcher(run.store, RUN, cache=run.cache).fetch(plan):
            applier.apply(fetched.data, fetched.tail)
        applier.finish()
        run.cache.close()
    for target in targets:
        b = target.box
        rows, columns = slice(b.row_start, b.row_stop), slice(b.col_start, b.col_stop)
        np.testing.assert_array_equal(target.weights, model.weights[rows, columns])
        np.testing.assert_array_equal(target.fields["exp_avg"], model.fields["exp_avg"][rows, columns])
        np.testing.assert_array_equal(target.fields["sum"], model.fields["sum"][rows])
