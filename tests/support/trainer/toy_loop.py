"""A training loop in a few lines, for tests of the code around it."""

from __future__ import annotations

import deltashard
import torch
from torch import nn


class ToyNet(nn.Module):
    """A table and a dense layer."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, columns, sparse=True)
        self.top = nn.Linear(columns, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(x).mean(1))


class ToyLoop:
    """A model, its optimizers, and steps on random ids, the same in each run."""

    def __init__(self, seed: int = 0, rows: int = 300, columns: int = 16) -> None:
        torch.manual_seed(seed)
        self.net = ToyNet(rows, columns)
        self.optimizer: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad([self.net.items.weight], lr=0.1),
            torch.optim.Adam(self.net.top.parameters(), lr=0.01),
        ]
        self.generator = torch.Generator().manual_seed(5)

    def train(self, steps: int = 1, ckpt: deltashard.Checkpointer | None = None) -> None:
        for _ in range(steps):
            x = torch.randint(300, (8, 4), generator=self.generator)
            for optimizer in self.optimizer:
                optimizer.zero_grad()
            self.net(x).square().mean().backward()
            for optimizer in self.optimizer:
                optimizer.step()
            if ckpt is not None:
                ckpt.step()

    @property
    def weights(self) -> torch.Tensor:
        return self.net.items.weight.detach()

    def table(self) -> list[torch.Tensor]:
        """Return clones of the table's weights and Adagrad sums."""
        return [self.weights.clone(), self.optimizer[0].state[self.net.items.weight]["sum"].clone()]
