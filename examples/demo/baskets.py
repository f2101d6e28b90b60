"""Real shopping baskets as training samples: predict the item that was removed from a basket.

The data is UCI Online Retail (../data/ATTRIBUTION.md): one invoice per line, its items separated by commas, in the
order of their numbers: first the orders, from December 2010 to December 2011, then adjustments and cancellations,
which are not used. The last tenth of the orders is held out. A sample is one item of a basket, the *target*, up to
`CONTEXT` other items of the same basket, and `NEGATIVES` items drawn as often as they are sold, so that popularity
has no predictive value.

Batches are built whole, with numpy, and every draw uses torch's default generator: a training run that resumes from a
checkpoint must restore that generator's state, or it draws other negatives.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

PATH = Path(__file__).resolve().parent.parent / "data" / "online_retail_baskets.csv.xz"
NAME = "UCI Online Retail (Daqing Chen, DOI 10.24432/C5BW33, CC BY 4.0)"
CONTEXT = 10
NEGATIVES = 1
ORDERS = 22_061
"""The first lines are the orders; adjustments ("bad debt") and 3,836 cancellations follow."""
LARGEST_BASKET = 100
"""Invoices with more distinct items carry little information about which items belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baskets:
    """Baskets in one ragged array: basket b is `items[starts[b]:starts[b + 1]]`, distinct item numbers."""

    items: np.ndarray
    """int64 [occurrences]."""
    starts: np.ndarray
    """int64 [baskets + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retail:
    """The whole data set, split."""

    item_count: int
    train: Baskets
    held_out: Baskets


@dataclass(frozen=True, slots=True, kw_only=True)
class BasketBatch:
    """B samples with 1 + N candidates each; candidate 0 is the target."""

    context: torch.Tensor
    """int64 [B, CONTEXT]: items of the basket, the first `sizes` of each row."""
    sizes: torch.Tensor
    """int64 [B], 1 ... CONTEXT."""
    candidates: torch.Tensor
    """int64 [B, 1 + N]."""
    basket_sizes: torch.Tensor
    """float32 [B]: distinct items on the invoice."""


def _ragged(baskets: list[tuple[int, ...]]) -> Baskets:
    lengths = np.array([len(basket) for basket in baskets], dtype=np.int64)
    items = np.array([item for basket in baskets for item in basket], dtype=np.int64)
    return Baskets(items=items, starts=np.concatenate([[0], np.cumsum(lengths)]))


def load(path: Path = PATH) -> Retail:
    """Read and split the invoices; items are numbered in order of appearance."""
    numbers: dict[str, int] = {}
    invoices: list[tuple[int, ...]] = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            items = [numbers.setdefault(code, len(numbers)) for code in line.strip().split(",")]
            invoices.append(tuple(dict.fromkeys(items)))
    split = ORDERS * 9 // 10
    train, held_out = (
        [invoice for invoice in part if 2 <= len(invoice) <= LARGEST_BASKET]
        for part in (invoices[:split], invoices[split:ORDERS])
    )
    return Retail(item_count=len(numbers), train=_ragged(train), held_out=_ragged(held_out))


class HeldOutItems(Dataset[int]):
    """Sample i is the i-th item over all baskets, removed from its basket."""

    def __init__(self, baskets: Baskets, popularity: np.ndarray) -> None:
        """Draw negatives uniformly from `popularity`: the training part's occurrences of item numbers."""
        self.baskets = baskets
        self.popularity = popularity
        lengths = np.diff(baskets.starts)
        self.basket_of = np.repeat(np.arange(len(lengths)), lengths)

    def __len__(self) -> int:
        return len(self.baskets.items)

    def __getitems__(self, samples: list[int]) -> BasketBatch:
        """Return a whole batch at once; draws from torch's default generator."""
        sample = np.asarray(samples)
        basket = self.basket_of[sample]
        start = self.baskets.starts[basket]
        length = self.baskets.starts[basket + 1] - start
        size = np.minimum(length - 1, CONTEXT)
        # `CONTEXT` consecutive others, from a random position, around the ring of the basket without the target.
        turn = torch.rand(len(sample), dtype=torch.float64).numpy()
        ring = ((turn * (length - 1)).astype(np.int64)[:, None] + np.arange(CONTEXT)) % (length - 1)[:, None]
        others = (sample - start)[:, None] + 1 + ring
        context = self.baskets.items[start[:, None] + others % length[:, None]]
        drawn = torch.randint(len(self.popularity), (len(sample), NEGATIVES)).numpy()
        candidates = np.concatenate([self.baskets.items[sample][:, None], self.popularity[drawn]], axis=1)
        return BasketBatch(
            context=torch.from_numpy(context),
            sizes=torch.from_numpy(size),
            candidates=torch.from_numpy(candidates),
            basket_sizes=torch.from_numpy(length.astype(np.float32)),
        )


def _as_is(batch: BasketBatch) -> BasketBatch:
    return batch


def training_loader(retail: Retail, *, batch_size: int, seed: int) -> DataLoader[BasketBatch]:
    return DataLoader(
        HeldOutItems(retail.train, retail.train.items),  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=_as_is,
        generator=torch.Generator().manual_seed(seed),
    )


def held_out_batches(retail: Retail, *, batch_size: int, seed: int) -> list[BasketBatch]:
    """Return the same held-out samples on every call; does not change torch's default generator."""
    data = HeldOutItems(retail.held_out, retail.train.items)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [
            data.__getitems__(list(range(at, min(at + batch_size, len(data)))))
            for at in range(0, len(data), batch_size)
        ]
