"""Programs that nobody wrote: modules, optimizers, wrappers, hooks and loaders put together, killed, resumed.

Two outcomes are allowed: the resumed program ends with the same bits as the one that went on, or it is said (a refusal
when it is built, a warning, a note of the restore). `DELTASHARD_PROGRAMS` asks for more of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
from deltashard.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

ROWS, WIDTH = 400, 8
optim = torch.optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Baskets(Dataset[Any]):
    """Ids and a label; `moving` draws from a generator of its own and counts."""

    def __init__(self, *, noisy: bool, moving: bool) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.items = torch.randint(ROWS, (44, 3), generator=drawn)
        self.noisy, self.moving = noisy, moving
        self.generator = np.random.default_rng(1)
        self.count = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        label = torch.zeros(1)
        if self.noisy:
            label = label + torch.rand(1)
        if self.moving:
            self.count += 1
            label = label + self.count % 7 + float(self.generator.random())
        return self.items[i], label


class Own(Sampler[int]):
    """An order of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)

    def __len__(self) -> int:
        return 44

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(44).tolist()


class Net(nn.Module):
    """A table, perhaps twice used, and dense layers that draw and count."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if program.bag else nn.Embedding
        self.items = kind(ROWS, WIDTH, sparse=program.sparse)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.top = nn.Linear(WIDTH, 1)
        self.bag = program.bag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.items(x)
        return self.top(self.drop(self.norm(rows if self.bag else rows.sum(1))))


@dataclass(frozen=True, kw_only=True)
class Program:
    """What hypothesis chooses."""

    bag: bool
    sparse: bool
    tables: str
    dense: str
    wrapper: str
    hook: str
    loader: str
    noisy: bool
    moving: bool
    save_at: int
    more: int


SPARSE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rowwise": lambda p: deltashard.optim.RowWiseAdagrad(p, lr=0.1),
}
DENSE: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
}


@st.composite
def programs(draw: Any) -> Program:
    """Any of them."""
    sparse = draw(st.booleans())
    return Program(
        bag=draw(st.booleans()),
        sparse=sparse,
        tables=draw(st.sampled_from(sorted(SPARSE) if sparse else sorted(SPARSE | DENSE))),
        dense=draw(st.sampled_from(sorted(DENSE))),
        wrapper=draw(st.sampled_from(["none", "averaged", "scheduler"])),
        hook=draw(st.sampled_from(["none", "zero_grad", "clip"])),
        loader=draw(st.sampled_from(["plain", "sampler", "zip", "nested", "anew"])),
        noisy=draw(st.booleans()),
        moving=draw(st.booleans()),
        save_at=draw(st.integers(1, 12)),
        more=draw(st.integers(1, 9)),
    )


class Ended(Exception):
    """Enough steps."""


def train(program: Program, store: Path, *, resume: bool) -> dict[str, Any]:
    """Build it, train it to its end, saving once on the way unless it resumes; its final state."""
    torch.manual_seed(31 if resume else 3)
    np.random.seed(31 if resume else 3)  # noqa: NPY002 - programs draw from it
    net = Net(program)
    optimizers = [
        (SPARSE | DENSE)[program.tables]([net.items.weight]),
        DENSE[program.dense]([*net.norm.parameters(), *net.top.parameters()]),
    ]
    state: dict[str, Any] = {}
    averaged = scheduler = None
    if program.wrapper == "averaged":
        averaged = state["average"] = optim.swa_utils.AveragedModel(net.top)
    elif program.wrapper == "scheduler":
        scheduler = state["scheduler"] = optim.lr_scheduler.StepLR(optimizers[1], 3, 0.7)
    if program.hook == "zero_grad":
        optimizers[0].register_step_post_hook(lambda opt, *_: opt.zero_grad())
    elif program.hook == "clip":
        optimizers[1].register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_([*net.norm.parameters(), *net.top.parameters()], 0.5) and None
        )
    ckpt = deltashard.Checkpointer(
        net,
        optimizers,
        state=state,
        url=store,
        run="run",
        encoding="fp32",
        arena_bytes=64 << 20,
        grace_s=None,
    )
    losses: list[float] = []
    end = program.save_at + program.more

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if averaged is not None:
            averaged.update_parameters(net.top)
        losses.append(float(loss.detach()))
        ckpt.step()
        if ckpt.steps == program.save_at and not resume:
            ckpt.save("test").wait(120)
        if ckpt.steps >= end:
            raise Ended

    try:
        restored = ckpt.restore()
        assert (restored is not None) is resume
        loop(program, ckpt, step)
    except Ended:
        pass
    finally:
        ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # killed: nothing more is saved
    return {
        "losses": losses[-program.more :],
        "net": [t.tolist() for t in net.state_dict().values()],
        "average": None if averaged is None else [t.tolist() for t in averaged.state_dict().values()],
        "rng": torch.get_rng_state().tolist(),
    }


def loop(program: Program, ckpt: deltashard.Checkpointer, step: Callable[..., None]) -> None:
    """Until `step` has enough."""

    def made(batch: int = 8) -> DataLoader[Any]:
        data = Baskets(noisy=program.noisy, moving=program.moving and program.loader != "anew")
        if program.loader == "sampler":
            return DataLoader(data, batch_size=batch, sampler=Own())
        return DataLoader(data, batch_size=batch, shuffle=True)

    first = ckpt.wrap(made(), name="first")
    second = ckpt.wrap(made(16), name="second") if program.loader in ("zip", "nested") else None
    while True:
        if program.loader == "zip":
            assert second is not None
            for (x, y), (other, _) in zip(first, second, strict=False):
                step(x, y + float(other.sum() % 5))
        elif program.loader == "nested":
            assert second is not None
            for _, y in second:
                for x, label in first:
                    step(x, label + y.mean())
        else:
            for x, y in first:
                step(x, y)
            if program.loader == "anew":
                first = ckpt.wrap(made(), name="first")


class Said(logging.Handler):
    """Warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@settings(max_examples=int(os.environ.get("DELTASHARD_PROGRAMS", "4")))
@given(program=programs())
def test_any_program_resumes_bit_exactly_or_it_is_said(
    tmp_path_factory: pytest.TempPathFactory, program: Program
) -> None:
    """Whatever is put together."""
    store = tmp_path_factory.mktemp("program") / "store"
    said = Said()
    logger = logging.getLogger("deltashard")
    logger.addHandler(said)
    wanted = seen = None
    try:
        wanted = train(program, store, resume=False)
        seen = train(program, store, resume=True)
    except UserError as error:
        said.texts.append(error.remedy)
    finally:
        logger.removeHandler(said)
    assert said.texts or seen == wanted
