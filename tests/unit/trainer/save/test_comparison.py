"""What was copied ahead of a cut and is not what was there is found once."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from deltashard.cut import precopy
from deltashard.cut.block_writer import BlockWriter, TableCut
from deltashard.cut.precopy import TableAhead
from deltashard.save.comparison import Comparison
from deltashard.save.handle import Flight
from deltashard.tracking.marks import RowSelection
from deltashard.tracking.tracking import Tracking
from torch import nn

from tests.support.trainer.tracking_case import COLUMNS, PLAIN, ROWS


class Arena:
    """Of blocks that nobody takes."""

    def __init__(self) -> None:
        self.shape = type("Shape", (), {"block_bytes": 1 << 20})
        self.memory = memoryview(bytearray(1 << 20))

    def block(self, _at: int) -> memoryview:
        return self.memory


class Program:
    """A table of which all rows are copied ahead of a cut, row 5 of them as it was for a while only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, strays: bool = True) -> None:
        monkeypatch.setattr(precopy, "PROBED", 0)
        self.model = nn.ModuleDict(
            {"e": nn.Embedding(ROWS, COLUMNS, sparse=True), "top": nn.Linear(COLUMNS, 1)}
        )
        self.weight = self.model["e"].weight
        self.tracking = Tracking(self.model, [torch.optim.SGD([self.weight], lr=0.1)], settings=PLAIN)
        self.tracking.refresh()
        (self.table,) = self.tracking.tables
        self.jobs: list[tuple[Future[None], object]] = []
        self.found = 0
        self.snapshot = Flight(cut=1, step=1, reason="timer")
        self.comparison = Comparison(self._later, found=self._count)
        arena = Arena()
        writer = BlockWriter(arena, block=lambda: 0, send=lambda _m, _b: None, threads=1)
        where = TableCut(
            position=0, fqn="e.weight", key="e.weight", box=self.table.box, weights=self.weight, fields=(),
            selection=RowSelection(all=False, ids=None),
        )  # fmt: skip
        self.table.marks.watch()
        self.ahead = TableAhead(self.table, where)
        kept = self.weight.detach().clone()
        if strays:
            self.weight.data[5] = 7.0
        list(self.ahead.copy(writer, "all"))
        self.weight.data.copy_(kept)
        self.renewed = self.ahead.renewed(where, "all")
        assert self.renewed is not None
        self.tracking.cut_taken(1, "all")
        self.comparison.begin(self.snapshot, [(self.table, self.ahead)])

    def _count(self) -> None:
        self.found += 1

    def _later(self, job):
        future = Future()
        self.jobs.append((future, job))
        return future

    def compare(self) -> None:
        """What the copying thread does."""
        for future, job in self.jobs:
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)


def test_a_stray_row_is_found_once(monkeypatch):
    """The table is found by hashes from then on."""
    program = Program(monkeypatch)
    program.compare()
    assert program.found == 1
    found = program.comparison.result()
    assert found.snapshot is program.snapshot
    assert [fault.rows for fault in found.faults] == [(5,)]
    assert found.count == 1
    assert "rows [5] of e.weight are not as they were at its step" in str(found)
    assert program.comparison.result() is None
    assert program.table.tracker == "hashes"


def test_nothing_astray_and_nothing_copied_ahead(monkeypatch):
    """Nobody has to wait, and nothing is reported."""
    program = Program(monkeypatch, strays=False)
    program.compare()
    assert program.comparison.result() is None
    program.comparison.begin(program.snapshot, [])
    assert program.comparison.result() is None
    assert (len(program.jobs), program.found) == (1, 0)


def test_a_comparison_that_failed_is_a_fault(monkeypatch):
    """It has found nothing, which is not to know that nothing is there."""
    program = Program(monkeypatch, strays=False)
    program.ahead._passes[0].copies[0].hashes = np.empty(ROWS + 1, np.uint64)
    program.compare()
    assert program.found == 1
    found = program.comparison.result()
    assert (found.count, found.faults) == (1, ())
    assert f"could not be compared with the live rows ({found.failed})" in str(found)


def test_a_comparison_that_is_not_over_is_not_waited_for_long(monkeypatch):
    """Whoever closes has a bound; what was not begun is not done any more."""
    program = Program(monkeypatch)
    found = program.comparison.result(time.monotonic())
    assert "not over in time" in found.failed
    assert program.jobs[0][0].cancelled()
    assert program.found == 0
