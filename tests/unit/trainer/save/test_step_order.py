"""`step()` is the last statement of the loop body: what comes after it and before the next optimizer step is said."""

from __future__ import annotations

import pytest
import torch
from deltashard.save.step_order import OrderWatch
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from torch import nn


def program() -> tuple[
    nn.Linear, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR, StepClock, OrderWatch
]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tracking = Tracking(model, optimizer)
    clock = StepClock(tracking)
    return model, optimizer, scheduler, clock, OrderWatch(tracking, {"scheduler": scheduler}, clock)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_loop_in_order_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Optimizer, scheduler, then the cut."""
    model, optimizer, scheduler, _, watch = program()
    for _ in range(3):
        train(model, optimizer)
        scheduler.step()
        watch.arm()
    assert caplog.text == ""


def test_a_scheduler_after_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its name and the rule."""
    model, optimizer, scheduler, _, watch = program()
    for _ in range(3):
        train(model, optimizer)
        watch.arm()
        scheduler.step()
    assert caplog.text.count("scheduler scheduler changed between step()") == 1


def test_a_parameter_written_after_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A dense one: tables have their own checks."""
    model, optimizer, _, _, watch = program()
    train(model, optimizer)
    watch.arm()
    with torch.no_grad():
        model.weight.mul_(0.5)
    train(model, optimizer)
    assert "weight changed between step()" in caplog.text


def test_a_scheduler_under_accumulation_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It moves in every step, before `step()`; the optimizer steps in every second one."""
    model, optimizer, scheduler, clock, watch = program()
    for step in range(1, 9):
        model(torch.ones(1, 2)).sum().backward()
        if step % 2 == 1:
            optimizer.step()
        scheduler.step()
        clock.tick()
        if step % 2 == 1:
            watch.arm()
    assert caplog.text == ""
