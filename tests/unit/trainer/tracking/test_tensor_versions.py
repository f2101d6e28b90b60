"""One check of all tables of an optimizer finds what separate checks of each table find."""

from __future__ import annotations

import pytest
import torch
from deltashard.tracking.tensor_versions import TensorVersionSet
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import nn

from tests.support.trainer.tracking_case import quiet

SETTINGS = TrackingSettings(hash_below_bytes=0)
ROWS, TABLES, THIS = 20, 5, 2


class VersionsCase:
    """Five tables under one optimizer, trained until a step compares versions only."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.Embedding(ROWS, 4, sparse=True) for _ in range(TABLES))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.tracking = Tracking(self.model, self.optimizer, settings=SETTINGS)
        for _ in range(3):
            self.train()
        self.take_snapshot(1)
        self.train()

    def train(self, ids=(1, 2), tables=range(TABLES)):
        self.optimizer.zero_grad()
        with quiet():
            torch.stack([self.model[i](torch.tensor(ids)).sum() for i in tables]).sum().backward()
            self.optimizer.step()

    def take_snapshot(self, number):
        self.tracking.refresh()
        self.tracking.snapshot_taken(number, "all")
        self.tracking.committed(number, baseline=True)

    def dirty(self):
        self.tracking.refresh()
        found = []
        for table in self.tracking.tables:
            chosen = table.select_rows("since_commit")
            found.append(list(range(ROWS)) if chosen.all else chosen.ids.tolist())
        return found

    @property
    def weight(self):
        return self.model[THIS].weight

    @property
    def entry(self):
        return self.optimizer.state[self.weight]

    # -- changes between two steps

    def write_weight(self):
        with torch.no_grad():
            self.weight[7] += 1

    def swap_memory(self):
        self.weight.data = self.weight.data.clone()

    def replace_state(self):
        self.entry["sum"] = self.entry["sum"] * 2

    def add_state(self):
        self.entry["more"] = torch.zeros(ROWS)

    def drop_and_add_state(self):
        self.entry["other"] = self.entry.pop("sum") + 1
        self.entry["sum"] = self.entry.pop("other")

    def replace_all_state(self):
        self.optimizer.state = type(self.optimizer.state)(
            self.optimizer.state.default_factory,
            {
                k: {n: t + 0 for n, t in v.items()} if k is self.weight else v
                for k, v in self.optimizer.state.items()
            },
        )

    def freeze(self):
        self.weight.requires_grad_(False)


BETWEEN = [name for name in vars(VersionsCase) if name.split("_")[0] in (
    "write", "swap", "replace", "add", "drop", "freeze", "renormalise",
)]  # fmt: skip


@pytest.fixture
def checks(monkeypatch):
    """Return the list of the results of `TensorVersionSet.unchanged`, one for each check."""
    results = []
    real = TensorVersionSet.unchanged
    monkeypatch.setattr(TensorVersionSet, "unchanged", lambda self: results.append(real(self)) or results[-1])
    return results


@pytest.mark.parametrize("between", BETWEEN)
def test_external_changes_are_detected_by_the_next_step(checks, between):
    """All rows of the table count as changed; the other tables keep their marks."""
    case = VersionsCase()
    getattr(case, between)()
    case.train()
    assert checks[-1] is False
    dirty = case.dirty()
    assert dirty.pop(THIS) == list(range(ROWS))
    assert dirty == [[1, 2]] * (TABLES - 1)
    if case.tracking.tables[THIS].tracker == "gradients":
        case.train()  # the first step after a snapshot's check takes the tables one by one
        case.train()
        assert checks[-1] is True
