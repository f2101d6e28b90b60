"""`doctor()`: its report on a program, and the full comparison at the first snapshots."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from deltashard.attach.rank import Rank
from deltashard.doctor import Diagnosis, diagnose
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program
from deltashard.save.capture import Capture
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import nn

GRADIENTS = TrackingSettings(hash_below_bytes=0, audit_rows=0)


def _program(
    model: nn.Module, optimizers: Any, settings: TrackingSettings | None = None, **state: Any
) -> Program:
    return Program(Tracking(model, optimizers, settings=settings), state)


def _doctor(*program: Any, **state: Any) -> Diagnosis:
    return diagnose(_program(*program, **state), {})


def _model() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(items=nn.Embedding(5000, 16, sparse=True), top=nn.Linear(16, 4), norm=nn.BatchNorm1d(4))
    )


def test_doctor_reports_tracking_and_saved_state() -> None:
    model = _model()
    tables = torch.optim.Adagrad(model.items.parameters(), lr=0.1)
    dense = torch.optim.AdamW([*model.top.parameters(), *model.norm.parameters()], lr=0.1)
    found = _doctor(torch.compile(model), [tables, dense], GRADIENTS, counter={"n": 1})
    (table,) = found.tables
    assert (table.name, table.rows, table.tracker) == ("items.weight", 5000, "gradients")
    assert "Adagrad" in table.optimizer
    text = str(found)
    for name in ("items.weight", "4 dense parameters and 3 buffers", "Adagrad, AdamW", "counter", "sum"):
        assert name in text
    (missing,) = found.missing
    assert "no loader is wrapped" in missing.meaning
    assert "position in the data" not in found.line, "a loader may still be wrapped"
    assert "\n" not in found.line


def test_doctor_reports_unsaved_state() -> None:
    model = _model()
    model.top.register_buffer("mask", torch.zeros(3), persistent=False)
    model.top.running = torch.zeros(2)
    model.top.history = [torch.zeros(2)]
    model.top.own = [model.top.weight]
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    text = str(_doctor(model, optimizer))
    assert "top.own" not in text, "a parameter is saved"
    names = "top.mask", "top.running", "top.history"
    for name in (*names, "scheduler of SGD", "optimizer state of items.weight"):
        assert name in text
    assert "optimizer was given" in str(_doctor(_model(), ()))


@pytest.mark.parametrize("given", ["scheduler", "list", "pair", "nothing"])
def test_forgotten_scheduler_is_reported_at_the_first_snapshot(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler is reported only if no given object could hold it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state: dict[str, Any] = {
        "scheduler": {"s": scheduler},
        "list": {"all": [scheduler]},
        "pair": {"s": (scheduler.state_dict, scheduler.load_state_dict)},
        "nothing": {"n": {"x": 1}},
    }[given]
    program = _program(model, optimizer, **state)
    program.tracking.refresh()
    capture = Capture(program, LoaderRegistry(lambda: 0), rank=Rank())
    for _ in range(2):
        list(capture.blobs(0, None))
    assert caplog.text.count("is not in state=") == (given == "nothing")
