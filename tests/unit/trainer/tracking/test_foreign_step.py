"""Optimizers that step the Checkpointer's model but were not given to it."""

import gc
import logging

import pytest
import torch
from deltashard.tracking.tracking import Tracking


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_unregistered_optimizer_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Saves continue, as the given optimizer steps. After close(), and for other models, nothing is reported."""
    caplog.set_level(logging.WARNING)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    given = torch.optim.Adam(model[0].parameters())
    tracking = Tracking(model, [given])
    step(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    assert not caplog.records
    other = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        step(given)
        step(other)
    [record] = caplog.records
    assert "SGD stepped 2 parameters of the model (1.weight, 1.bias)" in record.getMessage()
    tracking.close()
    step(other)
    Tracking(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])
    gc.collect()
    step(other)
    assert len(caplog.records) == 1, "the Checkpointer is closed, or dropped"
