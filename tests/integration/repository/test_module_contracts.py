"""Modules with extra state, through a real sidecar and store: saved, restored and trained on, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class CountingNorm(nn.Module):
    """Counts its calls in a plain attribute that its extra state contains. Training sets the shape of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("peak", torch.zeros(0))
        self.register_buffer("mask", torch.ones(1).expand(16))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        top = x.detach().amax(0)
        self.peak = top if self.peak.numel() == 0 else torch.maximum(self.peak, top)
        return self.norm(x) * self.mask / self.calls + self.peak

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        self.calls = state["calls"]


class ContractRun:
    """One process of the run."""

    def __init__(self, url: Path, seed: int, name: str = "r", **options: Any) -> None:
        torch.manual_seed(seed)
        items = nn.Embedding(2000, 16, sparse=True)
        self.model = nn.Sequential(OrderedDict(items=items, own=CountingNorm(), top=nn.Linear(16, 1)))
        self.tables = torch.optim.Adagrad(items.parameters(), lr=0.1)
        rest = [*self.model.own.parameters(), *self.model.top.parameters()]
        self.dense = torch.optim.Adam(rest, lr=0.01)
        self.ckpt = deltashard.Checkpointer(
            self.model,
            [self.tables, self.dense],
            url=url,
            run=name,
            encoding="fp32",
            arena_bytes=64 << 20,
            grace_s=None,
            **options,
        )

    def train(self, steps: range) -> None:
        for step in steps:
            self.tables.zero_grad()
            self.dense.zero_grad()
            ids = torch.randint(2000, (32,), generator=torch.Generator("cpu").manual_seed(step), device="cpu")
            self.model(ids).square().mean().backward()
            self.tables.step()
            self.dense.step()
            self.ckpt.step()

    def state(self) -> dict[str, Tensor]:
        own = self.model.own
        return {k: v.clone() for k, v in self.model.state_dict().items() if isinstance(v, Tensor)} | {
            "calls": torch.tensor(own.calls, device="cpu")
        }

    def leave(self) -> None:
        self.ckpt.__exit__(KeyboardInterrupt, None, None)


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds under another default device. The reader and a warm start see the same state."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    store = tmp_path / "store"
    first = ContractRun(store, 0)
    assert first.ckpt.restore() is None
    first.train(range(4))
    with torch.device("meta"):
        first.ckpt.save().wait(120)
    first.train(range(4, 8))
    wanted = first.state()
    first.leave()

    second = ContractRun(store, 1)
    assert "CountingNorm" in str(second.ckpt.doctor())
    with torch.device("meta"):
        resumed = second.ckpt.restore()
    second.train(range(4, 8))
    assert (resumed.step, resumed.notes) == (4, ())
    found = second.state()
    second.leave()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []

    with deltashard.open_checkpoint(store, "r") as stored:
        assert stored.step == 4
        assert stored.state["module:own"] == {"_extra_state": {"calls": 4}}
        assert stored.table("items.weight").state["sum"].shape == (2000, 16)

    third = ContractRun(store, 2, "warm")
    third.ckpt.restore(from_run="r", weights_only=True)
    assert third.model.own.calls == 4
    third.leave()
