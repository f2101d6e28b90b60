"""Changes that scripts make to optimizers during training or at a restart: each is adopted or reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deltashard.tracking.user_optimizer import UserOptimizers
from torch import nn

from tests.support.trainer.blob_program import BlobProgram

Rule = Callable[..., torch.optim.Optimizer]


class Script:
    """A dense model under an optimizer with a scheduler."""

    def __init__(self, rule: Rule = torch.optim.AdamW, lr: float = 0.1) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.optimizers = [rule(self.model.parameters(), lr=lr)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)

    def begin(self) -> BlobProgram:
        self.program = BlobProgram(self.model, self.optimizers, scheduler=self.scheduler)
        return self.program

    def train(self, steps: int) -> BlobProgram:
        for _ in range(steps):
            self.optimizers[0].zero_grad()
            self.model(torch.ones(2, 4)).square().sum().backward()
            self.optimizers[0].step()
            self.scheduler.step()
            self.program.tracking.steps.end_step()
        return self.program


def trained(steps: int) -> dict[str, memoryview]:
    script = Script()
    script.begin()
    return script.train(steps).take_snapshot()


@pytest.mark.parametrize("script", [False, True])
def test_changed_hyperparameters_are_reported(script: bool) -> None:
    """The message names whose values apply: the checkpoint's or the script's. Scheduler changes are not reported."""
    again = Script(lr=0.02)
    group = again.optimizers[0].param_groups[0]
    group["weight_decay"] = 0.5
    again.scheduler.gamma = 0.25
    optimizer, scheduler = again.begin().restore(trained(4), script=script)
    assert "lr 0.1 -> 0.02" in optimizer
    assert "weight_decay 0.01 -> 0.5" in optimizer
    assert "gamma 0.5 -> 0.25" in scheduler
    assert group["weight_decay"] == (0.5 if script else 0.01)
    assert group["lr"] == (0.02 if script else 0.1 * 0.5**2)
    assert again.scheduler.gamma == (0.25 if script else 0.5)
    assert again.scheduler.last_epoch == 4


def test_changed_requires_grad_is_reported() -> None:
    """The restarted script freezes a parameter. The message names whether the checkpoint or the script applies."""
    for script in (False, True):
        again = Script()
        again.model[1].weight.requires_grad_(False)
        (note,) = again.begin().restore(trained(3), script=script)
        assert "requires_grad" in note
        assert "1.weight True -> False" in note
        assert again.model[1].weight.requires_grad is not script


def test_replaced_optimizer_of_a_module_is_adopted() -> None:
    """The script keeps the optimizer as an attribute of the model."""
    model: Any = nn.Linear(2, 1)
    model.optimizer = torch.optim.Adam(model.parameters())
    optimizers = UserOptimizers(model.optimizer, model)
    assert not optimizers.refresh()
    model.optimizer = torch.optim.SGD(model.parameters())
    assert optimizers.refresh()
    assert optimizers.now == [model.optimizer]
    model.optimizer = None
    assert not optimizers.refresh()
