# ruff: noqa: NPY002 - the global generators are what is tested
"""Loops over wrapped loaders as people write them: each trains in a `World` until that says it is over."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.integration.trainer.loader.loader_world import World

Program = Callable[[World], None]


class Numbers(Dataset[Any]):
    """0..n-1, each with noise from the global generators if asked."""

    def __init__(self, n: int = 23, *, noisy: bool = False) -> None:
        self.n = n
        self.noisy = noisy

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return i + (float(torch.rand(())) + random.random() + float(np.random.rand()) if self.noisy else 0.0)


def shuffled(n: int = 23, batch: int = 4, *, noisy: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(n, noisy=noisy), batch_size=batch, shuffle=True, **options)


def loop(make: Callable[[], Any], **options: Any) -> Program:
    """The plain loop."""

    def program(world: World) -> None:
        loader = world.wrap(make(), **options)
        while True:
            for batch in loader:
                world.step(batch)

    return program


# Several loaders


def zipped(world: World) -> None:
    a, b = world.wrap(shuffled(noisy=True), "a"), world.wrap(shuffled(17, 3, noisy=True), "b")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


def zipped_uneven(world: World) -> None:
    b, a = world.wrap(shuffled(17, 5), "b"), world.wrap(shuffled(), "a")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


def cycled(world: World) -> None:
    a, b = world.wrap(shuffled(), "a"), world.wrap(shuffled(11, 3, noisy=True), "b")
    second = iter(b)
    while True:
        for batch in a:
            try:
                other = next(second)
            except StopIteration:
                second = iter(b)
                other = next(second)
            world.step(batch, other)


def nested(world: World) -> None:
    outer, inner = (
        world.wrap(shuffled(12, 3, noisy=True), "outer"),
        world.wrap(shuffled(7, 3, noisy=True), "inner"),
    )
    while True:
        for batch in outer:
            for each in inner:
                world.step(batch, each)


def alternated(world: World) -> None:
    loaders = {"a": world.wrap(shuffled(), "a"), "b": world.wrap(shuffled(11, 3, noisy=True), "b")}
    passes: dict[str, Iterator[Any]] = {}
    while True:
        name = "ab"[world.steps.now % 2]
        if name not in passes:
            passes[name] = iter(loaders[name])
        try:
            batch = next(passes[name])
        except StopIteration:
            passes[name] = iter(loaders[name])
            batch = next(passes[name])
        world.step(name, batch)


def two_to_one(world: World) -> None:
    loaders = {"a": world.wrap(shuffled(), "a"), "b": world.wrap(shuffled(11, 3, noisy=True), "b")}
    passes: dict[str, Iterator[Any]] = {}
    while True:
        name = "a" if world.steps.now % 3 else "b"
        batch = next(passes[name], None) if name in passes else None
        if batch is None:
            passes[name] = iter(loaders[name])
            batch = next(passes[name], None)
        if batch is None:  # resumed at its end
            passes[name] = iter(loaders[name])
            batch = next(passes[name])
        world.step(name, batch)


def turns_forgotten(world: World) -> None:
    a, b = world.wrap(shuffled(), "a"), world.wrap(shuffled(), "b")
    first = iter(a)
    for _ in range(2 if world.steps.now == 0 else 100):
        batch = next(first, None)
        if batch is None:
            break
        world.step("a", batch)
    second = iter(b)
    while True:
        for name, passes in (("b", second), ("a", first)):
            batch = next(passes, None)
            if batch is None:
                second, first = iter(b), iter(a)
                break
            world.step(name, batch)


def alternated_blindly(world: World) -> None:
    a, b = world.wrap(shuffled(), "a"), world.wrap(shuffled(), "b")
    while True:
        second = iter(b)
        for batch in a:
            world.step(batch)
            world.step(next(second, None))


def phases(world: World) -> None:
    a, b = world.wrap(shuffled(), "a"), world.wrap(shuffled(), "b")
    while True:
        for batch in a:
            world.step("a", batch)
        for batch in b:
            world.step("b", batch)


def one_generator(world: World) -> None:
    generator = torch.Generator().manual_seed(3)
    a = world.wrap(shuffled(generator=generator), "a")
    b = world.wrap(shuffled(17, generator=generator), "b")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


# Around the loop


def drawn_between(world: World) -> None:
    loader = world.wrap(shuffled())
    while True:
        batches = iter(loader)
        noise = torch.rand(2), random.random()
        for batch in batches:
            world.step(batch, noise[0])


def training_auc(world: World) -> None:
    loader = world.wrap(shuffled(noisy=True))
    for epoch in range(loader.epoch, 100):
        for batch in loader:
            world.step(epoch, loader.epoch, batch)
        assert list(loader)


def validated(world: World) -> None:
    loader, validation = world.wrap(shuffled(noisy=True)), world.wrap(shuffled(9), "validation")
    for epoch in range(loader.epoch, 100):
        for batch in loader:
            world.step(epoch, batch)
        assert list(validation)
        for _ in validation:
            break


def validated_first(world: World) -> None:
    loader = world.wrap(shuffled(noisy=True))
    inorder, mixed = DataLoader(Numbers(9), batch_size=4), shuffled(9)
    while True:
        assert list(inorder)
        assert list(mixed)
        for batch in loader:
            world.step(batch)


def seeded_head(world: World) -> None:
    loader = world.wrap(shuffled())
    for epoch in range(loader.epoch, 100):
        np.random.seed(7 + epoch)
        negatives = np.random.permutation(50)[:5]
        for batch in loader:
            world.step(batch, negatives)


def drawn_by_torch(world: World) -> None:
    loader = world.wrap(shuffled())
    while True:
        negatives = torch.randperm(50)[:5]
        for batch in loader:
            world.step(batch, negatives)


def drawn_head(world: World) -> None:
    loader = world.wrap(shuffled())
    while True:
        negatives = np.random.permutation(50)[:5]
        for batch in loader:
            world.step(batch, negatives)


def made_anew(world: World) -> None:
    while True:
        loader = world.wrap(shuffled(noisy=True), "train")
        for batch in loader:
            world.step(loader.epoch, batch)


def accumulated(world: World) -> None:
    loader = world.wrap(shuffled(40, 2))
    while True:
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                world.step(*batches)
                batches = []


def flushed(world: World) -> None:
    loader = world.wrap(shuffled(40, 2))
    while True:
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                world.step(*batches)
                batches = []
        world.step(*batches)


def one_each(world: World) -> None:
    loader = world.wrap(shuffled(noisy=True))
    while True:
        world.step(next(iter(loader)))


def limited(world: World) -> None:
    loader = world.wrap(shuffled())
    while True:
        for number, batch in enumerate(loader):
            world.step(batch)
            if number == 2:
                break


def several_steps(world: World) -> None:
    loader = world.wrap(shuffled())
    while True:
        for batch in loader:
            world.step(batch)
            world.step(batch)


def _ahead(batches: Iterable[Any], count: int) -> Iterator[Any]:
    queue: list[Any] = []
    for batch in batches:
        queue.append(batch)
        if len(queue) > count:
            yield queue.pop(0)
    yield from queue


def pipelined(world: World, *, said: bool = True) -> None:
    loader = world.wrap(shuffled(60), pipelined=said)
    while True:
        for batch in _ahead(loader, 2):
            world.step(batch)


def pipelined_unsaid(world: World) -> None:
    pipelined(world, said=False)


# Below the loader


class Own(Sampler[int]):
    """Its own generator."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.generator = np.random.default_rng(3)
        self.passes = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from (int(i) + 0 * self.passes for i in self.generator.permutation(self.n))


class Lazy(Own):
    """Draws as it is asked."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield int(self.generator.integers(self.n))


class Walk(Own):
    """Draws from a global generator as it is asked, and remembers: nobody can replay that."""

    def __iter__(self) -> Iterator[int]:
        pool = list(range(self.n))
        while pool:
            yield pool.pop(random.randrange(len(pool)))


class Moving(Numbers):
    """Generators, counters and containers that every sample moves, and a file that is opened at the first one."""

    def __init__(self, n: int = 23) -> None:
        super().__init__(n)
        self.generators = [np.random.default_rng(1), random.Random(3), torch.Generator().manual_seed(3)]
        self.legacy = np.random.RandomState(3)
        self.count = 0
        self.fd: int | None = None
        self.file: Any = None
        self.history: list[int] = []
        self.weights = np.zeros(5)

    def __getitem__(self, i: int) -> float:
        if self.file is None:
            self.file = open(os.devnull)  # noqa: SIM115, PTH123 - kept open, as datasets do
            self.fd = self.file.fileno()
        self.file.read()
        self.count += 1
        self.history.append(i)
        self.weights[i % 5] += 1
        drawn = self.generators[0].random() + self.generators[1].random()
        drawn += float(torch.rand((), generator=self.generators[2])) + float(self.legacy.rand())
        return i + 1000 * self.count + drawn + len(self.history) + float(self.weights[i % 5])

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class MadeLater(Numbers):
    """What it draws from is made with the first sample."""

    def __getitem__(self, i: int) -> float:
        if not hasattr(self, "generator"):
            self.generator = np.random.default_rng(0)
            self.drawn = 1000
        self.drawn += 1
        return i + self.generator.random() + self.drawn


class Negatives(Numbers):
    """Drawn anew at the head of each epoch, by a generator of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)
        self.negatives = np.zeros(size)

    def draw(self) -> None:
        self.negatives = self.generator.random(len(self.negatives))

    def __getitem__(self, i: int) -> float:
        return i + float(self.negatives[i])


def negatives(size: int) -> Program:
    def program(world: World) -> None:
        data = Negatives(size)
        loader = world.wrap(DataLoader(data, batch_size=4, shuffle=True))
        while True:
            data.draw()
            for batch in loader:
                world.step(batch)

    return program


def closure() -> Callable[[list[Any]], list[Any]]:
    count, generator = 0, random.Random(2)

    def collate(samples: list[Any]) -> list[Any]:
        nonlocal count
        count += 1
        return [sample + count + generator.random() for sample in samples]

    return collate


_GENERATOR = np.random.default_rng(5)
_COUNT = 0


def _collate(samples: list[Any]) -> list[Any]:
    global _COUNT  # noqa: PLW0603 - as scripts do
    _COUNT += 1
    return [sample + _COUNT + _GENERATOR.random() for sample in samples]


def of_the_module(world: World) -> None:
    global _GENERATOR, _COUNT
    _GENERATOR, _COUNT = np.random.default_rng(5), 0
    loop(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=_collate))(world)


class Buffered(IterableDataset[Any]):
    """A shuffle buffer that draws from a generator that training draws from, too."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for i in range(23):
            buffer.append(i)
            if len(buffer) > 6:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


def sampled(kind: type[Own], **options: Any) -> Program:
    noisy = not options.get("num_workers")
    return loop(lambda: DataLoader(Numbers(noisy=noisy), batch_size=4, sampler=kind(), **options))


def sharing_data(world: World) -> None:
    data = Moving()
    a = world.wrap(DataLoader(data, batch_size=4, shuffle=True), "a")
    b = world.wrap(DataLoader(data, batch_size=4, shuffle=True), "b")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


EXACT: dict[str, Program] = {
    "zipped": zipped,
    "zipped uneven": zipped_uneven,
    "cycled": cycled,
    "nested": nested,
    "alternated": alternated,
    "one generator": one_generator,
    "drawn between": drawn_between,
    "training auc": training_auc,
    "validated": validated,
    "validated first": validated_first,
    "seeded head": seeded_head,
    "made anew": made_anew,
    "accumulated": accumulated,
    "flushed": flushed,
    "one each": one_each,
    "pipelined": pipelined,
    "own sampler": sampled(Own),
    "lazy sampler": sampled(Lazy),
    "moving": loop(lambda: DataLoader(Subset(Moving(), range(19)), batch_size=4, shuffle=True)),
    "made later": loop(lambda: DataLoader(MadeLater(), batch_size=4, shuffle=True)),
    "negatives": negatives(50),
    "closure": loop(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=closure())),
    "of the module": of_the_module,
    "sharing data": sharing_data,
}
"""Resume bit-exactly at any step, and nothing is said, beyond the first steps."""

SAID: dict[str, tuple[Program, str]] = {
    "alternated blindly": (alternated_blindly, "take turns"),
    "phases": (phases, "was inside a pass over 'b'"),
    "drawn head": (drawn_head, "Seed by epoch"),
    "drawn by torch": (drawn_by_torch, "Seed by epoch"),
    "limited": (limited, "Count with loader.delivered"),
    "several steps": (several_steps, "gave one batch for 2 steps"),
    "pipelined unsaid": (pipelined_unsaid, "pipelined=True"),
    "walk sampler": (sampled(Walk), "a generator of its own"),
    "buffered": (loop(lambda: DataLoader(Buffered(), batch_size=2)), "a generator of its own"),
    "many negatives": (negatives(100_000), "cannot be put back: dataset.negatives"),
}
"""Resume bit-exactly, or say what is lost: (program, words)."""

WORKERS: dict[str, Program] = {
    "own sampler, workers": sampled(Own, num_workers=1),
    "lazy sampler, workers": sampled(Lazy, num_workers=1),
    "persistent workers": loop(lambda: shuffled(num_workers=1, persistent_workers=True)),
}
"""Resume bit-exactly; starting worker processes is slow."""
