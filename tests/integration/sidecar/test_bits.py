"""Encodings of each table with the real sidecar: set by the user, or chosen by the expected number of restores."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard_checkpoint.deciding import error_ledger
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import PRECISION_KEY
from deltashard_checkpoint.write.precision import parse_metadata
from torch import nn

from tests.support.checkpointers import MakeCheckpointer, checkpointers, simulate_crash
from tests.support.eventually import eventually

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

LARGE, SMALL, DIM = 4000, 40, 16


class TwoTableModel(nn.Module):
    """A table that holds 99 % of the bytes, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(LARGE, DIM, sparse=True)
        self.small = nn.Embedding(SMALL, DIM, sparse=True)


class BitsLoop:
    """A model, its optimizer, and steps on random ids."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net: Any = TwoTableModel()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train(self, ckpt: deltashard.Checkpointer, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            rows = self.net.large(torch.randint(LARGE, (8,))) + self.net.small(torch.randint(SMALL, (8,)))
            rows.square().mean().backward()
            self.optimizer.step()
            ckpt.step()

    def error(self, other: BitsLoop, table: str) -> float:
        """Return the relative L2 distance of a table from another loop's table."""
        mine, theirs = (getattr(each.net, table).weight.detach() for each in (self, other))
        return float((mine - theirs).norm() / theirs.norm())


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCheckpointer]:
    with checkpointers(tmp_path, monkeypatch) as build:
        yield build


def newest(tmp_path: Path) -> Checkpoint:
    entry = RunLog(open_store(f"file://{tmp_path}/store"), "r").refresh().newest()
    assert entry is not None
    return entry


def stored(tmp_path: Path) -> dict[str, str]:
    precision = parse_metadata(newest(tmp_path).metadata[PRECISION_KEY])
    return {table: precision.of_table(f"{table}.weight") for table in ("large", "small")}


def test_table_has_user_encoding(make: MakeCheckpointer, tmp_path: Path) -> None:
    """One table has 2 bits and the other 8. Restored rows and the commit match, and the content hash agrees."""
    loop, again, began_s = BitsLoop(0), BitsLoop(1), time.time()
    with make(loop, encoding="q2", tables={"small.weight": "q8"}, content_hash=True) as ckpt:
        loop.train(ckpt, 3)
    entry = newest(tmp_path)
    assert entry.encodings == {"large.weight": ("q2",), "small.weight": ("q8",)}
    assert began_s <= entry.snapshot_at_s <= entry.at_s
    assert stored(tmp_path) == {"large": "q2", "small": "q8"}
    restored = make(again, encoding="q2", tables={"small.weight": "q8"}, content_hash=True).restore()
    assert restored.verified is True
    assert restored.rounded == {"large.weight": "q2", "small.weight": "q8"}
    assert again.error(loop, "small") < 0.01 < 0.1 < again.error(loop, "large")


def test_bits_follow_budget_and_small_tables_keep_eight(make: MakeCheckpointer, tmp_path: Path) -> None:
    """Tables have 8 bits before the first sample. Then the large one has fewer, until restores use up the budget."""
    options = {"bits": "budget", "differential": "full", "planned_steps": 100}
    loop = BitsLoop(0)
    ckpt = make(loop, **options)
    loop.train(ckpt, 2)
    ckpt.save().wait(120)
    assert stored(tmp_path) == {"large": "q8", "small": "q8"}
    loop.train(ckpt, 2)
    ckpt.save().wait(120)
    chosen = stored(tmp_path)
    assert chosen["small"] == "q8"
    assert chosen["large"] in ("q2", "q3", "q4")
    ledger = error_ledger.parse_metadata(newest(tmp_path).metadata[error_ledger.KEY])
    assert ledger.restores == 0
    simulate_crash(ckpt)

    again = BitsLoop(1)
    ckpt = make(again, **options)
    assert ckpt.restore() is not None
    assert again.error(loop, "large") == pytest.approx(ledger.error["large.weight"], rel=0.2)
    again.train(ckpt, 2)
    ckpt.save().wait(120)
    ledger = error_ledger.parse_metadata(newest(tmp_path).metadata[error_ledger.KEY])
    assert ledger.restores == 1
    assert ledger.spent["large.weight"] == pytest.approx(again.error(loop, "large") ** 2, rel=0.5)
    again.train(ckpt, 90)
    ckpt.save().wait(120)
    assert stored(tmp_path) == {"large": "q8", "small": "q8"}


def test_final_checkpoint_has_8_bit_even_if_step_was_saved(make: MakeCheckpointer, tmp_path: Path) -> None:
    """The user's save of that step has fewer bits, so close() saves the step again under the same pin."""
    loop = BitsLoop(0)
    ckpt = make(loop, bits="check-n-run", differential="full")
    loop.train(ckpt, 2)
    ckpt.save().wait(120)
    loop.train(ckpt, 2)
    ckpt.save(pin="final").wait(120)
    assert stored(tmp_path)["large"] in ("q2", "q3", "q4")
    coarse = newest(tmp_path)
    ckpt.close()
    assert stored(tmp_path) == {"large": "q8", "small": "q8"}
    left = newest(tmp_path)
    assert (left.step, left.seq, left.pins) == (4, coarse.seq + 1, ("final",))
    assert left.directive.startswith("close;")


@pytest.mark.parametrize("committed", [False, True], ids=["before a commit", "after one"])
def test_killed_sidecar_keeps_accumulated_error(
    make: MakeCheckpointer, tmp_path: Path, committed: bool
) -> None:
    """The log holds the accumulated error of the run's restores, and the next process reads it."""
    options = {"bits": "check-n-run", "differential": "full", "planned_steps": 10_000}
    loop, again = BitsLoop(0), BitsLoop(1)
    ckpt = make(loop, **options)
    loop.train(ckpt, 2)
    ckpt.save().wait(120)
    loop.train(ckpt, 40)
    simulate_crash(ckpt)
    ckpt = make(again, **options)
    assert ckpt.restore() is not None
    again.train(ckpt, 41)
    if committed:
        ckpt.save().wait(120)
    pid = ckpt.sidecar_pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: ckpt.sidecar_pid not in (None, pid), what="another sidecar")
    again.train(ckpt, 1)
    ckpt.save().wait(120)
    ledger = error_ledger.parse_metadata(newest(tmp_path).metadata[error_ledger.KEY])
    assert ledger.restores == 1
    assert ledger.spent.keys() == {"large.weight"}
