"""Synthetic clicks: popular items appear often, and the probability of a click depends on user and item."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

FEATURES = {"user": 20_000, "item": 5_000, "shop": 300}
"""Feature -> number of distinct values."""


class Clicks(Dataset[int]):
    """Positions; `batch_of` generates the clicks at them, the same ones each time."""

    dense = 4

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> int:
        return index


def batch_of(positions: list[int]) -> Batch:
    """Return the clicks at `positions`: of each feature one to three values."""
    values: dict[str, list[Tensor]] = {name: [] for name in FEATURES}
    dense, labels = [], []
    for position in positions:
        rng = torch.Generator().manual_seed(position)
        dense.append(torch.rand(Clicks.dense, generator=rng))
        for name, rows in FEATURES.items():
            count = int(torch.randint(1, 4, (), generator=rng))
            values[name].append((rows * torch.rand(count, generator=rng) ** 4).long())
        labels.append(int(values["user"][-1].sum() + values["item"][-1].sum()) % 2)
    bags = [bag for name in FEATURES for bag in values[name]]
    return Batch(
        dense_features=torch.stack(dense),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES),
            values=torch.cat(bags),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
        ),
        labels=torch.tensor(labels),
    )
