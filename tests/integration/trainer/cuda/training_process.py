"""One process of a training on a device: `training_process.py OPTIONS` as JSON. It trains and exits at a given step.

It prints a line of JSON for the restore, for every snapshot and for the end: the step, and a digest of everything that
a resumed run needs (every parameter and optimizer state, the generators, and the next random draws).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch for determinism

import deltashard
import torch
from deltashard.optim import RowWiseAdagrad
from torch import nn

from tests.support.trainer.verdict import bits

ROWS, COLUMNS, BATCH = 20_000, 32, 64


class GradientNet(nn.Module):
    """Sparse and dense gradients of embeddings and bags, and a dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.Embedding(ROWS, COLUMNS, sparse=True),
                nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True),
                nn.EmbeddingBag(ROWS // 2, COLUMNS, mode="mean", sparse=True),
                nn.Embedding(ROWS, COLUMNS),
                nn.EmbeddingBag(ROWS // 4, COLUMNS, mode="sum"),
                nn.Embedding(500, COLUMNS, sparse=True),
            ]
        )
        self.top = nn.Sequential(nn.Linear(COLUMNS, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [table(ids % table.num_embeddings) for table in self.tables]
        pooled = [each.sum(1) if each.dim() == 3 else each for each in found]
        device = next(self.top.parameters()).device
        return self.top(sum(each.to(device) for each in pooled))


def optimizers_of(net: GradientNet) -> list[torch.optim.Optimizer]:
    tables = [table.weight for table in net.tables]
    return [
        RowWiseAdagrad([tables[0]], lr=0.05),
        torch.optim.Adagrad([tables[1], tables[5]], lr=0.05),
        torch.optim.SparseAdam([tables[2]], lr=0.01),
        torch.optim.SGD([tables[3]], lr=0.05),
        torch.optim.Adagrad([tables[4]], lr=0.05),
        torch.optim.Adam(net.top.parameters(), lr=1e-3),
    ]


def digest(net: GradientNet, optimizers: list[torch.optim.Optimizer], generator: torch.Generator) -> str:
    """Return a digest of the complete state without drawing random numbers."""
    drawn = [generator.get_state(), torch.get_rng_state()]
    if generator.device.type == "cuda":
        drawn.append(torch.cuda.get_rng_state())
    held = [net.state_dict(), [optimizer.state_dict()["state"] for optimizer in optimizers], drawn]
    return hashlib.sha256(repr(sorted(bits("", held).items())).encode()).hexdigest()


def main(url: str, *, device: str, steps: int, kill_at: int | None = None, strict: bool = True) -> None:
    """Train from the newest checkpoint to `steps`, or until the process kills itself at the end of step `kill_at`."""
    warnings.simplefilter("ignore", UserWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    net = GradientNet().to(device)
    optimizers = optimizers_of(net)
    generator = torch.Generator(device).manual_seed(7)

    def report(what: str, **facts: Any) -> None:
        print(json.dumps({"what": what, **facts}), flush=True)

    def event(name: str, facts: Any) -> None:
        if name == "snapshot":
            report("snapshot", step=facts["step"], digest=digest(net, optimizers, generator))

    state = {"generator": generator} if strict else {}
    options = {"run": "r", "encoding": "fp32", "every_steps": 8, "arena_bytes": 128 << 20, "on_event": event}
    ckpt = deltashard.Checkpointer(net, optimizers, state=state, url=url, **options)
    ckpt.restore(strict=strict)
    report("restored", step=ckpt.steps, digest=digest(net, optimizers, generator))
    while ckpt.steps < steps:
        # Skewed like real lookups.
        ids = (torch.rand((BATCH, 4), device=device, generator=generator) ** 3 * ROWS).long()
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(ids).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        ckpt.step()
        if ckpt.steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    tables = ckpt._program.tracking.tables
    report(
        "end",
        step=ckpt.steps,
        digest=digest(net, optimizers, generator),
        trackers={table.fqn: (table.tracker, table.reason) for table in tables},
        ahead=ckpt.stats.precopy.precopied_rows,
        failures=dict(ckpt.stats.failures),
        faults=ckpt._program.tracking.faults,
    )
    ckpt.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
