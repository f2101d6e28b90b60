"""Each rank's share of the batch of a training step, for any number of ranks.

The batch is a function of the step, which is the same for all ranks, and each rank takes its part. A step trains on
the same samples in every world, and needs no position of a loader. docs/distributed.md describes what `wrap` does in
another world.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from baskets import BasketBatch, HeldOutItems, Retail

BATCH_SIZE = 120
"""Samples of all ranks together, divisible by 1, 2, 3, 4, 5, 6 and 8 ranks."""


class StepBatches:
    """Shuffled training baskets in batches of `BATCH_SIZE`; the batch of a step is the same in every process."""

    def __init__(self, retail: Retail, *, seed: int) -> None:
        self._samples = HeldOutItems(retail.train, retail.train.items)
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        """Epoch, and the order of its samples."""

    def after(self, step: int) -> Iterator[BasketBatch]:
        """Yield the batches of the steps after `step`, without end."""
        while True:
            step += 1
            yield self.of(step)

    def of(self, step: int) -> BasketBatch:
        """Return the batch of the `step`-th step, from 1; does not change torch's default generator."""
        epoch, at = divmod(step - 1, len(self._samples) // BATCH_SIZE)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = (epoch, torch.randperm(len(self._samples), generator=generator).tolist())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + step)
            return self._samples.__getitems__(self._order[1][at * BATCH_SIZE : (at + 1) * BATCH_SIZE])


def share(batch: BasketBatch, rank: int, world: int) -> BasketBatch:
    """Return every `world`-th sample of a batch, from the `rank`-th on."""
    return BasketBatch(**{field.name: getattr(batch, field.name)[rank::world] for field in fields(batch)})
