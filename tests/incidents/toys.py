"""A small model that trains in this process, and independent reads of its store for the incident tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import deltashard
import numpy as np
import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from torch import nn

from tests.support.checkpoint.snapshot import Snapshot, read_checkpoint
from tests.support.eventually import eventually

torch.sparse.check_sparse_tensor_invariants.disable()  # set explicitly, otherwise torch warns

ROWS, WIDTH, BATCH = 3000, 16, 32
TABLE = "items.weight"


class Toy(nn.Module):
    """One table of 3000 x 16 and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(ids))


class ToyRun:
    """A small training process: the model, its optimizers and a Checkpointer."""

    def __init__(self, url: str | Path, name: str = "run", *, restore: bool = True, **options: Any) -> None:
        torch.manual_seed(11)
        self.model = Toy()
        self.tables = torch.optim.Adagrad([self.model.items.weight], lr=0.1)
        self.dense = torch.optim.Adam(self.model.head.parameters(), lr=0.01)
        self.generator = torch.Generator().manual_seed(5)
        self.url, self.name = str(url), name
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        on_event_option = {"on_event": lambda kind, facts: self.events.append((kind, facts))}
        all_options = {"run": name, "content_hash": True, **on_event_option, **options}
        self.ckpt = checkpointer(self.model, [self.tables, self.dense], url, **all_options)
        self.resumed = self.ckpt.restore() if restore else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Release without a last snapshot: a test saves explicitly.
        self.ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            ids = torch.randint(0, ROWS, (BATCH, 4), generator=self.generator)
            loss = self.model(ids).square().mean()
            self.tables.zero_grad()
            self.dense.zero_grad()
            loss.backward()
            self.tables.step()
            self.dense.step()
            self.ckpt.step()

    def take_snapshot(self, reason: str) -> deltashard.SaveHandle:
        """Return a save after its snapshot of the last step, even if the previous save is still finishing."""

        def take_snapshot() -> deltashard.SaveHandle | None:
            handle = self.ckpt.save(reason)
            return None if handle.snapshot_id is None else handle

        return eventually(take_snapshot, what=f"the snapshot {reason!r}")

    def save(self) -> deltashard.Commit:
        return self.ckpt.save("test").wait(60)

    def state(self) -> dict[str, np.ndarray]:
        weight = self.model.items.weight
        return {
            "weights": weight.detach().numpy().copy(),
            "sum": self.tables.state[weight]["sum"].numpy().copy(),
            "head": self.model.head.weight.detach().numpy().copy(),
        }

    def kinds(self, kind: str) -> list[Mapping[str, Any]]:
        return [facts for name, facts in self.events if name == kind]


def checkpointer(
    model: nn.Module, optimizers: Any, url: str | Path, **options: Any
) -> deltashard.Checkpointer:
    defaults: dict[str, Any] = {"run": "run", "encoding": "fp32", "arena_bytes": 64 << 20}
    return deltashard.Checkpointer(model, optimizers, url=url, **(defaults | options))


def stored(url: str | Path, which: str = "latest", name: str = "run") -> Snapshot:
    return read_checkpoint(open_store(str(url)), name, which)


def assert_holds(snapshot: Snapshot, state: Mapping[str, np.ndarray]) -> None:
    table = snapshot.tables[TABLE]
    assert np.array_equal(table.weights, state["weights"])
    assert np.array_equal(table.fields["sum"], state["sum"])
    head = snapshot.tree("dense/head.weight")
    assert np.array_equal(np.frombuffer(head.data, np.float32).reshape(head.shape), state["head"])


def newest_step(url: str | Path, name: str = "run") -> int | None:
    newest = RunLog(open_store(str(url)), name).refresh().newest()
    return None if newest is None else newest.step


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
