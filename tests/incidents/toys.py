"""A small model that trains in this process, and what the incident tests ask of its run: the store, read independently."""

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

torch.sparse.check_sparse_tensor_invariants.disable()  # said explicitly, or torch warns

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
    """A training process in miniature: the model, its optimizers, a Checkpointer."""

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
        # Release without a last cut: what a test wants saved it saves.
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

    def cut(self, reason: str) -> deltashard.SaveHandle:
        """A save that has been cut after the last step, though the sidecar may be busy with the end of the one before."""

        def cut() -> deltashard.SaveHandle | None:
            handle = self.ckpt.save(reason)
            return None if handle.cut is None else handle

        return eventually(cut, what=f"the cut {reason!r}")

    def save(self) -> deltashard.Commit:
        """Cut after the last step, wait until it is durable."""
        return self.ckpt.save("test").wait(60)

    def state(self) -> dict[str, np.ndarray]:
        """Everything a checkpoint must hold of the model, copied."""
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
    """Of the run `run`, exact and small."""
    defaults: dict[str, Any] = {"run": "run", "encoding": "fp32", "arena_bytes": 64 << 20}
    return deltashard.Checkpointer(model, optimizers, url=url, **(defaults | options))


def stored(url: str | Path, which: str = "latest", name: str = "run") -> Snapshot:
    """A checkpoint, read from the store by nobody's sidecar."""
    return read_checkpoint(open_store(str(url)), name, which)


def assert_holds(snapshot: Snapshot, state: Mapping[str, np.ndarray]) -> None:
    """Weights, state and dense parameters of the snapshot are those of `state`, bit for bit."""
    table = snapshot.tables[TABLE]
    assert np.array_equal(table.weights, state["weights"])
    assert np.array_equal(table.fields["sum"], state["sum"])
    head = snapshot.tree("dense/head.weight")
    assert np.array_equal(np.frombuffer(head.data, np.float32).reshape(head.shape), state["head"])


def newest_step(url: str | Path, name: str = "run") -> int | None:
    """Step of the newest committed checkpoint, read from the log."""
    newest = RunLog(open_store(str(url)), name).refresh().newest()
    return None if newest is None else newest.step


def kill(pid: int | None) -> None:
    """SIGKILL, as a lost node would."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
