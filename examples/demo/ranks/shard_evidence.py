"""What each rank leaves for the report of the demo of several ranks: a line a step, and what it held when it mattered.

`rank-<r>/steps-*.jsonl`: as in the demo of one process; the loss is the mean over all ranks, the checksum that of the
whole batch. `rank-<r>/cut-*.json` and `restored-*.json`: of every shard of a table, of its optimizer state, and of each
dense parameter and its state the SHA-256, taken from TorchRec's own view of the living tensors, not by deltashard.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from baskets import Batch
from content import Content, dense_of, sha256
from evidence import StepLog, write_whole
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer


def held(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> Content:
    """All that this rank holds, after a step at least."""
    shards, dense = [], {}
    fused = model.fused_optimizer.state_dict()["state"]
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            dense[name] = value
            continue
        for number, shard in enumerate(value.local_shards()):
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            state = [sha256(each.local_shards()[number].tensor) for each in fused[name].values()]
            shards.append(
                {
                    "table": name,
                    "rows": [first, first + rows],
                    "weights": sha256(shard.tensor),
                    "state": sorted(state),
                }
            )
    return {"shards": shards, "dense": dense_of(dense, optimizer.state_dict()["state"])}


class ShardEvidence:
    """One rank's, written into `folder`; does nothing when that is None."""

    def __init__(
        self, folder: str | None, model: DistributedModelParallel, optimizer: CombinedOptimizer
    ) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._model, self._optimizer = model, optimizer
        self._folder = Path(folder) / f"rank-{self._rank}" if folder else None
        self._attempt: int | None = None
        self._cuts = 0
        if self._folder:
            self._log = StepLog(self._folder)

    def restored(self, resumed: Any) -> None:
        """What this rank holds right after `restore()`, and what that said."""
        if not self._folder or resumed is None:
            return
        self._attempt = resumed.attempt
        said = {
            name: getattr(resumed, name)
            for name in ("step", "seq", "attempt", "source", "lost_steps", "seconds")
        }
        self._say(f"restored-{resumed.attempt}", said | {"world": self._world, "pid": os.getpid()})

    @contextlib.contextmanager
    def watching(self, step: int, loss: Tensor, batch: Batch, ckpt: Any) -> Iterator[None]:
        """Time the body, which is `ckpt.step()`, and write this step's line; if it cut a checkpoint, what was cut.

        `loss` is this rank's, `batch` that of all ranks.
        """
        if not self._folder:
            yield
            return
        of_all = loss.detach().clone()
        dist.all_reduce(of_all)
        before = time.perf_counter()
        yield
        held_s = time.perf_counter() - before
        cut = self._cut(step, ckpt)
        mean = of_all.item() / self._world
        self._log.write(step, mean, held_s=held_s, candidates=batch.candidates, cut=cut)

    def finished(self, step: int, auc: float, ckpt: Any) -> None:
        """The result, which is the same on every rank; `ckpt` is closed, which may have cut."""
        if self._folder:
            self._cut(step, ckpt)
            write_whole(self._folder / "result.json", {"step": step, "auc": auc})
        print(f"step {step}: AUC on held-out baskets {auc:.4f}")

    def _cut(self, step: int, ckpt: Any) -> bool:
        if ckpt is None or ckpt.stats.cuts == self._cuts:
            return False
        self._cuts = ckpt.stats.cuts
        self._say(f"cut-{self._attempt}-{step}", {"step": step})
        return True

    def _say(self, name: str, facts: dict[str, Any]) -> None:
        assert self._folder
        content = held(self._model, self._optimizer)
        write_whole(self._folder / f"{name}.json", facts | {"rank": self._rank, "content": content})
