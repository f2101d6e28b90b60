"""Scenarios for `rank_zygote`: TorchRec's tables over several ranks; one is killed, under `recovery="partial"`."""

from __future__ import annotations

import json
import logging
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deltashard.checkpointer import Checkpointer
from deltashard.errors import DeltashardError
from deltashard.tracking.tracking import TrackingSettings
from torch.utils.data import DataLoader

from tests.support.trainer.sharded_case import ShardedTraining, batch

PLANNED = 1000
EPOCH = 7
"""Length in batches."""


def checkpointer(workdir: Path, training: ShardedTraining, **options: Any) -> Checkpointer:
    """Return a Checkpointer with partial recovery unless `options` override it."""
    return Checkpointer(
        training.model,
        [training.dense],
        state={"own": own} if (own := options.pop("own", None)) is not None else None,
        url=workdir / "store",
        run="partial",
        encoding="fp32",
        tracking=TrackingSettings(hash_below_bytes=0),
        **{"recovery": "partial", "pls_target": 0.5, "planned_steps": PLANNED} | options,
    )


def held(ckpt: Checkpointer, training: ShardedTraining) -> dict[str, np.ndarray]:
    found = {
        f"dense|{n}": p.detach().numpy().copy() for n, p in training.model.named_parameters() if "over" in n
    }
    for table in ckpt._program.tracking.tables:
        for name, tensor in {"weights": table.param.detach(), **table.state_tensors()}.items():
            found[f"{table.key}|{name}"] = tensor.numpy().copy()
    for index, state in enumerate(training.dense.state.values()):
        found |= {f"dense|{index}|{name}": value.numpy().copy() for name, value in state.items()}
    return found


def train(
    rank: int,
    workdir: Path,
    until: str,
    save_at: str = "0",
    kill_at: str = "0",
    kill: str = "",
    which: str = "'latest'",
    **options: str,
) -> Any:
    """Resume and train to the end, with an optional save, and optionally kill ranks `kill` at a step.

    Each rank writes its state after restore() to `begun-{rank}.npz`, and after its last step to `held-{rank}.npz`.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with devices recovery is full
    print("training starts", flush=True)
    logging.basicConfig(force=True)
    logging.getLogger("deltashard").setLevel(logging.INFO)
    training = ShardedTraining("row_wise", "rowwise")
    torch.manual_seed(77 + rank)
    own = {"drawn": 0.0}
    terms: dict[str, Any] = {name: eval(value) for name, value in options.items()}
    ckpt = checkpointer(workdir, training, own=own, **terms)
    loader = ckpt.wrap(DataLoader(list(range(EPOCH)), batch_size=1, shuffle=True))
    result: dict[str, Any] = {}
    try:
        with ckpt:
            restored = ckpt.restore(which=eval(which))
            np.savez(workdir / f"begun-{rank}.npz", **held(ckpt, training))
            result |= {"step": ckpt.steps, "loader": [loader.epoch, loader.delivered], "state": dict(own)}
            if restored is not None:
                fields = ("pls", "mode", "exact", "rank_steps", "notes", "seq")
                result |= {name: getattr(restored, name) for name in fields}
            while ckpt.steps < int(until):
                for _ in loader:
                    training.train(batch(ckpt.steps, rank))
                    own["drawn"] = torch.rand(1).item()
                    ckpt.step()
                    if ckpt.steps == int(save_at):
                        ckpt.save().wait(100)
                        np.savez(workdir / f"saved-{rank}.npz", **held(ckpt, training))
                    if ckpt.steps == int(kill_at):
                        np.savez(workdir / f"held-{rank}.npz", **held(ckpt, training))
                        result["held"] = dict(own)
                        if str(rank) in kill.split(","):
                            os.kill(os.getpid(), signal.SIGKILL)
                    if ckpt.steps >= int(until):
                        break
    except (RuntimeError, DeltashardError) as error:
        # The group is broken: the harness must not wait for it.
        traceback.print_exc()
        result["error"] = type(error).__name__
        (workdir / "out" / f"{rank}.json").write_text(json.dumps(result))
        os._exit(0)
    np.savez(workdir / f"ended-{rank}.npz", **held(ckpt, training))
    return result
