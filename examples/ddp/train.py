"""A model with an embedding table under DistributedDataParallel, on the ranks of torchrun, with checkpoints.

    export DELTASHARD_URL=file:///tmp/store DELTASHARD_RUN=baskets
    torchrun --standalone --nproc_per_node 2 --max-restarts 3 examples/ddp/train.py

Kill a rank: torchrun starts all of them again, and they continue from the newest checkpoint. The lines that deltashard
needs end in "# <-".
"""

from __future__ import annotations

import argparse
import logging

import deltashard
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS, COLUMNS, ITEMS = 20_000, 16, 8


class Model(nn.Module):
    """Bags of items under two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ROWS, COLUMNS, mode="mean")
        self.top = nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Map [n, ITEMS] item numbers to [n, 1]."""
        out: torch.Tensor = self.top(self.items(items))
        return out


def data() -> TensorDataset:
    """Return baskets, and how many of their items are among the first hundred."""
    generator = torch.Generator().manual_seed(11)
    items = (torch.rand(8192, ITEMS, generator=generator) ** 4 * ROWS).long()
    return TensorDataset(items, (items < 100).float().mean(1, keepdim=True))


def main() -> None:
    """Train for `--steps` steps, from the last checkpoint on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between checkpoints")
    parser.add_argument("--encoding", help="of the rows: fp32 to resume bit for bit; q8 is the default")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank} %(message)s")
    logging.getLogger("deltashard").setLevel(logging.INFO)
    torch.manual_seed(20260101)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    baskets = data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(baskets, seed=5)
    loader = DataLoader(baskets, batch_size=32, sampler=sampler, drop_last=True)

    ckpt = deltashard.Checkpointer(model, optimizer, every_s=args.every_s, encoding=args.encoding)  # <-
    resumed = ckpt.restore()  # <- on every rank
    loader = ckpt.wrap(loader)  # <-
    print(f"rank {rank} begins at step {resumed.step if resumed else 0}", flush=True)
    with ckpt:  # <-
        while ckpt.steps < args.steps:
            sampler.set_epoch(loader.epoch)
            for items, share in loader:
                loss = nn.functional.mse_loss(model(items), share)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"rank {rank} step {ckpt.steps + 1} loss {loss.item()!r}", flush=True)
                ckpt.step()  # <- the last statement of the loop body
                if ckpt.steps == args.steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
