"""The model of the cluster tests, small and deterministic: a recommender with two embedding tables on synthetic clicks.

It runs in the pods under deltashard, and in the tests without it, as the reference of every step. Both run one thread
of the same torch, so equal steps mean equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from deltashard.optim import RowWiseAdagrad
from torch.utils.data import DataLoader, TensorDataset

USERS, ITEMS, WIDTH, CLICKS, BATCH = 3000, 5000, 16, 4096, 32
SEED = 20260704


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of names and bits."""
    hashed = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        hashed.update(name.encode() + value.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


class Recommender(torch.nn.Module):
    """Two tables and a small top."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.EmbeddingBag(USERS, WIDTH, mode="sum", sparse=True)
        self.items = torch.nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=True)
        self.top = torch.nn.Sequential(
            torch.nn.Linear(2 * WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Logits [n] of users int64 [n] and items int64 [n, 4]."""
        both = torch.cat([self.users(users.unsqueeze(1)), self.items(items)], dim=1)
        logits: torch.Tensor = self.top(both).squeeze(1)
        return logits


class RecommenderTraining:
    """Model, optimizers and data from one seed."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(SEED)
        self.model = Recommender()
        self.optimizers = [
            RowWiseAdagrad([self.model.users.weight, self.model.items.weight], lr=0.05),
            torch.optim.Adam(self.model.top.parameters(), lr=1e-3),
        ]
        made = torch.Generator().manual_seed(SEED)
        users = torch.randint(USERS, (CLICKS,), generator=made)
        items = torch.randint(ITEMS, (CLICKS, 4), generator=made)
        clicks = torch.randint(2, (CLICKS,), generator=made).float()
        self.loader = DataLoader(TensorDataset(users, items, clicks), batch_size=BATCH, shuffle=True)

    def train(self, batch: list[torch.Tensor]) -> None:
        users, items, clicks = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(users, items), clicks)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        for optimizer in self.optimizers:
            optimizer.step()

    def digest(self) -> str:
        """Hash every bit that a checkpoint must restore: parameters and optimizer states."""
        hashed = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            hashed.update(name.encode() + value.contiguous().numpy().tobytes())
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                for name, value in sorted(optimizer.state[parameter].items()):
                    hashed.update(name.encode() + torch.as_tensor(value).contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]
