# ruff: noqa: NPY002 - the global generators are what is tested
"""Loops over wrapped loaders as people write them: each trains in a `World` until that says it is over."""

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

from tests.integration.trainer.loader.loader_world import Program, World


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


def one_generator(world: World) -> None:
    generator = torch.Generator().manual_seed(3)
    a = world.wrap(shuffled(generator=generator), "a")
    b = world.wrap(shuffled(17, generator=generator), "b")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


# Around the loop


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


def pipelined_over(make: Callable[[], Any]) -> Program:
    def program(world: World) -> None:
        loader = world.wrap(make(), pipelined=True)
        while True:
            for batch in _ahead(loader, 2):
                world.step(batch)

    return program


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


class Noise(Numbers):
    """Draws from a generator of its own for each sample."""

    def __init__(self, n: int = 23) -> None:
        super().__init__(n)
        self.generator = np.random.default_rng(1)
        self.legacy = np.random.RandomState(3)

    def __getitem__(self, i: int) -> float:
        return i + self.generator.random() + float(self.legacy.rand())


class Counting(Numbers):
    """Its content depends on how often it was read, which no generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, i: int) -> float:
        self.reads += 1
        return i + 1000.0 * self.reads


class Negatives(Numbers):
    """Drawn at the head of each epoch, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)
        self.negatives = np.zeros(50)

    def __getitem__(self, i: int) -> float:
        return i + float(self.negatives[i])


def negatives(world: World) -> None:
    data = Negatives()
    loader = world.wrap(DataLoader(data, batch_size=4, shuffle=True))
    while True:
        data.negatives = data.generator.random(50)
        for batch in loader:
            world.step(batch)


class Module:
    """A generator that a dataset draws from, and that is no attribute of it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def collate(self) -> Callable[[list[Any]], list[Any]]:
        return lambda samples: [sample + self.generator.random() for sample in samples]


def in_closure(world: World) -> None:
    collate = Module().collate()
    loop(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=collate))(world)


def in_state(world: World) -> None:
    module = Module()
    world.restore({"generator": module.generator})
    loop(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=module.collate()))(world)


class Stream(IterableDataset[Any]):
    """Its offset is a state of its own, given in state=."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at


def stream_in_state(world: World) -> None:
    stream = Stream()
    world.restore({"stream": stream})
    loop(lambda: DataLoader(stream, batch_size=4))(world)


class Queue:
    """A stream that cannot go back, as a consumer group of a broker."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at


class PositionInAttribute:
    """What its iterator counts is an attribute, set back by iter(): TorchRec's random dataset."""

    def __init__(self, *, ends: bool = True) -> None:
        self.batches = [
            torch.randint(500, (8,), generator=torch.Generator().manual_seed(k)) for k in range(10)
        ]
        self.at, self.ends = 0, ends

    def __iter__(self) -> PositionInAttribute:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        if self.ends and self.at > len(self.batches):
            raise StopIteration
        return self.batches[(self.at - 1) % len(self.batches)]


class Holder:
    """A dataset around such an iterator."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


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
    data = Noise()
    a = world.wrap(DataLoader(data, batch_size=4, shuffle=True), "a")
    b = world.wrap(DataLoader(data, batch_size=4, shuffle=True), "b")
    while True:
        for pair in zip(a, b, strict=False):
            world.step(*pair)


# Habits of frameworks and scripts


def spare_iterators(world: World) -> None:
    """As a probe whether it can be iterated."""
    loader = world.wrap(shuffled(noisy=True))
    iter(loader)
    kept = iter(loader)
    while True:
        for batch in loader:
            world.step(batch)
        del kept
        kept = iter(loader)


def peeked(world: World) -> None:
    """A batch to initialise lazy modules with."""
    loader = world.wrap(shuffled())
    next(iter(loader))
    while True:
        for batch in loader:
            world.step(batch)


def cycled_by_itertools(world: World) -> None:
    for batch in itertools.cycle(world.wrap(shuffled())):
        world.step(batch)


def listed(world: World) -> None:
    batches = list(world.wrap(shuffled()))
    while True:
        world.step(batches[world.steps.now % len(batches)] if batches else 0)


def islice_of(world: World) -> None:
    loader = world.wrap(shuffled(60))
    while True:
        for batch in itertools.islice(loader, 7):
            world.step(batch)


def by_delivered(world: World) -> None:
    loader = world.wrap(shuffled(60))
    while True:
        for batch in loader:
            world.step(batch)
            if loader.delivered == 4:
                break


def pipeline_over_epochs(world: World) -> None:
    """A prefetcher that is in the next epoch before the last batch of this one is used."""
    loader = world.wrap(shuffled(20), pipelined=True)
    for batch in _ahead((batch for _ in itertools.count() for batch in loader), 2):
        world.step(batch)


def prefetched_by_thread(world: World) -> None:
    """Another thread asks for batches, two ahead."""
    loader = world.wrap(list(range(200)), pipelined=True)
    batches: queue.Queue[Any] = queue.Queue(maxsize=2)
    over = threading.Event()

    def fetch() -> None:
        for batch in loader:
            while not over.is_set():
                with contextlib.suppress(queue.Full):
                    batches.put(batch, timeout=0.05)
                    break
            if over.is_set():
                return

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while True:
            world.step(batches.get(timeout=60))
    finally:
        over.set()
        thread.join()


class Raises(DataLoader):  # type: ignore[type-arg]
    """Has the protocol and does not keep it: accelerate's loader around a plain one."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("no base dataloader")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AttributeError("no base dataloader")


class OneAhead(DataLoader):  # type: ignore[type-arg]
    """An __iter__ of its own that fetches one batch ahead: accelerate's, too."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        now = next(batches)
        for then in batches:
            yield now
            now = then
        yield now


EXACT: dict[str, Program] = {
    "plain": loop(lambda: shuffled(noisy=True)),
    "list": loop(lambda: [torch.tensor(i) for i in range(6)]),
    "zipped": zipped,
    "zipped uneven": zipped_uneven,
    "cycled": cycled,
    "nested": nested,
    "alternated": alternated,
    "one generator": one_generator,
    "training auc": training_auc,
    "validated": validated,
    "validated first": validated_first,
    "seeded head": seeded_head,
    "made again": made_anew,
    "accumulated": accumulated,
    "flushed": flushed,
    "one each": one_each,
    "by delivered": by_delivered,
    "spare iterators": spare_iterators,
    "pipelined": pipelined,
    "pipeline over epochs": pipeline_over_epochs,
    "prefetched by a thread": prefetched_by_thread,
    "position in an attribute": loop(lambda: Holder(PositionInAttribute())),
    "position in an attribute, pipelined": pipelined_over(lambda: Holder(PositionInAttribute(ends=False))),
    "own sampler": sampled(Own),
    "own noise": loop(lambda: DataLoader(Subset(Noise(), range(19)), batch_size=4, shuffle=True)),
    "sharing data": sharing_data,
    "generator in state=": in_state,
    "stream in state=": stream_in_state,
    "one ahead inside": loop(lambda: OneAhead(Numbers(), batch_size=4, shuffle=True)),
}
"""Resume bit-exactly at any step without a warning, but for the first steps of all."""

TOLD: dict[str, tuple[Program, str]] = {
    "peeked": (peeked, ""),
    "drawn head": (drawn_head, "were drawn between restore() and the first batch"),
    "limited": (limited, "Count with loader.delivered"),
    "islice": (islice_of, "Count with loader.delivered"),
    "several steps": (several_steps, "without a new batch"),
    "itertools.cycle": (cycled_by_itertools, "without a new batch"),
    "a list of batches": (listed, "without a new batch"),
    "pipelined, not declared": (pipelined_unsaid, "pipelined=True"),
    "walk sampler": (sampled(Walk), "order"),
    "lazy sampler": (sampled(Lazy), ""),
    "buffered": (loop(lambda: DataLoader(Buffered(), batch_size=2)), "a generator of its own"),
    "counting": (loop(lambda: DataLoader(Counting(), batch_size=4, shuffle=True)), "their content is not"),
    "closure": (in_closure, "their content is not"),
    "state_dict raises": (
        loop(lambda: Raises(Numbers(), batch_size=4, shuffle=True)),
        "batches are counted instead",
    ),
}
"""Resume bit-exactly, or with a warning that has these words."""

WORKERS: dict[str, Program] = {
    "own sampler, workers": sampled(Own, num_workers=1),
    "persistent workers": loop(lambda: shuffled(num_workers=1, persistent_workers=True)),
    "noise in workers": loop(lambda: shuffled(noisy=True, num_workers=2)),
}
"""Resume bit-exactly; starting worker processes is slow."""
