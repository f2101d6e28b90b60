"""Records the training process for the demo's report: a line per step, and copies of snapshots and restored states.

`steps-*.jsonl`: wall time, step, loss, seconds inside `ckpt.step()`, a checksum of the batch's drawn candidates, and
whether this call took a snapshot. The checksum shows that a resumed run has the same batches (order, position and
random draws) as the uninterrupted one.

`snapshot-<step>/` and `restored-<pid>/`: every table's weights and optimizer state, the dense parameters and theirs, as
plain .npy files written directly from the live tensors, without deltashard. `checks` compares restored states with
them. Your own training script needs none of this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baskets import BasketBatch
from torch import nn

KEPT_DUMPS = 4


class StepLog:
    """One process's lines, which `records.StepLines` reads; complete up to the last step at any kill."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / f"steps-{time.time_ns()}-{os.getpid()}.jsonl").open("w", buffering=1)

    def write(
        self, step: int, loss: float, *, stall_s: float, candidates: torch.Tensor, snapshot: bool
    ) -> None:
        """Add a step; `candidates` are those of its batch, int64 [B, K]."""
        crc = zlib.crc32(candidates.numpy().tobytes())
        self._lines.write(json.dumps([time.time(), step, loss, stall_s, crc, snapshot]) + "\n")


class DemoRecorder:
    """Writes into `folder`, or does nothing when it is None."""

    def __init__(self, folder: str | None, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.folder = Path(folder) if folder else None
        self.model = model
        self.optimizers = optimizers
        self._snapshots = 0
        if self.folder:
            self._log = StepLog(self.folder)

    def restored(self, resumed: Any) -> None:
        """Copy the model right after `restore()`, and record its result."""
        if not self.folder or resumed is None:
            return
        name = f"restored-{os.getpid()}"
        self._dump(name)
        report = {
            "step": resumed.step,
            "seq": resumed.seq,
            "source": resumed.source,
            "lost_steps": resumed.lost_steps,
            "seconds": resumed.seconds,
            "dump": name,
        }
        write_atomic(self.folder / f"{name}.json", report)

    @contextlib.contextmanager
    def record_step(self, step: int, loss: float, batch: BasketBatch, ckpt: Any) -> Iterator[None]:
        """Time the body, which is `ckpt.step()`, and write this step's line; if it took a snapshot, keep a copy."""
        if not self.folder:
            yield
            return
        before = time.perf_counter()
        yield
        stall_s = time.perf_counter() - before
        snapshot = ckpt is not None and ckpt.stats.snapshots != self._snapshots
        self._log.write(step, loss, stall_s=stall_s, candidates=batch.candidates, snapshot=snapshot)
        if snapshot:
            self._snapshots = ckpt.stats.snapshots
            self._dump(f"snapshot-{step}")
            for old in self._dumps("snapshot-*")[:-KEPT_DUMPS]:
                shutil.rmtree(old)

    def finished(self, step: int, auc: float) -> None:
        """Write the result, and the size of this state in the ordinary format."""
        if self.folder:
            write_atomic(
                self.folder / "result.json", {"step": step, "auc": auc, "full_bytes": self._full_bytes()}
            )
        print(f"step {step}: AUC on held-out baskets {auc:.4f}")

    def _dumps(self, pattern: str) -> list[Path]:
        assert self.folder
        return sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)

    def _dump(self, name: str) -> None:
        """Write live tensors to files; a file gets its final name when it is complete."""
        assert self.folder
        unfinished = self.folder / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        names = {parameter: fqn for fqn, parameter in self.model.named_parameters()}
        for fqn, parameter in self.model.named_parameters():
            np.save(unfinished / f"{fqn}.npy", parameter.detach().numpy())
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    np.save(unfinished / f"{names[parameter]}:{key}.npy", torch.as_tensor(value).numpy())
        unfinished.rename(self.folder / name)

    def _full_bytes(self) -> int:
        counter = _Counter()
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        torch.save(state, counter)  # type: ignore[arg-type]
        return counter.bytes


class _Counter:
    """A file that only counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Do nothing, as no bytes are buffered."""


def write_atomic(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)
