# ruff: noqa: NPY002 - the global generators are what is tested
"""Typical loops over wrapped loaders. Each trains in a `SimulatedTrainer` until it raises RunEnded."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.integration.trainer.loader.simulated_trainer import LoaderProgram, SimulatedTrainer

Make, Loop = Callable[[], Any], Callable[[Any, Any, SimulatedTrainer], Iterator[Any]]
"""A loop over a loader, an optional second one, and the trainer yields batches. A step follows each."""


class Numbers(Dataset[Any]):
    """The numbers 0..n-1, each with optional noise from the global generators."""

    def __init__(self, n: int = 23, *, noisy: bool = False) -> None:
        self.n = n
        self.noisy = noisy

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return i + (float(torch.rand(())) + random.random() + float(np.random.rand()) if self.noisy else 0.0)


def shuffled(n: int = 23, batch: int = 4, *, noisy: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(n, noisy=noisy), batch_size=batch, shuffle=True, **options)


def noisy(*sizes: int) -> Make:
    return lambda: shuffled(*sizes, noisy=True)


def make_loader(data: Callable[[], Any] = Numbers, **options: Any) -> Make:
    return lambda: DataLoader(data(), batch_size=4, **options)


def loop(make: Make, how: str = "for", other: Make | None = None, **options: Any) -> LoaderProgram:
    """Return the program of a loop. `how` is a name in `LOOPS`."""

    def program(world: SimulatedTrainer) -> None:
        loader = world.wrap(make(), **options)
        second = None if other is None else world.wrap(other(), "other")
        for seen in LOOPS[how](loader, second, world):
            world.step(seen)

    return program


def _plain(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from loader


def _zipped(loader: Any, other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from zip(loader, other, strict=False)


def _restarting(loader: Any) -> Iterator[Any]:
    while True:
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            yield batch


def _cycled(loader: Any, other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    second = _restarting(other)
    while True:
        for batch in loader:
            yield batch, next(second)


def _nested(loader: Any, other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from ((batch, each) for batch in loader for each in other)


def _alternated(loader: Any, other: Any, world: SimulatedTrainer) -> Iterator[Any]:
    passes = _restarting(loader), _restarting(other)
    while True:
        yield next(passes[world.steps.now % 2])


def _validated(loader: Any, other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    """Read the training data again after each epoch, or other data, completely and partially."""
    held = other or loader
    for epoch in range(loader.epoch, 100):
        for batch in loader:
            yield epoch, loader.epoch, batch
        assert list(held)
        for _ in other or ():
            break


def _validated_first(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    """The loaders of the validation are not wrapped."""
    inorder, mixed = DataLoader(Numbers(9), batch_size=4), shuffled(9)
    while True:
        assert list(inorder)
        assert list(mixed)
        yield from loader


def _drawn_head(loader: Any, _other: Any, _world: SimulatedTrainer, *, seeded: bool = False) -> Iterator[Any]:
    for epoch in range(loader.epoch, 100):
        if seeded:
            np.random.seed(7 + epoch)
        negatives = np.random.permutation(50)[:5]
        yield from ((batch, negatives) for batch in loader)


def _limited(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        for number, batch in enumerate(loader):
            yield batch
            if number == 2:
                break


def _by_delivered(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        for batch in loader:
            yield batch
            if loader.delivered == 4:
                break


def _islice(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from itertools.islice(loader, 7)


def _several_steps(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from (batch for batch in loader for _ in range(2))


def _ahead(batches: Iterable[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) > 2:
            yield held.pop(0)
    yield from held


def _pipelined(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from _ahead(loader)


def _over_epochs(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    """The prefetcher starts the next epoch before the last batch of this epoch is used."""
    return _ahead(batch for _ in itertools.count() for batch in loader)


def _by_thread(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    """Another thread requests batches, two ahead."""
    batches: queue.Queue[Any] = queue.Queue(maxsize=2)
    ended = threading.Event()

    def fetch() -> None:
        for batch in loader:
            while not ended.is_set():
                with contextlib.suppress(queue.Full):
                    batches.put(batch, timeout=0.05)
                    break
            if ended.is_set():
                return

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while True:
            yield batches.get(timeout=60)
    finally:
        ended.set()
        thread.join()


def _spare_iterators(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    """Create iterators without reading them, as a check for iterability does."""
    iter(loader)
    kept = iter(loader)
    while True:
        yield from loader
        del kept
        kept = iter(loader)


def _peeked(loader: Any, other: Any, world: SimulatedTrainer) -> Iterator[Any]:
    next(iter(loader))
    return _plain(loader, other, world)


def _kept_and_given_again(loader: Any, _other: Any, _world: SimulatedTrainer) -> Iterator[Any]:
    while True:
        yield from itertools.cycle(loader)


def _listed(loader: Any, _other: Any, world: SimulatedTrainer) -> Iterator[Any]:
    batches = list(loader)
    while True:
        yield batches[world.steps.now % len(batches)] if batches else 0


LOOPS: dict[str, Loop] = {
    "for": _plain,
    "zipped": _zipped,
    "cycled": _cycled,
    "nested": _nested,
    "alternated": _alternated,
    "validated": _validated,
    "validated first": _validated_first,
    "seeded head": lambda *loaders: _drawn_head(*loaders, seeded=True),
    "drawn head": _drawn_head,
    "limited": _limited,
    "by delivered": _by_delivered,
    "islice": _islice,
    "several steps": _several_steps,
    "pipelined": _pipelined,
    "pipeline over epochs": _over_epochs,
    "prefetched by a thread": _by_thread,
    "spare iterators": _spare_iterators,
    "peeked": _peeked,
    "itertools.cycle": _kept_and_given_again,
    "a list of batches": _listed,
}


class OwnGeneratorSampler(Sampler[int]):
    """A sampler with its own generator."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.generator = np.random.default_rng(3)
        self.passes = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from (int(i) + 0 * self.passes for i in self.generator.permutation(self.n))


class Walk(OwnGeneratorSampler):
    """A sampler that draws from a global generator while it is iterated, so that its order cannot be replayed."""

    def __iter__(self) -> Iterator[int]:
        pool = list(range(self.n))
        while pool:
            yield pool.pop(random.randrange(len(pool)))


class Noise(Numbers):
    """A dataset that draws from its own generators for each sample."""

    def __init__(self, n: int = 23) -> None:
        super().__init__(n)
        self.generator = np.random.default_rng(1)
        self.legacy = np.random.RandomState(3)

    def __getitem__(self, i: int) -> float:
        return i + self.generator.random() + float(self.legacy.rand())


class ReadCounter(Numbers):
    """A dataset whose content depends on the number of reads, which no generator state contains."""

    reads = 0

    def __getitem__(self, i: int) -> float:
        self.reads += 1000
        return float(i + self.reads)


class ModuleGenerator:
    """A collate function that draws from a generator that is no attribute of the dataset."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def loader(self) -> Any:
        collate = lambda samples: [sample + self.generator.random() for sample in samples]  # noqa: E731
        return make_loader(shuffle=True, collate_fn=collate)()


def in_state(world: SimulatedTrainer) -> None:
    module = ModuleGenerator()
    world.restore({"generator": module.generator})
    loop(module.loader)(world)


class Buffered(IterableDataset[Any]):
    """A shuffle buffer that draws from a generator that training also uses."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for i in range(23):
            buffer.append(i)
            if len(buffer) > 6:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


EXACT: dict[str, LoaderProgram] = {
    "plain": loop(noisy()),
    "list": loop(lambda: [torch.tensor(i) for i in range(6)]),
    "zipped": loop(noisy(), "zipped", noisy(17, 3)),
    "cycled": loop(shuffled, "cycled", noisy(11, 3)),
    "nested": loop(noisy(12, 3), "nested", noisy(7, 3)),
    "alternated": loop(shuffled, "alternated", noisy(11, 3)),
    "training auc": loop(noisy(), "validated"),
    "validated": loop(noisy(), "validated", lambda: shuffled(9)),
    "validated first": loop(noisy(), "validated first"),
    "seeded head": loop(shuffled, "seeded head"),
    "by delivered": loop(lambda: shuffled(60), "by delivered"),
    "spare iterators": loop(noisy(), "spare iterators"),
    "pipelined": loop(lambda: shuffled(60), "pipelined", pipelined=True),
    "pipeline over epochs": loop(lambda: shuffled(20), "pipeline over epochs", pipelined=True),
    "prefetched by a thread": loop(lambda: list(range(200)), "prefetched by a thread", pipelined=True),
    "own sampler": loop(lambda: DataLoader(Numbers(noisy=True), batch_size=4, sampler=OwnGeneratorSampler())),
    "own noise": loop(make_loader(lambda: Subset(Noise(), range(19)), shuffle=True)),
    "generator in state=": in_state,
}
"""These programs resume bit-exactly at any step without a warning, except for the very first steps."""

INEXACT: dict[str, tuple[LoaderProgram, str]] = {
    "peeked": (loop(shuffled, "peeked"), ""),
    "drawn head": (loop(shuffled, "drawn head"), "were drawn between restore() and the first batch"),
    "limited": (loop(shuffled, "limited"), "Count with loader.delivered"),
    "islice": (loop(lambda: shuffled(60), "islice"), "Count with loader.delivered"),
    "several steps": (loop(shuffled, "several steps"), "without a new batch"),
    "itertools.cycle": (loop(shuffled, "itertools.cycle"), "without a new batch"),
    "a list of batches": (loop(shuffled, "a list of batches"), "without a new batch"),
    "pipelined, not declared": (loop(lambda: shuffled(60), "pipelined"), "pipelined=True"),
    "walk sampler": (loop(lambda: DataLoader(Numbers(noisy=True), batch_size=4, sampler=Walk())), "order"),
    "buffered": (loop(lambda: DataLoader(Buffered(), batch_size=2)), "shares a generator with training"),
    "counting": (loop(make_loader(ReadCounter, shuffle=True)), "the same samples with different content"),
    "closure": (loop(lambda: ModuleGenerator().loader()), "the same samples with different content"),
}
"""These programs resume bit-exactly, or with a warning that contains this text."""

WORKERS: dict[str, LoaderProgram] = {
    "own sampler, workers": loop(
        lambda: DataLoader(Numbers(), batch_size=4, sampler=OwnGeneratorSampler(), num_workers=1)
    ),
    "persistent workers": loop(lambda: shuffled(num_workers=1, persistent_workers=True)),
    "noise in workers": loop(lambda: shuffled(noisy=True, num_workers=2)),
}
"""These programs resume bit-exactly. Their worker processes start slowly."""
