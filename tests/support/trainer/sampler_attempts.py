"""Training attempts whose loaders draw from ResumableSamplers: killed at any step, resumed from the saved state."""

from __future__ import annotations

import mmap
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from deltashard import ResumableSampler
from deltashard.errors import CheckpointMismatch
from deltashard.loader.registry import LoaderRegistry
from deltashard.loader.sharding import ResumePositions
from deltashard.state.rng import capture_globals
from deltashard.state.value import decode_value, encode_value
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.trainer.step_count import StepCount


class CountingDataset(Dataset[int]):
    """The samples 0..n-1; it counts the reads of each, in any process, in memory that no checkpoint saves."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._shared = mmap.mmap(-1, 8 * n)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        self.reads()[i] += 1
        return i

    def reads(self) -> NDArray[np.int64]:
        return np.frombuffer(self._shared, np.int64)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data set and sampler options, the same in every attempt."""

    samples: int
    seed: int = 3
    shuffle: bool = True
    drop_last: bool = False
    """The sampler's."""
    drop_batch: bool = False
    """The loader's."""
    distributed: bool = False
    """Whether the sampler is torch's."""


@dataclass(frozen=True, kw_only=True)
class SamplerAttempt:
    """One training attempt of all ranks, from a resume to a kill."""

    saved: int
    """Steps before the save."""
    lost: int = 0
    """Steps after the save, which are lost."""
    world: int = 1
    batch_size: int = 2
    workers: int = 0
    persistent: bool = False


class SamplerRank:
    """One rank's loader; every batch is a step."""

    def __init__(self, data: Data, attempt: SamplerAttempt, rank: int, **options: Any) -> None:
        self.steps = StepCount()
        self.data = CountingDataset(data.samples)
        self.seen: dict[int, list[int]] = defaultdict(list)
        """By epoch."""
        self.last: list[int] = []
        """Samples of the last batch."""
        kind = (
            partial(DistributedSampler, num_replicas=attempt.world)
            if data.distributed
            else partial(ResumableSampler, world_size=attempt.world)
        )
        sampler = kind(self.data, rank=rank, seed=data.seed, shuffle=data.shuffle, drop_last=data.drop_last)
        self.registry = LoaderRegistry(self.steps)
        self.loader = self.registry.wrap(
            DataLoader(
                self.data,
                batch_size=attempt.batch_size,
                sampler=sampler,
                drop_last=data.drop_batch,
                num_workers=attempt.workers,
                persistent_workers=attempt.persistent,
            ),
            **options,
        )
        self._run = _train_steps(self)

    def take(self, steps: int) -> None:
        """Take `steps` steps, across epochs."""
        until = self.steps.now + steps
        while self.steps.now < until:
            next(self._run)

    def rest_of_epoch(self) -> None:
        """Finish the epoch of the last batch, or the next epoch if that one has ended."""
        while next(self._run):
            pass

    def close(self) -> None:
        """Stop the workers: when the garbage collector ends a loader, torch waits 5 s per worker."""
        self._run.close()
        self.registry.close()

    def tree(self) -> dict[str, Any]:
        return decode_value(encode_value(self.registry.capture()[1]).to_bytes())["loader"]

    def resume(self, tree: dict[str, Any]) -> None:
        """Resume at the position of `tree`; refuse a changed loader."""
        self.registry.resume({"loader": tree}, capture_globals(), step=self.steps.now, on_change="refuse")


def _train_steps(rank: SamplerRank) -> Generator[bool, None, None]:
    """Yield steps without end: True after each, False where an epoch ends."""
    while True:
        epoch = rank.loader.epoch
        rank.loader.sampler.set_epoch(epoch)
        for batch in rank.loader:
            rank.last = batch.tolist()
            rank.seen[epoch] += rank.last
            rank.steps.now += 1
            yield True
        yield False


def resharded(trees: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """Return the state of `rank` of `world`, from `trees`, one for each rank that saved."""
    saved = len(trees)
    if saved == world:
        return trees[rank]
    mine = {0: trees[0]} | {peer: trees[peer] for peer in range(rank, saved, world)}
    found = ResumePositions({"loader": mine.get(rank) or mine[0]})
    found.reshard("loader", mine, rank=rank, saved=saved, world=world)
    if found.refused:
        raise CheckpointMismatch(found.refused["loader"])
    return found.positions["loader"]


def resume(
    data: Data, attempt: SamplerAttempt, trees: list[dict[str, Any]], **options: Any
) -> list[SamplerRank]:
    """Return the attempt's ranks, resumed at the positions of `trees` (from the start if empty)."""
    ranks = [SamplerRank(data, attempt, rank, **options) for rank in range(attempt.world)]
    for rank, each in enumerate(ranks):
        if trees:
            each.resume(resharded(trees, rank, attempt.world))
    return ranks


def order(data: Data, epoch: int) -> list[int]:
    """Return the order of all samples in that epoch."""
    if data.distributed:
        alone = DistributedSampler(range(data.samples), 1, 0, seed=data.seed, shuffle=data.shuffle)
        alone.set_epoch(epoch)
        return list(alone)
    alone = ResumableSampler(data.samples, seed=data.seed, shuffle=data.shuffle, rank=0, world_size=1)
    return list(alone.share(epoch))


def trained_samples(data: Data, attempts: list[SamplerAttempt]) -> dict[int, Counter[int]]:
    """Return the samples, by epoch, that were trained on in saved steps. The last attempt finishes its epoch.

    Fail if an attempt reads samples that earlier attempts used in the epoch it resumes in, except each rank's last
    batch.
    """
    used: dict[int, Counter[int]] = defaultdict(Counter)
    trees: list[dict[str, Any]] = []
    last: set[int] = set()
    for number, attempt in enumerate(attempts, 1):
        ranks = resume(data, attempt, trees)
        epoch = ranks[0].loader.epoch
        before = set(used[epoch])
        for rank in ranks:
            rank.take(attempt.saved)
            if number == len(attempts):
                rank.rest_of_epoch()
        again = last if len(trees) == attempt.world else set()
        trees = [rank.tree() for rank in ranks]
        last = {
            sample for rank in ranks for sample in rank.last
        } or last  # an attempt without a step keeps the previous batch
        for rank in ranks:
            for each, seen in rank.seen.items():
                used[each].update(seen)
        # An attempt repeats the epoch's first samples at its end, so that all ranks get the same number.
        repeated = set() if data.drop_last else set(order(data, epoch)[: attempt.world - 1])
        for rank in ranks:
            rank.take(attempt.lost)
            # Not checked with workers: they prefetch, and may read all remaining samples.
            if rank.seen.keys() <= {epoch} and not attempt.workers:
                assert not (set(rank.data.reads().nonzero()[0].tolist()) & before) - repeated - again
                assert int(rank.data.reads().sum()) <= len(rank.seen[epoch]) + len(again)
            rank.close()
    return used


def check_each_once(data: Data, attempts: list[SamplerAttempt], used: dict[int, Counter[int]]) -> None:
    """Check that every epoch has each sample once, except those that sampler or loader omit or repeat at its end."""
    worlds = {attempt.world for attempt in attempts}
    for epoch, seen in used.items():
        if not seen:
            continue
        repeated = {sample for sample, times in seen.items() if times > 1}
        # Torch's sampler repeats the first of the remaining samples, ours those of the epoch.
        assert not (repeated and data.drop_last)
        assert len(repeated) < max(worlds)
        assert data.distributed or repeated <= set(order(data, epoch)[: max(worlds) - 1])
        assert all(seen[sample] == 2 for sample in repeated)
        missing = set(range(data.samples)) - seen.keys()
        allowed = (
            max(attempt.world * attempt.batch_size for attempt in attempts)
            if data.drop_batch
            else max(worlds)
        )
        assert len(missing) < allowed if data.drop_last or data.drop_batch else not missing
