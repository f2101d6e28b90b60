"""`step()` is the last statement of the loop body: changes between it and the next optimizer step are reported."""

from __future__ import annotations

import pytest
import torch
from deltashard.save.step_order import StepOrderCheck
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from torch import nn


@pytest.mark.parametrize("loop", ["in order", "accumulated", "scheduler last", "parameter last"])
def test_changes_after_step_are_reported_once(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """Under accumulation the scheduler steps before every `step()`, the optimizer before every second one."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    clock = StepClock(tracking := Tracking(model, optimizer))
    watch = StepOrderCheck(tracking, {"scheduler": scheduler}, clock)
    for step in range(8):
        stepped = loop != "accumulated" or step % 2 == 0
        model(torch.ones(1, 2)).sum().backward()
        if stepped:
            optimizer.step()
        if loop != "scheduler last":
            scheduler.step()
        clock.begin_step()
        if stepped:
            watch.arm()
        if loop == "scheduler last":
            scheduler.step()
        if loop == "parameter last":
            with torch.no_grad():
                model.weight.mul_(0.5)
    warning = {
        "scheduler last": "scheduler scheduler changed between step()",
        "parameter last": "weight changed between step()",
    }.get(loop)
    assert caplog.text.count("changed between step()") == (warning is not None)
    assert warning is None or warning in caplog.text
