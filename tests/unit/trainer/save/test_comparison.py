"""What was copied ahead of a cut and is not what was there: who asks is told once, and whether the program is still the same."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from deltashard.cut import precopy
from deltashard.cut.block_writer import BlockWriter, TableCut
from deltashard.cut.precopy import TableAhead
from deltashard.save.comparison import Comparison
from deltashard.tracking.marks import RowSelection
from deltashard.tracking.tracking import Tracking
from torch import nn

from tests.support.trainer.tracking_case import COLUMNS, PLAIN, ROWS

SAYS = "whether rows are in the last checkpoint"


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
        self.model = nn.ModuleDict({"e": nn.Embedding(ROWS, COLUMNS), "top": nn.Linear(COLUMNS, 1)})
        self.weight = self.model["e"].weight
        self.tracking = Tracking(self.model, [torch.optim.SGD([self.weight], lr=0.1)], settings=PLAIN)
        self.tracking.refresh()
        (self.table,) = self.tracking.tables
        self.jobs: list[tuple[Future[None], object]] = []
        self.comparison = Comparison(self._later, self.tracking.signable)
        arena = Arena()
        writer = BlockWriter(arena, block=lambda: 0, send=lambda _m, _b: None, threads=1)
        where = TableCut(
            position=0, fqn="e.weight", key="e.weight", box=self.table.box, weights=self.weight, fields=(),
            selection=RowSelection(all=False, ids=None),
        )  # fmt: skip
        self.table.watch()
        self.ahead = TableAhead(self.table, where)
        kept = self.weight.detach().clone()
        if strays:
            self.weight.data[5] = 7.0
        list(self.ahead.copy(writer, "all"))
        self.weight.data.copy_(kept)
        self.renewed = self.ahead.renewed(where, "all")
        assert self.renewed is not None
        self.tracking.cut_taken(1, "all")
        self.comparison.begin([(self.table, self.ahead)])

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


def test_a_stray_row_is_told_once(monkeypatch, caplog):
    """The program is still what it was at the cut, so that its rows can be saved instead."""
    program = Program(monkeypatch)
    program.compare()
    doubt = program.comparison.ask()
    assert [fault.rows for fault in doubt.faults] == [(5,)]
    assert (doubt.count, doubt.failed, doubt.moved) == (1, "", "")
    assert program.comparison.ask() is None
    program.comparison.say(doubt, "It stays")
    assert "rows [5] of e.weight are not in the last checkpoint" in caplog.text
    assert program.table.tracker == "hashes"


def test_nothing_astray_and_nothing_copied_ahead(monkeypatch):
    """Nobody has to wait, and nothing is said."""
    program = Program(monkeypatch, strays=False)
    program.compare()
    assert program.comparison.ask() is None
    program.comparison.begin([])
    assert program.comparison.ask() is None
    assert len(program.jobs) == 1


@pytest.mark.parametrize("how", ["dense", "replaced", "table", "swept"])
def test_a_program_that_is_not_what_it_was_at_the_cut(monkeypatch, how):
    """What is live then is perhaps of no step: it is not to be saved as that one."""
    program = Program(monkeypatch)
    if how == "dense":
        with torch.no_grad():
            program.model["top"].bias.zero_()
    elif how == "replaced":
        program.model["top"].weight = nn.Parameter(torch.zeros(1, COLUMNS))
    elif how == "table":
        program.compare()
        program.model["e"] = nn.Embedding(ROWS, COLUMNS)
    else:
        program.weight.data.zero_()
    if how != "table":
        program.compare()
    assert "written since" in program.comparison.ask().moved


def test_a_comparison_that_failed_is_a_fault_that_is_said_once(monkeypatch, caplog):
    """It has found nothing, which is not to know that nothing is there; at the end it is said again."""
    caplog.set_level(logging.WARNING)
    program = Program(monkeypatch, strays=False)
    program.ahead._copies[0].hashes = np.empty(ROWS + 1, np.uint64)
    program.compare()
    doubt = program.comparison.ask()
    assert (doubt.count, doubt.faults, doubt.moved) == (1, (), "")
    for _ in range(2):
        program.comparison.say(doubt, "The save now has them")
    assert caplog.text.count(SAYS) == 1
    assert doubt.failed in caplog.text
    program.comparison.say(doubt, "It stays", last=True)
    assert caplog.text.count(SAYS) == 2


def test_a_comparison_that_is_not_over_is_not_waited_for_long(monkeypatch):
    """Whoever closes has a bound; what was not begun is not done any more."""
    program = Program(monkeypatch)
    doubt = program.comparison.ask(time.monotonic())
    assert "not over in time" in doubt.failed
    assert program.jobs[0][0].cancelled()
