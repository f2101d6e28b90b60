"""Interaction of trainer, sidecar and log: no checkpoint depends on data that were never restored or stored."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard.errors import SaveFailed
from torch import nn

from tests.support.checkpointers import MakeCheckpointer, checkpointers
from tests.support.eventually import eventually
from tests.support.sidecar.training import training
from tests.support.sidecar_process import sidecar

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, DIM = 200, 8


class Pair(nn.Module):
    """Two tables, of which the second may stay unused for a while, and a dense layer."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.first = nn.Embedding(rows, DIM)
        self.second = nn.Embedding(rows, DIM)
        self.top = nn.Linear(DIM, 1)


class PairLoop:
    """A `Pair`, one optimizer, and steps on random ids."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], *, seed: int, rows: int = ROWS
    ) -> None:
        torch.manual_seed(seed)
        self.net: Any = Pair(rows)
        self.optimizer = optimizer(self.net.parameters())

    def train(self, ckpt: deltashard.Checkpointer, steps: int = 1, *, both: bool = True) -> None:
        for _ in range(steps):
            x = torch.randint(ROWS // 4, (8,))
            self.optimizer.zero_grad()
            y = self.net.first(x) + (self.net.second(x) if both else 0)
            self.net.top(y).square().mean().backward()
            self.optimizer.step()
            ckpt.step()

    def content(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        for name in ("first", "second"):
            entry = self.optimizer.state.get(getattr(self.net, name).weight, {})
            found |= {f"{name}.{k}": v.clone() for k, v in entry.items() if isinstance(v, torch.Tensor)}
        return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCheckpointer]:
    with checkpointers(tmp_path, monkeypatch, encoding="fp32") as build:
        yield build


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1)


def test_late_row_state_restores_over_older_baseline(make: MakeCheckpointer) -> None:
    """A table gets its row state at its first use after the baseline.

    Earlier frames without the state are superseded.
    """
    loop = PairLoop(adam, seed=0)
    ckpt = make(loop)
    ckpt.restore()
    loop.train(ckpt, 2, both=False)
    assert ckpt.save().wait(120).baseline
    loop.train(ckpt, 2)
    assert not ckpt.save().wait(120).baseline
    loop.train(ckpt, 2)
    assert not ckpt.save().wait(120).baseline
    ckpt.close()
    again = PairLoop(adam, seed=1)
    restored = make(again).restore()
    assert not restored.fell_back
    assert equal(again.content(), loop.content())


def test_pending_baseline_survives_failed_save(make: MakeCheckpointer, tmp_path: Path) -> None:
    """Rows that no checkpoint holds (the table grew) are in the next checkpoint after any number of failed saves."""
    loop = PairLoop(adagrad, seed=0)
    with make(loop) as ckpt:
        loop.train(ckpt, 3)
    bigger = PairLoop(adagrad, seed=1, rows=ROWS + 50)
    ckpt = make(bigger)
    assert ckpt.restore(strict=False) is not None
    bigger.train(ckpt, 1)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(SaveFailed):
        ckpt.save().wait(120)
    (tmp_path / "store").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    bigger.train(ckpt, 1)
    assert ckpt.save().wait(120).baseline
    bigger.train(ckpt, 1)
    ckpt.close()
    again = PairLoop(adagrad, seed=2, rows=ROWS + 50)
    restored = make(again).restore()
    assert not restored.fell_back
    assert equal(again.content(), bigger.content())


def test_finished_run_leaves_no_shared_memory(make: MakeCheckpointer) -> None:
    """The sidecar frees the blocks' memory. Only the page of control lines remains."""
    loop = PairLoop(adagrad, seed=0)
    with make(loop) as ckpt:
        loop.train(ckpt, 1)
        arena, pid = Path(ckpt.arena_path or ""), ckpt.sidecar_pid
        assert arena.stat().st_blocks * 512 >= 64 << 20
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    assert arena.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(("grace_s", "pod_s", "expected_s"), [("auto", 115, 115), (60.0, 115, 60)])
def test_pod_trainer_uses_grace_period_from_sidecar(
    make: MakeCheckpointer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    grace_s: float | str,
    pod_s: int,
    expected_s: int,
) -> None:
    """A long step and an upload of an older save do not prevent the urgent save.

    The script's own value takes precedence.
    """
    committed: list[int | None] = []
    loop = PairLoop(adagrad, seed=0)
    previous = signal.signal(signal.SIGTERM, lambda *_: committed.append(ckpt._outcomes.committed_step))
    try:
        store = (tmp_path / "store").as_uri()
        with sidecar(tmp_path, store, encoding="fp32", term_deadline_s=pod_s) as process:
            monkeypatch.setenv("DELTASHARD_SOCKET", str(process.socket))
            ckpt = make(loop, grace_s=grace_s)
            ckpt.restore()
            loop.train(ckpt, 2)
            older = ckpt.save("older")
            signal.raise_signal(signal.SIGTERM)
            term = ckpt._wiring.term
            assert expected_s / 2 < term.remaining_s <= expected_s
            assert committed == []
            loop.train(ckpt, 1)
            assert older.done
            assert committed == [3]
            ckpt.close()
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("fails", [False, True])
def test_save_notification_reaches_next_attachment(tmp_path: Path, *, fails: bool) -> None:
    """The notification was lost with its stream. A trainer that waits for it would never save again."""
    store = tmp_path / "store"
    with training(tmp_path, store.as_uri(), encoding="fp32") as (process, trainer):
        trainer._watch.cancel()
        eventually(lambda: trainer.gone)
        if fails:
            store.rename(tmp_path / "elsewhere")
            store.write_text("no directory")
        number = trainer.save()
        event = "save.failed" if fails else "save.committed"
        eventually(lambda: any(e["event"] == event for e in process.events()))
        assert not trainer.commits
        assert not trainer.failures
        trainer.attach()
        eventually(lambda: number in (trainer.failures if fails else trainer.commits))
