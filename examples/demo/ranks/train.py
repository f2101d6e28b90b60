"""The training script of the demo of several ranks, as a user would write it: start it with as many ranks as you like.

    export DELTASHARD_URL=file:///tmp/store DELTASHARD_RUN=baskets
    torchrun --standalone --nproc_per_node 4 --max-restarts 3 examples/demo/ranks/train.py

Kill a rank, and torchrun starts all of them again; end it, start it with another number of ranks, and training
continues. The lines that deltashard needs end in "# <-". `ShardRecorder` is for the demo's report and its checks.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import baskets
import deltashard
import sharded_model
import torch
import torch.distributed as dist
from model import auc, loss_of
from shard_evidence import ShardRecorder
from shares import StepBatches, share

SEED = 20260101
PEER_S = 60
"""A rank that others wait for longer is lost; torchrun restarts all of them."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-steps", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plain", action="store_true", help="train without deltashard")
    parser.add_argument(
        "--pls-target",
        type=float,
        help="survivors of a lost rank keep their rows, up to this portion of lost samples; without: all ranks restore",
    )
    parser.add_argument("--evidence", help="folder for the demo's records")
    return parser.parse_args()


def main() -> None:
    """Train for `--steps` steps, from the last checkpoint on."""
    args = arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=PEER_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s rank {rank} %(message)s", force=True)
    logging.getLogger("deltashard").setLevel(logging.INFO)
    retail = baskets.load()
    batches = StepBatches(retail, seed=SEED)
    torch.manual_seed(SEED + rank)  # each rank draws its own rows; the dense half is rank 0's
    model = sharded_model.build(retail.item_count)
    optimizer = sharded_model.optimizer_of(model)
    torch.manual_seed(SEED + rank)  # from here on each rank has its own dropout
    evidence = ShardRecorder(args.evidence, model, optimizer)

    ckpt, step = None, 0
    if not args.plain:
        ckpt = deltashard.Checkpointer(
            model,
            optimizer,
            every_steps=args.every_steps,
            encoding="fp32",  # so that a repeated step has the same loss, bit for bit
            keep_last=1000,
            recovery="full" if args.pls_target is None else "partial",
            pls_target=args.pls_target,
            planned_steps=None if args.pls_target is None else args.steps,
        )  # <-
        resumed = ckpt.restore()  # <-
        step = resumed.step if resumed else 0
        evidence.restored(resumed, partial=args.pls_target is not None)

    with ckpt or contextlib.nullcontext():  # <-
        for batch in islice(batches.after(step), args.steps - step):
            loss = loss_of(model(share(batch, rank, world)))
            mean = evidence.mean(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            with evidence.record_step(step, mean, batch, ckpt):
                if ckpt:
                    ckpt.step()  # <- the last statement of the loop body
    held_out = baskets.held_out_batches(retail, batch_size=2048, seed=SEED)
    evidence.finished(step, auc(model, held_out), ckpt)  # a sharded model's lookups involve every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
