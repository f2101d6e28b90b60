"""Loops that use several loaders at a time, make a loader for each epoch, or end epochs by their own count."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from deltashard.loader.registry import LoaderRegistry
from torch.utils.data import DataLoader, Dataset

from tests.support.trainer.step_count import StepCount


def registry_at(step: int = 0) -> tuple[LoaderRegistry, Callable[[], None]]:
    steps = StepCount(step)
    registry = LoaderRegistry(steps)

    def step_done() -> None:
        steps.now += 1
        registry.stepped()

    return registry, step_done


@pytest.mark.parametrize("first", [False, True], ids=["the long one first", "the short one first"])
def test_reused_batches_of_a_parallel_loader_are_reported(
    caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    """In zip(long, cycle(short)) the batches of the long loader hide the end of the short one."""
    registry, step_done = registry_at()
    long, short = registry.wrap(list(range(9)), name="long"), registry.wrap(list(range(3)), name="short")
    both = (itertools.cycle(short), long) if first else (long, itertools.cycle(short))
    for _ in zip(*both, strict=False):
        step_done()
    assert "loader 'short': a step was taken without a new batch" in caplog.text
    assert "'long'" not in caplog.text


def test_end_of_pass_is_visible_until_the_next_step() -> None:
    """The last scheduler step of an epoch, after step(), is not reported as a change that a resumed run would miss."""
    registry, step_done = registry_at()
    loader = registry.wrap([0, 1])
    for _ in loader:
        step_done()
    assert registry.pass_ended
    next(iter(loader))
    assert registry.pass_ended
    step_done()
    assert not registry.pass_ended


class RandomDataset(Dataset[float]):
    """Samples that depend on the worker that fetches them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + random.random()


@pytest.mark.parametrize(
    ("data", "reported"), [(RandomDataset(), True), (list(range(12)), False)], ids=["drawn", "plain"]
)
def test_worker_count_matters_if_fetching_uses_randomness(data: Any, reported: bool) -> None:
    """Mid-epoch the number of workers must match. Without randomness, any number delivers the same batches."""
    registry, step_done = registry_at()
    for _, _ in zip(range(5), registry.wrap(DataLoader(data, 2)), strict=False):
        step_done()
    rng, positions = registry.capture()
    later, _ = registry_at(registry.clock())
    later.resume(positions, rng, step=registry.clock())
    later.wrap(DataLoader(data, 2, num_workers=1))
    assert bool(later.mismatches(positions)) is reported


def test_loader_change_between_epochs_is_noted() -> None:
    registry, step_done = registry_at()
    for _ in registry.wrap(DataLoader(list(range(6)), 2)):
        step_done()
    rng, positions = registry.capture()
    later, _ = registry_at(registry.clock())
    later.wrap(DataLoader(list(range(8)), 2))
    notes = later.resume(positions, rng, step=registry.clock())
    assert notes == ["loader 'loader': it has changed for the following epochs: samples was 6 and is 8"]
