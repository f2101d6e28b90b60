"""The trainer of the Kubernetes examples: a small recommendation model on real shopping baskets, run as a container.

The script contains nothing about Kubernetes. Injection sets `DELTASHARD_SOCKET`, the socket of the pod's sidecar, which
has the store, the run and the interval. Without that variable, for example on a laptop, pass `--url` and `--run`. After
any end of the process, the next one continues from the newest checkpoint and logs its step. The lines that deltashard
needs end in "# <-".

The exit code is for the Job: 0 at the end of training; 143 after a SIGTERM, when the last save is durable (0 would
complete the Job); 79 when another workload trains this run, so that a retry cannot help; 1 for all other errors.
"""

from __future__ import annotations

import argparse
import logging
import time

import baskets
import deltashard
import torch
from deltashard.optim import RowWiseAdagrad
from model import BasketModel, auc, loss_of

BATCH_SIZE = 64
SEED = 20260101
log = logging.getLogger("train")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--pace-s", type=float, default=0.0, help="idle time after each step, as if it were larger"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch: the container's CPUs")
    parser.add_argument("--log-every", type=int, default=100, help="steps between two lines of the log")
    parser.add_argument("--url", help="object store, where there is no sidecar of the pod")
    parser.add_argument("--run", help="name of the run, where there is no sidecar of the pod")
    return parser.parse_args()


def log_start(resumed: deltashard.Restored | None) -> int:
    """Log where training begins; returns the step."""
    if resumed is None:
        log.info("begins at step 0: the run has no checkpoint yet")
        return 0
    lost = "" if resumed.lost_steps is None else f"; {resumed.lost_steps} steps are trained again"
    log.info("restored step %d from the %s in %.1f s%s", resumed.step, resumed.source, resumed.seconds, lost)
    for note in resumed.notes:
        log.warning("restored, but: %s", note)
    return resumed.step


def main() -> None:
    """Train for `--steps` steps, from the last checkpoint on."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(args.threads)
    retail = baskets.load()
    torch.manual_seed(SEED)
    model = BasketModel(retail.item_count)
    for_tables = RowWiseAdagrad(model.tables(), lr=0.05)
    for_dense = torch.optim.Adam(model.dense(), lr=1e-3)
    loader = baskets.training_loader(retail, batch_size=BATCH_SIZE, seed=SEED)

    ckpt = deltashard.Checkpointer(model, [for_tables, for_dense], url=args.url, run=args.run)  # <-
    with ckpt:  # <- at its end the last step is durable, or this raises
        step = log_start(ckpt.restore())  # <-
        loader = ckpt.wrap(loader)  # <-
        while step < args.steps:
            for batch in loader:
                loss = loss_of(model(batch))
                for_tables.zero_grad()
                for_dense.zero_grad()
                loss.backward()
                for_tables.step()
                for_dense.step()
                step += 1
                if step % args.log_every == 0:
                    log.info("step %d, loss %.3f", step, loss.item())
                time.sleep(args.pace_s)
                ckpt.step()  # <- the last statement of the loop body
                if step >= args.steps:
                    break
    score = auc(model, baskets.held_out_batches(retail, batch_size=2048, seed=SEED))
    log.info("done: step %d, AUC %.3f on baskets it has not seen", step, score)


if __name__ == "__main__":
    main()
