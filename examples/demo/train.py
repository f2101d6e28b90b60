"""The demo's training script, as a user would write it: run it alone, and kill it at any time.

    python examples/demo/train.py --url file:///tmp/store --run baskets      checkpoints; resumes when run again
    python examples/demo/train.py --plain                                    the same training without deltashard

The lines that deltashard needs end in "# <-". In a pod (DELTASHARD_SOCKET is set) --url and --run are omitted:
the sidecar has them. `DemoRecorder` is for the demo's report and its checks, not for the training.
"""

from __future__ import annotations

import argparse
import contextlib
import logging

import baskets
import deltashard
import torch
from deltashard.optim import RowWiseAdagrad
from evidence import DemoRecorder
from model import BasketModel, auc, loss_of

BATCH_SIZE = 128
SEED = 20260101


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="object store, e.g. file:///tmp/store or s3://bucket/prefix")
    parser.add_argument("--run", help="name of the training run")
    parser.add_argument("--every-s", type=float, help="seconds between checkpoints")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--plain", action="store_true", help="train without deltashard")
    parser.add_argument("--evidence", help="folder for the demo's records")
    return parser.parse_args()


def main() -> None:
    """Train for `--steps` steps, from the last checkpoint on."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    retail = baskets.load()
    held_out = baskets.held_out_batches(retail, batch_size=2048, seed=SEED)
    torch.manual_seed(SEED)
    model = BasketModel(retail.item_count)
    for_tables = RowWiseAdagrad(model.tables(), lr=0.05)
    for_dense = torch.optim.Adam(model.dense(), lr=1e-3)
    loader = baskets.training_loader(retail, batch_size=BATCH_SIZE, seed=SEED)
    evidence = DemoRecorder(args.evidence, model, [for_tables, for_dense])

    ckpt, step = None, 0
    if not args.plain:
        ckpt = deltashard.Checkpointer(
            model, [for_tables, for_dense], url=args.url, run=args.run, every_s=args.every_s
        )  # <-
        resumed = ckpt.restore()  # <-
        step = resumed.step if resumed else 0
        loader = ckpt.wrap(loader)  # <-
        evidence.restored(resumed)

    with ckpt or contextlib.nullcontext():  # <-
        while step < args.steps:
            for batch in loader:
                loss = loss_of(model(batch))
                for_tables.zero_grad()
                for_dense.zero_grad()
                loss.backward()
                for_tables.step()
                for_dense.step()
                step += 1
                with evidence.record_step(step, loss.item(), batch, ckpt):
                    if ckpt:
                        ckpt.step()  # <- the last statement of the loop body
                if step == args.steps:
                    break
    evidence.finished(step, auc(model, held_out))


if __name__ == "__main__":
    main()
