"""Whether a program is at a step boundary, or past a forward pass of training."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from deltashard.tracking.step_boundary import StepBoundaryMonitor
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def watched(model: nn.Module, optimizers: Any) -> tuple[StepBoundaryMonitor, StepClock]:
    """Return the step boundary monitor of a program, and the clock that counts its steps."""
    tracking = Tracking(model, optimizers)
    clock = StepClock(tracking)
    return StepBoundaryMonitor(tracking, clock), clock


def test_only_a_training_forward_leaves_the_step_boundary() -> None:
    """Forward passes run through the whole model, or through a part that keeps statistics or draws randomly."""
    model = net()
    step_boundary, clock = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(3, 2)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    assert not step_boundary.moved
    model.train()
    for forward in (lambda: model(x), lambda: model[1](torch.ones(3, 4)), lambda: model[2](torch.ones(3, 4))):
        clock.begin_step()
        forward()
        assert step_boundary.moved
    step_boundary.close()
    clock.begin_step()
    model(x)
    assert not step_boundary.moved


def test_submodules_of_an_uncalled_model_are_hooked_after_one_step() -> None:
    """A program that calls the whole model does not pay for these hooks."""
    towers = nn.ModuleDict({"both": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    step_boundary, clock = watched(towers, torch.optim.SGD(towers.parameters(), lr=0.1))
    for stepped in (False, True):
        if stepped:
            step_boundary.first_step_done()
        clock.begin_step()
        towers["both"][1](torch.ones(1, 2))
        assert step_boundary.moved == stepped
    model = net()
    step_boundary, clock = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(3, 2))
    step_boundary.first_step_done()
    clock.begin_step()
    model[0](torch.ones(3, 2))
    assert not step_boundary.moved


def test_copies_and_pickles_of_the_model_have_no_hooks() -> None:
    """The forward pass of an EMA copy is not a step of the program."""
    model = net()
    step_boundary, _ = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other(torch.ones(3, 2))
        assert not step_boundary.moved


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.slow
def test_compiled_model_is_not_recompiled_per_step(fullgraph: bool) -> None:
    """The hooks run inside the compiled frame. Reading a step counter there would recompile the frame at each step."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_boundary, clock = watched(model, [optimizer])
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
    for _ in range(12):
        optimizer.zero_grad()
        compiled(torch.ones(3, 2)).sum().backward()
        assert step_boundary.moved
        optimizer.step()
        clock.begin_step()
        assert not step_boundary.moved
        clock.end_step()
    assert counter.frame_count == 1
    step_boundary.close()
