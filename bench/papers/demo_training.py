"""The demo's training for the parts that run it: its model, row-wise AdaGrad for tables, Adam for the dense half."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

BATCH = 128


@contextlib.contextmanager
def pair_table_rows(rows: int) -> Iterator[None]:
    """Within the block the largest table of this process's models has this many rows, a power of two."""
    import model as demo

    before, demo.PAIR_ROWS = demo.PAIR_ROWS, rows
    try:
        yield
    finally:
        demo.PAIR_ROWS = before


class DemoTraining:
    """A model and its optimizers, with initial values by the seed."""

    def __init__(self, retail: Any, seed: int) -> None:
        import model as demo
        import torch
        from deltashard.optim import RowWiseAdagrad

        self._loss_of = demo.loss_of
        torch.manual_seed(seed)
        self.model = demo.BasketModel(retail.item_count)
        self.optimizers: list[Any] = [
            RowWiseAdagrad(self.model.tables(), lr=0.05),
            torch.optim.Adam(self.model.dense(), lr=1e-3),
        ]

    def train(self, batch: Any) -> float:
        loss = self._loss_of(self.model(batch))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.item())

    def loss(self, batches: list[Any]) -> list[float]:
        import torch

        self.model.eval()
        with torch.no_grad():
            return [float(self._loss_of(self.model(batch))) for batch in batches]
