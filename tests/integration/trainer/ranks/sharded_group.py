"""Scenarios for `rank_zygote`: TorchRec's sharded tables over several ranks, saved in one sharding and read in all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deltashard.checkpointer import Checkpointer
from deltashard.tracking.tracking import TrackingSettings

from tests.support.trainer.sharded_case import ShardedTraining, batch


def _training(sharding: str, optimizer: str) -> ShardedTraining:
    """With fused Adagrad the dense optimizer uses the same rule, so that a table may leave its kernel."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # torchrun's value on hosts of two ranks
    dense = torch.optim.Adagrad if optimizer == "adagrad" else torch.optim.Adam
    return ShardedTraining(sharding, optimizer, dense=dense)


def _checkpointer(workdir: Path, training: ShardedTraining, run: str, encoding: str = "fp32") -> Checkpointer:
    settings = TrackingSettings(hash_below_bytes=0)
    options = {"run": run, "encoding": encoding, "grace_s": None, "tracking": settings}
    return Checkpointer(training.model, [training.dense], url=workdir / "store", **options)


def _shards(ckpt: Checkpointer) -> dict[str, np.ndarray]:
    """Return `table|rows|columns|section` -> values for every shard that this rank saves."""
    found = {}
    for table in ckpt._program.tracking.saved:
        box = table.box
        place = f"{box.table}|{box.row_start}:{box.row_stop}|{box.col_start}:{box.col_stop}"
        for name, tensor in {"weights": table.param.detach(), **table.state_tensors()}.items():
            found[f"{place}|{name}"] = tensor.numpy().copy()
    return found


def save(rank: int, workdir: Path, sharding: str, optimizer: str, encoding: str, run: str) -> Any:
    """Train, save all rows, train further, save the changes, and write this rank's shards."""
    training = _training(sharding, optimizer)
    ckpt = _checkpointer(workdir, training, run, encoding)
    ckpt.restore()
    for step in range(5):
        training.train(batch(step, rank))
        ckpt.step()
        if step == 2:
            ckpt.save().wait(100)
    ckpt.close()
    np.savez(workdir / f"{run}-{rank}.npz", **_shards(ckpt))
    return {
        "commits": ckpt.stats.commits,
        "trackers": sorted({t.tracker for t in ckpt._program.tracking.saved}),
    }


def read(rank: int, workdir: Path, socket: str, runs: str, shardings: str, optimizer: str) -> Any:
    """Restore each run into each sharding and compare every cell with the expected value."""
    os.environ["DELTASHARD_SOCKET"] = socket
    compared = 0
    for sharding in shardings.split(","):
        for run in runs.split(","):
            expected = np.load(workdir / f"expected-{run}.npz")
            training = _training(sharding, optimizer)
            ckpt = _checkpointer(workdir, training, "target")
            restored = ckpt.restore(from_run=run)
            assert restored.step == 5
            for place, found in _shards(ckpt).items():
                table, rows, columns, section = place.split("|")
                (a, b), (c, d) = (map(int, each.split(":")) for each in (rows, columns))
                whole = expected.get(f"{table}|{section}")
                wanted = (
                    _by_row(expected, f"{table}|{section}", a, b, c, d) if whole is None else whole[a:b, c:d]
                )
                np.testing.assert_array_equal(
                    found.reshape(wanted.shape), wanted, f"{run} as {sharding}: {place}"
                )
                compared += 1
            ckpt.close()
    return {"compared": compared}


def _by_row(expected: Any, name: str, a: int, b: int, c: int, d: int) -> np.ndarray:
    """Return one value for each row of rows [a, b) and columns [c, d), averaged over the shards by their columns.

    m = sum over shards of (columns in common / all) m_s, and m_s itself where all shards have the same value.
    """
    total, least, most = np.zeros(b - a), np.full(b - a, np.inf), np.full(b - a, -np.inf)
    for key, values in expected.items():
        if not key.startswith(f"{name}|"):
            continue
        (r, s), (e, f) = (map(int, each.split(":")) for each in key.split("|")[2:])
        rows, columns = range(max(a, r), min(b, s)), min(d, f) - max(c, e)
        if len(rows) == 0 or columns <= 0:
            continue
        here, flat = (
            slice(rows[0] - a, rows[-1] + 1 - a),
            values[rows[0] - r : rows[-1] + 1 - r].astype(np.float64),
        )
        total[here] += flat * (columns / (d - c))
        least[here], most[here] = np.minimum(least[here], flat), np.maximum(most[here], flat)
    return np.where(least == most, most, total).astype(np.float32)
