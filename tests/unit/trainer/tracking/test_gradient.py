"""Gradients that live across a cut: said when they are used after it, and never for a loop that zeroes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Loop:
    """Two towers under an optimizer each."""

    def __init__(self, *, sparse: bool) -> None:
        torch.manual_seed(0)
        self.table, self.net = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 1)
        model = nn.ModuleDict({"table": self.table, "net": self.net})
        self.first = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.tracking = Tracking(
            model, [self.first, self.second], settings=TrackingSettings(hash_below_bytes=0)
        )
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.tracking.report = lambda name, facts: self.told.append((name, dict(facts)))
        self.cuts = 0

    def backward(self) -> None:
        self.net(self.table(torch.tensor([1, 2, 3]))).square().sum().backward()

    def zero(self, *, to_none: bool = True) -> None:
        for optimizer in (self.first, self.second):
            optimizer.zero_grad(set_to_none=to_none)

    def step(self) -> None:
        self.first.step()
        self.second.step()

    def cut(self) -> None:
        self.cuts += 1
        self.tracking.refresh()
        self.tracking.cut_taken(self.cuts, "all")
        self.tracking.committed(self.cuts, baseline=True)


def ordinary(loop: Loop, _: int) -> None:
    loop.zero()
    loop.backward()
    loop.step()
    loop.cut()


def zeroed_in_place(loop: Loop, _: int) -> None:
    loop.zero(to_none=loop.table.sparse)
    loop.backward()
    loop.step()
    loop.cut()


def with_closure(loop: Loop, _: int) -> None:
    def evaluate() -> float:
        loop.zero()
        loop.backward()
        return 0.0

    loop.first.step(evaluate)
    loop.second.step()
    loop.cut()


def zeroed_after(loop: Loop, _: int) -> None:
    loop.backward()
    loop.step()
    loop.zero()
    loop.cut()


def accumulated(loop: Loop, i: int) -> None:
    loop.backward()
    if i % 3 == 2:
        loop.step()
        loop.zero()
        loop.cut()


def two_rates_cut_where_both_stepped(loop: Loop, i: int) -> None:
    loop.first.zero_grad()
    loop.backward()
    loop.first.step()
    if i % 2:
        loop.second.step()
        loop.second.zero_grad()
        loop.cut()


def two_rates(loop: Loop, i: int) -> None:
    loop.first.zero_grad()
    loop.backward()
    loop.first.step()
    if i % 3 == 2:
        loop.second.step()
        loop.second.zero_grad()
    loop.cut()


def applied_late(loop: Loop, i: int) -> None:
    if i:
        loop.step()
    loop.zero()
    loop.backward()
    loop.cut()


def kept_as_momentum(loop: Loop, _: int) -> None:
    loop.backward()
    loop.step()
    for param in loop.net.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    loop.first.zero_grad()
    loop.cut()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "body",
    [ordinary, zeroed_in_place, zeroed_after, accumulated, two_rates_cut_where_both_stepped, with_closure],
)
def test_loops_that_zero_their_gradients_are_not_bothered(
    body: Callable[[Loop, int], None], sparse: bool
) -> None:
    """Wherever zero_grad() is, and whatever it does; no hook is left behind."""
    loop = Loop(sparse=sparse)
    for i in range(7):
        body(loop, i)
    assert loop.told == []
    assert [table.tracker for table in loop.tracking.tables] == [
        "hashes" if body is with_closure or not sparse else "gradients"
    ]
    loop.tracking.close()
    assert not loop.net.weight._backward_hooks


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("body", [two_rates, applied_late, kept_as_momentum])
def test_gradients_that_are_used_after_a_cut_are_said_once(
    body: Callable[[Loop, int], None], sparse: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two optimizers at different rates, application one step late, a gradient that is kept."""
    loop = Loop(sparse=sparse)
    for i in range(7):
        body(loop, i)
    assert [name for name, _ in loop.told] == ["gradient_alive"]
    assert caplog.text.count("No checkpoint holds .grad") == 1


def test_a_step_that_is_skipped_says_nothing() -> None:
    """GradScaler skips an infinite step: its gradient is zeroed like any other."""
    loop = Loop(sparse=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(5):
        loop.zero()
        loss = loop.net(loop.table(torch.tensor([1, 2]))).square().sum() * (float("inf") if i == 2 else 1.0)
        scaler.scale(loss).backward()
        for optimizer in (loop.first, loop.second):
            scaler.step(optimizer)
        scaler.update()
        loop.cut()
    assert loop.told == []


class Gan:
    """A generator and a discriminator, cut after each round."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.made, self.judged = nn.Linear(2, 3), nn.Linear(3, 1)
        self.og = torch.optim.SGD(self.made.parameters(), lr=0.1)
        self.od = torch.optim.SGD(self.judged.parameters(), lr=0.1)
        model = nn.ModuleDict({"g": self.made, "d": self.judged})
        self.tracking = Tracking(model, [self.og, self.od], settings=TrackingSettings(hash_below_bytes=0))
        self.told: list[str] = []
        self.tracking.report = lambda name, _: self.told.append(name)

    def generator_loss(self) -> torch.Tensor:
        return self.judged(self.made(torch.ones(4, 2))).square().mean()

    def discriminator_loss(self) -> torch.Tensor:
        fake = self.made(torch.ones(4, 2)).detach()
        return self.judged(fake).square().mean() + (self.judged(torch.ones(4, 3)) - 1).square().mean()

    def rounds(self, body: Callable[[Gan], None]) -> list[str]:
        for number in range(1, 6):
            body(self)
            self.tracking.refresh()
            self.tracking.cut_taken(number, "all")
            self.tracking.committed(number, baseline=True)
        self.tracking.close()
        for param in (*self.made.parameters(), *self.judged.parameters()):
            assert not param._backward_hooks
            assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        return self.told


def one_after_the_other(gan: Gan, *, to_none: bool = True) -> None:
    gan.og.zero_grad(set_to_none=to_none)
    gan.generator_loss().backward()
    gan.og.step()
    gan.od.zero_grad(set_to_none=to_none)
    gan.discriminator_loss().backward()
    gan.od.step()


def zeroed_in_place_one_after_the_other(gan: Gan) -> None:
    one_after_the_other(gan, to_none=False)


def looked_at_before_zeroing(gan: Gan) -> None:
    torch.autograd.grad(gan.discriminator_loss(), list(gan.judged.parameters()))
    one_after_the_other(gan)


def discriminator_never_zeroed(gan: Gan) -> None:
    gan.og.zero_grad()
    gan.generator_loss().backward()
    gan.og.step()
    gan.discriminator_loss().backward()
    gan.od.step()


def never_zeroed_out_of_place(gan: Gan) -> None:
    gan.og.zero_grad()
    gan.generator_loss().backward()
    gan.og.step()
    inputs = list(gan.judged.parameters())
    gan.discriminator_loss().backward(create_graph=True, inputs=inputs)
    gan.od.step()


def never_zeroed_in_closure(gan: Gan) -> None:
    def evaluate() -> torch.Tensor:
        loss = gan.discriminator_loss()
        loss.backward()
        return loss

    gan.od.step(evaluate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", [one_after_the_other, zeroed_in_place_one_after_the_other, looked_at_before_zeroing]
)
def test_what_arrives_and_is_zeroed_before_the_step_is_not_said(body: Callable[[Gan], None]) -> None:
    """The generator's loss reaches the discriminator, whose gradients are zeroed before it steps."""
    assert Gan().rounds(body) == []


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
@pytest.mark.parametrize(
    "body", [discriminator_never_zeroed, never_zeroed_out_of_place, never_zeroed_in_closure]
)
def test_what_arrives_and_stays_until_the_step_is_said(body: Callable[[Gan], None]) -> None:
    """Added in place, into another tensor, or while the optimizer steps."""
    assert Gan().rounds(body) == ["gradient_alive"]
