"""A small DLRM: embedding tables, a bottom MLP for the dense feature, pairwise dot products, a top MLP.

Most of it is one table: every (candidate, item in the basket) pair has a row, found by hashing the pair into 2^20 rows
(Weinberger et al., 2009: the hashing trick). The tables' gradients are sparse, as in any model whose tables are large.
"""

from __future__ import annotations

import numpy as np
import torch
from baskets import CONTEXT, BasketBatch
from torch import Tensor, nn

COLUMNS = 32
PAIR_ROWS = 1 << 20
INITIAL_STD = 0.05
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 / golden ratio as a signed 64-bit integer: multiplicative (Fibonacci) hashing, high bits are the row."""


def pair_rows(candidates: Tensor, context: Tensor) -> Tensor:
    """Return the row of each unordered (candidate [B, K], item [B, L]) pair: int64 [B, K, L] in [0, PAIR_ROWS)."""
    a, b = candidates[:, :, None], context[:, None, :]
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    return ((low * 65_537 + high + 1) * _MIX >> 40) & (PAIR_ROWS - 1)


def present(batch: BasketBatch) -> Tensor:
    """Return which of `batch.context` are items: bool [B, CONTEXT]."""
    return torch.arange(CONTEXT)[None, :] < batch.sizes[:, None]


def repeated(batch: BasketBatch) -> Tensor:
    """Return the sample of each (sample, candidate): int64 [B * K]."""
    samples, choices = batch.candidates.shape
    return torch.arange(samples).repeat_interleave(choices)


def pairs(batch: BasketBatch) -> Tensor:
    """Return the rows of all pairs, grouped by (sample, candidate): int64 [sum of sizes * K]."""
    rows = pair_rows(batch.candidates, batch.context)
    return rows[present(batch)[:, None, :].expand_as(rows)]


class Scorer(nn.Module):
    """The dense half: scores a candidate from the pooled rows of a basket, the candidate and their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, COLUMNS))
        self.top = nn.Sequential(
            nn.Linear(4 * COLUMNS + 6, 512),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )
        one, two = np.triu_indices(4, k=1)
        self.register_buffer("one", torch.from_numpy(one), persistent=False)
        self.register_buffer("two", torch.from_numpy(two), persistent=False)

    def forward(self, batch: BasketBatch, basket: Tensor, candidate: Tensor, pair: Tensor) -> Tensor:
        """Return logits, float32 [B, K]; `basket`, `candidate`, `pair` are [B * K, COLUMNS], grouped by sample."""
        samples, choices = batch.candidates.shape
        size = self.bottom(batch.basket_sizes.log()[:, None])
        vectors = torch.stack([size[repeated(batch)], basket, candidate, pair], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.one, self.two]
        return self.top(torch.cat([vectors.flatten(1), dots], dim=1)).view(samples, choices)


class BasketModel(nn.Module):
    """Scores how well each candidate fits the rest of the basket."""

    def __init__(self, item_count: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(item_count, COLUMNS, mode="mean", sparse=True, include_last_offset=True)
        self.candidates = nn.EmbeddingBag(item_count, COLUMNS, mode="sum", sparse=True)
        self.pairs = nn.EmbeddingBag(PAIR_ROWS, COLUMNS, mode="mean", sparse=True, include_last_offset=True)
        for table in (self.items, self.candidates, self.pairs):
            nn.init.normal_(table.weight, std=INITIAL_STD)
        self.scorer = Scorer()

    def tables(self) -> list[nn.Parameter]:
        """The parameters whose gradients are sparse."""
        return [self.items.weight, self.candidates.weight, self.pairs.weight]

    def dense(self) -> list[nn.Parameter]:
        """All other parameters."""
        return list(self.scorer.parameters())

    def forward(self, batch: BasketBatch) -> Tensor:
        """Return logits, float32 [B, 1 + N]."""
        offsets = nn.functional.pad(batch.sizes.cumsum(0), (1, 0))
        basket = self.items(batch.context[present(batch)], offsets)[repeated(batch)]
        candidate = self.candidates(batch.candidates.reshape(-1, 1))
        pair = self.pairs(pairs(batch), nn.functional.pad(batch.sizes[repeated(batch)].cumsum(0), (1, 0)))
        return self.scorer(batch, basket, candidate, pair)


def loss_of(logits: Tensor) -> Tensor:
    """Return binary cross-entropy: candidate 0 was in the basket, the others were drawn."""
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


@torch.no_grad()
def auc(model: nn.Module, batches: list[BasketBatch]) -> float:
    """Return the area under the ROC curve over all (sample, candidate) scores; ties count half."""
    was_training = model.training
    model.eval()
    logits = torch.cat([model(batch) for batch in batches]).numpy().astype(np.float64)
    model.train(was_training)
    positive, negative = np.sort(logits[:, 0]), np.sort(logits[:, 1:].ravel())
    below = np.searchsorted(negative, positive, side="left") + np.searchsorted(
        negative, positive, side="right"
    )
    return float(below.sum() / (2 * len(positive) * len(negative)))
