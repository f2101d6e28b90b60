"""The program of `test_torchrun_partial`: a rank is killed, and the others are in a collective that cannot finish.

Their next run is a scenario for `rank_zygote`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.integration.trainer.ranks.partial_group import checkpointer, held
from tests.support.trainer.sharded_case import ShardedTraining, batch

WORLD, SAVE_AT, KILL_AT, UNTIL, LOST = 3, 3, 6, 9, 1


def train(rank: int, workdir: Path, recovery: str, where: str) -> Any:
    """Train to the end. The first run is interrupted. In `pods` each rank has a separate sidecar and volume."""
    if where == "pods":
        pod = workdir / f"pod-{rank}"
        os.environ["DELTASHARD_SOCKET"] = str(pod / "run" / "sidecar.sock")
        os.environ["DELTASHARD_STAGED_DIR"] = str(pod / "volume")
        os.environ["LOCAL_RANK"] = "0"
    first = not (workdir / f"held-{rank}.npz").exists()
    torch.manual_seed(rank)
    training = ShardedTraining("row_wise", "rowwise")
    terms = {} if recovery == "partial" else {"pls_target": None, "planned_steps": None}
    ckpt = checkpointer(workdir, training, recovery=recovery, **terms)
    restored = ckpt.restore()
    begun = None if restored is None else [ckpt.steps, restored.mode]
    np.savez(workdir / f"begun-{rank}.npz", **held(ckpt, training))
    while ckpt.steps < UNTIL:
        training.train(batch(ckpt.steps, rank))
        ckpt.step()
        if ckpt.steps == SAVE_AT:
            ckpt.save().wait(100)
            np.savez(workdir / f"saved-{rank}.npz", **held(ckpt, training))
        if ckpt.steps == KILL_AT and first:
            np.savez(workdir / f"held-{rank}.npz", **held(ckpt, training))
            dist.barrier()
            if rank == LOST:
                os.kill(os.getpid(), signal.SIGKILL)
            # Not with the dead rank, whose exit gloo would detect: each rank waits for another one that also waits.
            alive = [each for each in range(WORLD) if each != LOST]
            dist.recv(torch.zeros(1), src=alive[(alive.index(rank) + 1) % len(alive)])
    ckpt.close()
    return begun


if __name__ == "__main__":
    logging.basicConfig(format=f"rank {os.environ['RANK']} %(message)s", force=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(int(os.environ["RANK"]), Path(sys.argv[1]), *sys.argv[2:])
