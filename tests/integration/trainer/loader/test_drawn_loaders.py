# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""Loader programs that nobody wrote: drawn, run whole, killed at any step and resumed. Two outcomes: exact, or told."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deltashard import ResumableSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.integration.trainer.loader.loader_world import World, resumed

SAMPLES = 22


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What hypothesis chooses."""

    kind: str
    workers: int
    persistent: bool
    generator: str
    augmentation: str
    batch_size: int
    loop: str
    peek: bool
    ahead: int
    declared: bool
    kill: int
    skip: Any


class Items(Dataset[Any]):
    """0..n-1 with random noise, or none."""

    def __init__(self, augmentation: str) -> None:
        self.augmentation = augmentation
        self.own = np.random.default_rng(5)
        self.reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> float:
        self.reads += 1
        noise = {
            "none": lambda: 0.0,
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "own": self.own.random,
            "rare": lambda: float(torch.rand(())) if i in (3, 11) else 0.0,
            "count": lambda: float(self.reads),
            "time": lambda: float(int.from_bytes(os.urandom(2), "big")),
        }[self.augmentation]()
        return i + 100.0 * noise


class Stream(IterableDataset[Any]):
    """The same in the dataset's order."""

    def __init__(self, augmentation: str) -> None:
        self.items = Items(augmentation)

    def __iter__(self) -> Iterator[float]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.items[i] for i in range(start, SAMPLES, step))


def made(drawn: Drawn) -> Any:
    """Its loader."""
    options: dict[str, Any] = {"batch_size": drawn.batch_size, "num_workers": drawn.workers}
    options["persistent_workers"] = drawn.persistent and drawn.workers > 0
    if drawn.generator == "loader":
        options["generator"] = torch.Generator().manual_seed(8)
    match drawn.kind:
        case "shuffled":
            return DataLoader(Items(drawn.augmentation), shuffle=True, **options)
        case "sequential":
            return DataLoader(Items(drawn.augmentation), **options)
        case "resumable":
            sampler = ResumableSampler(SAMPLES, seed=2)
            return DataLoader(Items(drawn.augmentation), sampler=sampler, **options)
        case "stream":
            return DataLoader(Stream(drawn.augmentation), **options)
    items = Items(drawn.augmentation)
    return [[items[i], items[i + 1]] for i in range(0, SAMPLES - 1, 2)]


@st.composite
def programs(draw: Any) -> Drawn:
    """Any of them; few with workers, which take long to start."""
    return Drawn(
        kind=draw(st.sampled_from(["shuffled", "sequential", "resumable", "stream", "list"])),
        workers=draw(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 0, 1])),
        persistent=draw(st.booleans()),
        generator=draw(st.sampled_from(["global", "loader"])),
        augmentation=draw(st.sampled_from(["none", "torch", "numpy", "own", "rare", "count", "time"])),
        batch_size=draw(st.integers(2, 5)),
        loop=draw(
            st.sampled_from(
                ["for", "zip", "nested", "break", "delivered", "cycle", "next", "accumulate", "evaluate"]
            )
        ),
        peek=draw(st.booleans()),
        ahead=draw(st.sampled_from([0, 0, 1, 2])),
        declared=draw(st.booleans()),
        kill=draw(st.integers(1, 17)),
        skip=draw(st.sampled_from(["auto", "auto", "sampler", "replay"])),
    )


def program(drawn: Drawn) -> Any:
    """It as a loop of its own."""
    pipelined = bool(drawn.ahead) and drawn.declared and drawn.loop == "for"

    def run(world: World) -> None:
        loader = world.wrap(made(drawn), skip=drawn.skip, pipelined=pipelined)
        other = world.wrap(made(drawn), "other") if drawn.loop in ("zip", "nested") else None
        if drawn.peek:
            iter(loader)
        for _ in itertools.count():
            one_epoch(world, loader, other)

    def one_epoch(world: World, loader: Any, other: Any) -> None:
        match drawn.loop:
            case "zip":
                for pair in zip(loader, other, strict=False):
                    world.step(*pair)
            case "nested":
                for batch in loader:
                    for each in other:
                        world.step(batch, each)
            case "break":
                for number, batch in enumerate(loader):
                    world.step(batch)
                    if number == 2:
                        break
            case "delivered":
                for batch in loader:
                    world.step(batch)
                    if loader.delivered == 3:
                        break
            case "cycle":
                for batch in itertools.cycle(loader):
                    world.step(batch)
            case "next":
                world.step(next(iter(loader)))
            case "accumulate":
                batches: list[Any] = []
                for batch in loader:
                    batches.append(batch)
                    if len(batches) == 2:
                        world.step(*batches)
                        batches = []
            case "evaluate":
                for batch in loader:
                    world.step(batch)
                list(loader)
            case _:
                for batch in ahead(loader, drawn.ahead):
                    world.step(batch)

    return run


def ahead(batches: Any, count: int) -> Iterator[Any]:
    queue: list[Any] = []
    for batch in batches:
        queue.append(batch)
        if len(queue) > count:
            yield queue.pop(0)
    yield from queue


@settings(max_examples=int(os.environ.get("DELTASHARD_PROGRAMS", "30")))
@given(drawn=programs())
def test_any_loader_program_resumes_exactly_or_it_is_told(drawn: Drawn) -> None:
    """Whatever is put together. What depends on the time is never compared: it differs without a restart, too."""
    outcome = resumed(program(drawn), drawn.kill, drawn.kill + 40)
    assert outcome.exact or outcome.warnings or drawn.augmentation == "time"
