"""Kinds of wrapped loaders, loaders that change over a restart, and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from deltashard.errors import CheckpointMismatch, StateError, UserError
from deltashard.loader.registry import LoaderRegistry
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.trainer.loader.loader_program import (
    Buffered,
    Numbers,
    OwnGeneratorSampler,
    loop,
    shuffled,
)
from tests.integration.trainer.loader.simulated_trainer import (
    CapturedWarnings,
    LoaderProgram,
    SimulatedTrainer,
    resumed,
    run,
)
from tests.support.trainer.step_count import StepCount

# torchdata uses a deprecated function of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Queue:
    """A stream that cannot rewind, like a consumer group of a broker."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at


class FromNumpy(OwnGeneratorSampler):
    """A sampler that draws its order from NumPy's global generator."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(self.n).tolist()  # noqa: NPY002 - as users do


class RandomStream(IterableDataset[Any]):
    """A stream that draws its order from the default generator."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(23).tolist()


class Shards(IterableDataset[Any]):
    """A stream in which each worker reads its share."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from range(info.id if info else 0, 23, info.num_workers if info else 1)


def factory(epoch: int, start: int) -> Iterator[torch.Tensor]:
    order = torch.randperm(23, generator=torch.Generator().manual_seed(epoch))
    return iter(order.split(4)[start:])


KINDS: dict[str, Callable[[], Any]] = {
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(9)),
    "no batching": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "iterable dataset": lambda: DataLoader(RandomStream(), batch_size=4),
    "factory": lambda: factory,
    "stateful": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, shuffle=True),
    "stateful generator": lambda: StatefulDataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "stateful subset": lambda: StatefulDataLoader(
        Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(23))
    ),
    "stateful own generator": lambda: StatefulDataLoader(
        Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    ),
}


@pytest.mark.parametrize("at", [1, 5, 6, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_resumes_exactly_or_warns(kind: str, at: int) -> None:
    """The interruption is in the middle, at the end or at the start of an epoch."""
    outcome = resumed(loop(KINDS[kind]), at, at + 9)
    assert outcome.exact or (outcome.warnings and kind == "stateful own generator")


def test_stateful_loader_without_order_warns() -> None:
    """Its sampler draws from NumPy, which its state_dict() does not contain."""
    outcome = resumed(loop(lambda: StatefulDataLoader(Numbers(), batch_size=4, sampler=FromNumpy())), 8, 16)
    assert outcome.exact or any(
        "state_dict() does not contain everything" in text for text in outcome.warnings
    )


# A changed loader after the restart


def reading(make: Callable[[], Any], seen: list[float], **options: Any) -> LoaderProgram:
    """Return a loop that records the samples of its first or resumed epoch."""

    def program(world: SimulatedTrainer) -> None:
        loader = world.wrap(make(), **options)
        for batch in loader:
            seen.extend(torch.as_tensor(batch).reshape(-1).tolist())
            world.step(batch)
        while True:
            for batch in loader:
                world.step(batch)

    return program


def stateful(workers: int) -> Callable[[], Any]:
    return lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "batch size": (shuffled, lambda: shuffled(batch=8), "batch_size was 4 and is 8"),
    "more data": (shuffled, lambda: shuffled(30), "samples was 23 and is 30"),
    "no shuffle": (
        shuffled,
        lambda: DataLoader(Numbers(), batch_size=4),
        "order was RandomSampler and is SequentialSampler",
    ),
    "workers of a stream": (
        lambda: DataLoader(Shards(), batch_size=4),
        lambda: DataLoader(Shards(), batch_size=4, num_workers=1),
        "workers was 0 and is 1",
    ),
    "batch size of a stream": (
        lambda: DataLoader(Shards(), batch_size=4),
        lambda: DataLoader(Shards(), batch_size=8),
        "batch_size was 4 and is 8",
    ),
    "workers of a stateful one": (stateful(0), stateful(1), "workers was 0 and is 1"),
    "a state before": (stateful(0), shuffled, "kind was its own state and is counted batches"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_loader_restarts_epoch(change: str) -> None:
    """This is the default. The warning has numbers and the remedy, and no sample is skipped."""
    before, after, message = CHANGES[change]
    seen: list[float] = []
    outcome = resumed(loop(before), 3, 20, after=reading(after, seen))
    assert set(seen) >= set(range(23))
    (text,) = [text for text in outcome.warnings if message in text]
    assert "after batch 3 " in text
    assert "The epoch restarts" in text


def test_changed_loader_is_refused_or_continued_on_request() -> None:
    before, after, message = CHANGES["batch size"]
    with pytest.raises(CheckpointMismatch, match=message):
        resumed(loop(before), 3, 20, after=loop(after), on_change="refuse")
    outcome = resumed(loop(before), 2, 20, after=loop(after), on_change="continue")
    assert any("The same number of batches is skipped" in text for text in outcome.warnings)


def test_change_between_epochs_does_not_warn() -> None:
    """The checkpoint is of an epoch's very last step."""
    outcome = resumed(loop(shuffled), 6, 20, after=loop(lambda: shuffled(30)))
    assert not outcome.warnings


def test_non_seekable_stream_loses_nothing() -> None:
    """Training uses the batch that the stream returns."""
    stream = Queue()
    outcome = resumed(loop(lambda: stream), 3, 8)
    assert [entry[0] for entry in outcome.seen] == [9, 10, 11, 12, 13]
    assert any("stream that cannot be rewound" in text for text in outcome.warnings)


def test_strict_raises_instead() -> None:
    with pytest.raises(CheckpointMismatch, match="differs from the batch trained on"):
        resumed(loop(lambda: DataLoader(Buffered(), batch_size=2), strict=True), 9, 20)


def test_position_of_other_version_is_refused() -> None:
    world = SimulatedTrainer(1, snapshot_at=3, end=3)
    run(loop(shuffled), world)
    tree = world.registry.capture()[1]["loader"] | {"version": 2}
    with pytest.raises(CheckpointMismatch, match="has format version 2, this library reads 1"):
        world.registry.resume({"loader": tree}, None, step=3)


# Reports


def test_concurrent_loops_warn() -> None:
    registry = LoaderRegistry(StepCount())
    loader = registry.wrap([1, 2, 3])
    with CapturedWarnings() as captured:
        one, other = iter(loader), iter(loader)
        next(one), next(other), next(one)
    assert "two loops iterate it at once" in captured.texts[0]


def test_unordered_worker_batches_warn() -> None:
    with CapturedWarnings() as captured:
        LoaderRegistry(StepCount()).wrap(DataLoader(Numbers(), num_workers=1, in_order=False))
    assert "in_order=False" in captured.texts[0]


@pytest.mark.parametrize("thing", [iter([1, 2]), 7])
def test_one_shot_iterable_is_refused(thing: Any) -> None:
    registry = LoaderRegistry(StepCount())
    with pytest.raises(StateError):
        registry.wrap(thing)
    with pytest.raises(UserError, match="skip='fast' is unknown"):
        registry.wrap([1], skip="fast")


# Step boundaries


def test_epochs_are_counted() -> None:
    """One step for all batches of a pass, after the loop, makes an epoch. A pass without a step does not."""
    steps = StepCount()
    registry = LoaderRegistry(steps)
    wrapped = registry.wrap(DataLoader(list(range(6)), batch_size=2))
    for epoch in range(3):
        for _ in wrapped:
            pass
        steps.now += 1
        assert wrapped.epoch == epoch + 1
    for _ in wrapped:
        pass
    for _ in wrapped:
        steps.now += 1
        assert wrapped.epoch == 3
    again = LoaderRegistry(steps)
    later = again.wrap(DataLoader(list(range(6)), batch_size=2))
    again.resume(registry.capture()[1], None, step=steps.now)
    assert (later.epoch, len(later)) == (4, 3)
