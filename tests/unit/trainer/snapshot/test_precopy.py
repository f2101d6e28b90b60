"""Precopies compared with the snapshot's contract: every changed row has its value at the snapshot."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deltashard.snapshot import memory, precopy
from deltashard.snapshot.precopy import Precopy, TablePrecopy, copying_thread
from deltashard.tracking.marks import Marks
from deltashard_checkpoint.format.schema import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trainer.arena import FakeArena, table_snapshot

ROWS, COLUMNS = 70, 3
FIRST = 1000
"""The row offset of the shard in its table."""
MODES = ["all", "since_baseline", "since_commit"]


def stored(arena):
    """Return row -> (weights, state) of the delivered blocks, and the fresh rows.

    Check that no block repeats, and that only batches marked `duplicated_rows` repeat a row.
    """
    found, order, fresh = {}, [], set()
    for batch in arena.sent:
        if not order or order[-1] != batch.block:
            assert batch.block not in order, "a batch in a block that was already closed"
            order.append(batch.block)
        ids, (weights, state) = arena.rows(batch, [torch.zeros(1, COLUMNS), torch.zeros(1)])
        for row, held in zip(
            (ids - FIRST).tolist(), zip(weights.tolist(), state.tolist(), strict=True), strict=True
        ):
            assert (row in found) == batch.duplicated, "a row in two batches"
            assert found.setdefault(row, held) == held, "two values of a row"
            assert row not in fresh, "a fresh row in two batches"
            if batch.fresh:
                fresh.add(row)
    return found, fresh


class TrainedTable:
    """A table that is trained and marked, with its changes since the newest commit and since the baseline."""

    def __init__(self):
        self.tracker, self.schema_version = "gradients", 0
        self.marks = Marks(ROWS)
        self.weights = torch.zeros(ROWS, COLUMNS)
        self.state = torch.zeros(ROWS)
        self.clock = 0.0
        self.changed = {mode: set(range(ROWS)) for mode in MODES}

    def watch(self):
        self.marks.watch()

    def write(self, rows):
        """Write rows, then mark them, as a step does."""
        self.clock += 1.0
        index = torch.tensor(sorted(rows), dtype=torch.int64)
        self.weights[index] = self.clock
        self.state[index] = -self.clock
        self.changed["since_commit"] |= rows
        self.changed["since_baseline"] |= rows

    def take_snapshot(self, **selection):
        box = Box(table="t", row_start=FIRST, row_stop=FIRST + ROWS, col_start=0, col_stop=COLUMNS)
        return table_snapshot(self.weights, [self.state], box=box, **selection)


rows_of = st.sets(st.integers(0, ROWS - 1), max_size=25)
during = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.integers(1, 3)),
        st.tuples(st.just("step"), rows_of),
        # A row is written, and the copying thread reads it, before its step marks it.
        st.tuples(st.just("torn"), rows_of),
        st.tuples(st.just("mark_all"), st.none()),
        st.tuples(st.just("schema"), st.none()),
    ),
    max_size=12,
)
scripts = st.lists(
    st.tuples(
        rows_of,
        st.sampled_from(MODES),
        during,
        st.sampled_from(["baseline", "commit", "failed", "lost"]),
        st.sampled_from(["snapshot", "snapshot", "discard", "other mode"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def check_script(script):
    """Take snapshots with precopies, and compare the delivered rows of each with the table."""
    table = TrainedTable()
    for number, (before, mode, between, outcome, end, wanted) in enumerate(script, 1):
        split = wanted and mode != "since_commit"
        table.write(before)
        table.marks.mark(torch.tensor(sorted(before), dtype=torch.int64))
        arena = FakeArena(1 << 10)
        writer = arena.writer(threads=1)
        table.watch()
        ahead = TablePrecopy(table, table.take_snapshot())
        written = []
        batches = ahead.copy(writer, mode, fresh_first=split)
        for what, how in between:
            if what == "copy":
                for _ in range(how):
                    if (batch := next(batches, None)) is not None:
                        written.append((ahead, batch))
            elif what in ("step", "torn"):
                table.write(how)
                if what == "torn" and (batch := next(batches, None)) is not None:
                    written.append((ahead, batch))
                table.marks.mark(torch.tensor(sorted(how), dtype=torch.int64))
            elif what == "mark_all":
                table.write(set(range(ROWS)))
                table.marks.mark_all()
            else:
                table.schema_version += 1
                table.marks.mark_all()
        now = "all" if end == "other mode" else mode
        refreshed = (
            None if end == "discard" or now != mode else ahead.refresh_copy(table.take_snapshot(), now)
        )
        assert not ahead.has_unmarked_writes, "a write without a mark"
        writer.redirect(block=arena.take, send=arena.send)
        copies = SimpleNamespace(writer=writer, stream=arena, _written=written)
        rows = Precopy.hand_over(copies, [] if refreshed is None else [ahead])
        if refreshed is None:
            assert rows == 0
            writer.table(table.take_snapshot(selection=table.marks.select(now)))
        else:
            assert rows == ahead.rows
            refreshed.write(writer, fresh_first=split)
        found, fresh = stored(arena)
        assert writer.copied.rows == len(found)
        want = set(range(ROWS)) if now == "all" else table.changed[now]
        assert found.keys() >= want, (now, sorted(want - found.keys()))
        if refreshed is not None:
            assert fresh >= (table.changed["since_commit"] if split else set()), "changed but not fresh"
            assert fresh <= (set(table.marks.find("since_commit", 0, ROWS)) if split else set())
            assert refreshed.full == (len(found) == ROWS)
        for row, (weights, state) in found.items():
            assert weights == table.weights[row].tolist(), (row, "weights of another step")
            assert state == float(table.state[row]), (row, "state of another step")
        if refreshed is not None:
            ahead.compare()
            assert not len(ahead.unmarked_rows), "a delivered row differs from the table"
        full = now == "all"
        table.marks.snapshot_taken(number, full=full)
        if outcome in ("commit", "baseline"):
            baseline = full and outcome == "baseline"
            table.marks.committed(number, baseline=baseline)
            table.changed["since_commit"] = set()
            if baseline:
                table.changed["since_baseline"] = set()
        elif outcome == "failed":
            table.marks.failed(number)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(precopy, "LIST_ROWS", 16)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(scripts)
def test_snapshot_holds_the_current_value_of_every_changed_row(script):
    """Rows are written at any point of the copy. Snapshots commit, fail or are lost."""
    check_script(script)


WRITTEN_AFTER_COPY = [({1, 2, 40}, "all", [("copy", 9), ("step", {2})], "baseline", "snapshot", False)]


@pytest.mark.parametrize("disabled", ["touched", "watch"])
def test_checker_detects_rows_of_another_step(monkeypatch, disabled):
    """The property is not vacuous: a row that is written after its copy must be copied again."""
    monkeypatch.setattr(precopy, "PROBE_ROWS", 0)
    check_script(WRITTEN_AFTER_COPY)
    if disabled == "touched":
        monkeypatch.setattr(Marks, "touched", lambda _marks: np.empty(0, np.int64))
    else:
        mark = Marks.mark

        def mark_then_watch(marks, ids):
            mark(marks, ids)
            marks.watch()

        monkeypatch.setattr(Marks, "mark", mark_then_watch)
    with pytest.raises(AssertionError, match="another step"):
        check_script(WRITTEN_AFTER_COPY)


def test_checker_detects_changed_rows_that_are_not_resent(monkeypatch):
    """Two of 70 rows change. A third row, whose copy is in the same batch, is written in place only."""
    script = [
        ({1}, "all", [], "baseline", "snapshot", False),
        ({1, 2}, "all", [("copy", 99), ("step", {9})], "lost", "snapshot", True),
    ]
    check_script(script)
    write = precopy.RefreshedCopy.write
    monkeypatch.setattr(
        precopy.RefreshedCopy,
        "write",
        lambda refreshed, writer, fresh_first: write(
            replace(refreshed, rest=tuple(each for each in refreshed.rest if not each.duplicated)),
            writer,
            fresh_first=fresh_first,
        ),
    )
    with pytest.raises(AssertionError, match="changed but not fresh"):
        check_script(script)


def test_no_memory_is_moved_while_it_is_read():
    """`share_memory_` swaps the memory under a tensor in place. It waits for the copying thread and for no other."""
    pool = copying_thread()
    tensor = torch.zeros(4)
    read, moved = threading.Event(), threading.Event()

    def reads() -> None:
        with memory.read_lock:
            read.set()
            assert not moved.wait(0.05)

    job = pool.submit(reads)
    assert read.wait(60)
    tensor.share_memory_()
    moved.set()
    job.result(60)
    assert tensor.is_shared()
    pool.shutdown()
