"""A sampler whose order is a pure function of seed and epoch, shared among ranks: CheckFreq's iterator without replay.

CheckFreq (FAST 2021) keeps (epoch, iteration, start index) and shuffles a pristine list by seed + epoch. Here the state
is (seed, epoch, samples used), and `permutation` computes the order on demand. No generator is used, and a resumed pass
starts at its position immediately. The position is kept by the wrapped loader, which counts deliveries to the loop,
because workers fetch ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from deltashard.errors import UserError
from deltashard.loader.permutation import Permutation

_BLOCK = 4096
"""Indices computed at once, in about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's indices of an epoch after `used` samples; can be iterated repeatedly.

    Ranks take turns in the order. If the samples do not divide evenly, `drop_last` drops the last ones; otherwise the
    epoch's first samples are repeated, so that all ranks get the same number.
    """

    samples: int
    order: Permutation | None
    """None: dataset order."""
    used: int
    rank: int
    world_size: int
    drop_last: bool

    def __len__(self) -> int:
        left = max(0, self.samples - self.used)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def __iter__(self) -> Iterator[int]:
        begin = self.used + self.rank
        end = begin + len(self) * self.world_size
        step = _BLOCK * self.world_size
        for at in range(begin, end, step):
            positions = np.arange(at, min(at + step, end), self.world_size, dtype=np.uint64)
            positions %= np.uint64(self.samples)
            yield from (positions if self.order is None else self.order.at(positions)).tolist()


class ResumableSampler(Sampler[int]):
    """Indices of a map-style dataset in an order of (seed, epoch), shared among ranks: `DataLoader(..., sampler=)`.

    In a wrapped loader (`Checkpointer.wrap`), the wrapper sets the epoch, and a resume continues at the very next
    sample: earlier samples are not fetched or drawn again. The batch size may change, and within an epoch also the
    number of ranks. In any other loader, call `set_epoch` before each pass, as for torch's DistributedSampler.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        seed: int,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """All ranks pass the same arguments except `rank`; raises `UserError` for an invalid one.

        Args:
            data: The dataset, or its number of samples. A dataset may grow between epochs.
            seed: Seed of the order, 0 <= seed < 2^63.
            shuffle: Whether each epoch has another order; False: dataset order.
            rank: This rank's share; with `world_size`. Default: the process group's, or one share without a group.
            world_size: Number of shares.
            drop_last: If samples do not divide evenly, drop the last ones; otherwise the epoch's first ones repeat.
        """
        if not isinstance(data, Sized):
            _number("data", data, minimum=0, maximum=1 << 62)
        if (rank is None) != (world_size is None):
            raise UserError(
                f"rank={rank} and world_size={world_size} must be given together",
                where="ResumableSampler()",
                remedy="give both, or neither to use those of torch's process group",
            )
        if rank is not None and world_size is not None:
            _number("world_size", world_size, minimum=1, maximum=1 << 31)
            _number("rank", rank, minimum=0, maximum=world_size - 1)
        self.data = data
        self.seed = _number("seed", seed, minimum=0, maximum=(1 << 63) - 1)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._place = None if rank is None or world_size is None else (int(rank), int(world_size))

    @property
    def samples(self) -> int:
        return len(self.data) if isinstance(self.data, Sized) else int(self.data)

    @property
    def rank(self) -> int:
        return self._rank_of_world()[0]

    @property
    def world_size(self) -> int:
        return self._rank_of_world()[1]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = _number("epoch", epoch, minimum=0, maximum=(1 << 63) - 1)

    def share(self, epoch: int, used: int = 0) -> Share:
        """Return this rank's share of `epoch` after all ranks together used `used` samples."""
        samples = self.samples
        rank, world_size = self._rank_of_world()
        return Share(
            samples=samples,
            order=Permutation(samples=samples, seed=self.seed, epoch=epoch) if self.shuffle else None,
            used=used,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self.share(self.epoch))

    def __len__(self) -> int:
        return len(self.share(self.epoch))

    def _rank_of_world(self) -> tuple[int, int]:
        """Return (rank, world size); queries the process group lazily, since it may be created later."""
        if self._place is not None:
            return self._place
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers that a DataLoader may draw indices from, the deciding one first."""
    batches = loader.batch_sampler
    return [s for s in (getattr(batches, "sampler", None), loader.sampler, batches) if s is not None]


def resumable_of(loader: object) -> ResumableSampler | None:
    if not isinstance(loader, DataLoader):
        return None
    return next((s for s in samplers_of(loader) if isinstance(s, ResumableSampler)), None)


def _number(name: str, value: Any, *, minimum: int, maximum: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not minimum <= number <= maximum:
        raise UserError(
            f"{name}= takes a whole number from {minimum} to {maximum}, not {value!r}",
            where="ResumableSampler()",
            remedy="give the dataset itself, or its length" if name == "data" else "give such a number",
        )
    return number
