"""Records each rank for the report of the demo of several ranks: a line per step, and hashes of its content.

`rank-<r>/steps-*.jsonl`: as in the demo of one process; the loss is the mean over all ranks, the checksum that of the
whole batch. `rank-<r>/snapshot-*.json` and `restored-*.json`: SHA-256 sums of every shard of a table, of its optimizer
state, and of each dense parameter and its state, taken from TorchRec's own view of the live tensors, not by
deltashard. `rank-<r>/last-*.json`, where recovery may be partial: the same of the rank's last content (`held.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from baskets import BasketBatch
from evidence import StepLog, write_atomic
from held import LastShardState, held
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

REPORTED_FIELDS = (
    "step",
    "seq",
    "attempt",
    "source",
    "lost_steps",
    "seconds",
    "mode",
    "exact",
    "pls",
    "rank_steps",
)
"""The fields of `Restored` that a rank records."""


class ShardRecorder:
    """Writes one rank's records into `folder`; does nothing when `folder` is None."""

    def __init__(
        self, folder: str | None, model: DistributedModelParallel, optimizer: CombinedOptimizer
    ) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._model, self._optimizer = model, optimizer
        self._folder = Path(folder) / f"rank-{self._rank}" if folder else None
        self._attempt: int | None = None
        self._last: LastShardState | None = None
        self._snapshots = 0
        if self._folder:
            self._log = StepLog(self._folder)

    def restored(self, resumed: Any, *, partial: bool) -> None:
        """Record this rank's content right after `restore()`, and its result.

        `partial`: the next recovery may be partial, so this rank's content is recorded until one is.
        """
        if not self._folder or resumed is None:
            return
        self._attempt = resumed.attempt
        report = {name: getattr(resumed, name) for name in REPORTED_FIELDS}
        self._write_report(f"restored-{resumed.attempt}", report | {"world": self._world, "pid": os.getpid()})
        if partial and resumed.mode == "full":
            path = self._folder / f"last-{resumed.attempt}.json"
            self._last = LastShardState(path, self._model, self._optimizer, step=resumed.step)

    def mean(self, loss: Tensor) -> float:
        """Return the mean of all ranks' losses; all ranks call this before the backward pass.

        A later collective, after `optimizer.step()`, would leave every survivor of a kill with half a step, from which
        training cannot continue.
        """
        if not self._folder:
            return loss.item()
        of_all = loss.detach().clone()
        dist.all_reduce(of_all)
        return of_all.item() / self._world

    @contextlib.contextmanager
    def record_step(self, step: int, loss: float, batch: BasketBatch, ckpt: Any) -> Iterator[None]:
        """Time the body, which is `ckpt.step()`, and write this step's line; if it took a snapshot, record the content.

        `loss` and `batch` are those of all ranks.
        """
        if not self._folder:
            yield
            return
        before = time.perf_counter()
        yield
        stall_s = time.perf_counter() - before
        if self._last is not None:
            self._last.finished(step)
        snapshot = self._snapshot_taken(step, ckpt)
        self._log.write(step, loss, stall_s=stall_s, candidates=batch.candidates, snapshot=snapshot)

    def finished(self, step: int, auc: float, ckpt: Any) -> None:
        """Write the result, which is the same on every rank; `ckpt` is closed and may have taken a snapshot."""
        if self._folder:
            self._snapshot_taken(step, ckpt)
            write_atomic(self._folder / "result.json", {"step": step, "auc": auc})
        print(f"step {step}: AUC on held-out baskets {auc:.4f}")

    def _snapshot_taken(self, step: int, ckpt: Any) -> bool:
        if ckpt is None or ckpt.stats.snapshots == self._snapshots:
            return False
        self._snapshots = ckpt.stats.snapshots
        self._write_report(f"snapshot-{self._attempt}-{step}", {"step": step})
        return True

    def _write_report(self, name: str, facts: dict[str, Any]) -> None:
        assert self._folder
        content = held(self._model, self._optimizer)
        write_atomic(self._folder / f"{name}.json", facts | {"rank": self._rank, "content": content})
