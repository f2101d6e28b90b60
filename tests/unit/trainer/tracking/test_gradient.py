"""Gradients that survive a snapshot are reported when they are used after it, and never for a loop that zeroes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


class TwoTowerLoop:
    """A table and a net over it, each under its own optimizer: two towers, or a generator and its discriminator."""

    def __init__(self, *, sparse: bool) -> None:
        torch.manual_seed(0)
        self.table, self.net = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 1)
        model = nn.ModuleDict({"table": self.table, "net": self.net})
        self.first = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.net.parameters(), lr=0.1)
        settings = TrackingSettings(hash_below_bytes=0)
        self.tracking = Tracking(model, [self.first, self.second], settings=settings)
        self.reported: list[str] = []
        self.tracking.report = lambda name, _facts: self.reported.append(name)
        self.snapshots = 0

    def loss(self, *, detached: bool = False) -> torch.Tensor:
        """Return the loss of both, or of the discriminator alone on the generator's output."""
        made = self.table(torch.tensor([1, 2, 3]))
        return self.net(made.detach() if detached else made).square().sum()

    def backward(self) -> None:
        self.loss().backward()

    def generate(self) -> None:
        """Train the generator. Its loss reaches the discriminator."""
        self.first.zero_grad()
        self.backward()
        self.first.step()

    def zero(self) -> None:
        self.first.zero_grad()
        self.second.zero_grad()

    def step(self) -> None:
        self.first.step()
        self.second.step()

    def take_snapshot(self) -> None:
        self.snapshots += 1
        self.tracking.refresh()
        self.tracking.snapshot_taken(self.snapshots, "all")
        self.tracking.committed(self.snapshots, baseline=True)


Body = Callable[[TwoTowerLoop, int], Any]


def ordinary(loop: TwoTowerLoop, _: int) -> None:
    loop.zero()
    loop.backward()
    loop.step()
    loop.take_snapshot()


def with_closure(loop: TwoTowerLoop, _: int) -> None:
    def evaluate() -> float:
        loop.zero()
        loop.backward()
        return 0.0

    loop.first.step(evaluate)
    loop.second.step()
    loop.take_snapshot()


def zeroed_after(loop: TwoTowerLoop, _: int) -> None:
    loop.backward()
    loop.step()
    loop.zero()
    loop.take_snapshot()


def accumulated(loop: TwoTowerLoop, i: int) -> None:
    loop.backward()
    if i % 3 == 2:
        loop.step()
        loop.zero()
        loop.take_snapshot()


def one_after_the_other(loop: TwoTowerLoop, _: int, *, to_none: bool = True) -> None:
    loop.generate()
    loop.second.zero_grad(set_to_none=to_none)
    loop.loss(detached=True).backward()
    loop.second.step()
    loop.take_snapshot()


def zeroed_in_place(loop: TwoTowerLoop, i: int) -> None:
    one_after_the_other(loop, i, to_none=False)


def two_rates(loop: TwoTowerLoop, i: int) -> None:
    loop.generate()
    if i % 3 == 2:
        loop.second.step()
        loop.second.zero_grad()
    loop.take_snapshot()


def applied_late(loop: TwoTowerLoop, i: int) -> None:
    if i:
        loop.step()
    loop.zero()
    loop.backward()
    loop.take_snapshot()


def never_zeroed(loop: TwoTowerLoop, _: int) -> None:
    loop.generate()
    loop.loss(detached=True).backward()
    loop.second.step()
    loop.take_snapshot()


ZEROED: list[Body] = [
    ordinary,
    zeroed_after,
    accumulated,
    with_closure,
    one_after_the_other,
    zeroed_in_place,
]
USED_LATER: list[Body] = [
    two_rates,
    applied_late,
    never_zeroed,
]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("body", [*ZEROED, *USED_LATER])
def test_gradients_used_after_a_snapshot_are_reported_once(
    body: Body, sparse: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that zeroes gradients is not reported, wherever it calls zero_grad(). No hook remains."""
    loop = TwoTowerLoop(sparse=sparse)
    for i in range(7):
        body(loop, i)
    is_reported = body in USED_LATER
    assert loop.reported == (["gradient_alive"] if is_reported else [])
    assert caplog.text.count("Checkpoints do not contain .grad") == is_reported
    if not is_reported:
        hashed = body is with_closure or not sparse
        assert [table.tracker for table in loop.tracking.tables] == ["hashes" if hashed else "gradients"]
    loop.tracking.close()
    for param in (*loop.net.parameters(), *loop.table.parameters()):
        assert not param._backward_hooks
        assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
