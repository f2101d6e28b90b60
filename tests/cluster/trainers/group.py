"""The training script of several ranks in several pods, as for torchrun. It also sends events to the test.

It trains tables of TorchRec, sharded by rows over the ranks; its loader yields every sample once per epoch, for any
number of ranks. Every rank reports after each step, without deltashard, the sums over its rows: the sums of all ranks
together describe the same tables in any sharding.

Under partial recovery it saves at named steps, ranks wait before named steps (until the test kills them), and one
rank is slower than the others.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from functools import partial
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

import deltashard
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from event_client import EventClient  # type: ignore[import-not-found]  # next to this script, in the image
from torch.utils.data import DataLoader

STEPS = int(os.environ["STEPS"])
PACE_S = float(os.environ.get("PACE_S", "0"))
"""Simulates the accelerators' work of one step."""
PLANNED_STEPS = int(os.environ.get("PLANNED_STEPS", "0"))
"""Planned steps of a training with partial recovery; 0: all ranks return to the checkpoint."""
SAVE_AT = [int(step) for step in os.environ.get("SAVE_AT", "").split()]
PAUSE_AT = {
    int(step): int(rank)
    for step, _, rank in (each.partition(":") for each in os.environ.get("PAUSE_AT", "").split())
}
"""Step -> the rank that waits without end before its `ckpt.step()`; all other ranks have called theirs."""
TABLES = {"user": 3000, "item": 1700}
"""Feature and table -> rows."""
COLUMNS, SAMPLES, BATCH = 16, 6000, 8


class GroupModel(torch.nn.Module):
    """Two tables and a small top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=COLUMNS, num_embeddings=rows, feature_names=[name]
                )
                for name, rows in TABLES.items()
            ],
            device=torch.device("meta"),
        )
        self.top = torch.nn.Linear(COLUMNS * len(TABLES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.top(self.tables(features).values()).squeeze(1)
        return logits


class RowSharder(EmbeddingBagCollectionSharder):
    """A sharder by rows that also accepts CPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def features_of(samples: list[int]) -> KeyedJaggedTensor:
    """Return one value of each feature per sample."""
    ids = torch.tensor(samples)
    values = [(ids * 2_654_435_761 + number) % rows for number, rows in enumerate(TABLES.values())]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(TABLES),
        values=torch.cat(values),
        lengths=torch.ones(len(samples) * len(TABLES), dtype=torch.int32),
    )


def sums(ckpt: deltashard.Checkpointer) -> dict[str, int]:
    """Return for each table and section a sum modulo 2^64 over this rank's rows, of row number and bits."""
    found: dict[str, int] = {}
    for shard in ckpt._program.tracking.saved:
        box = shard.box
        for name, tensor in {"weights": shard.param.detach(), **shard.state_tensors()}.items():
            bits = tensor.numpy().reshape(box.row_stop - box.row_start, -1).view(np.int32).astype(np.uint64)
            odd = 2 * np.arange(1, bits.shape[1] + 1, dtype=np.uint64) + 1
            rows = np.arange(box.row_start, box.row_stop, dtype=np.uint64)
            mixed = (bits * odd * odd).sum(axis=1, dtype=np.uint64) + rows * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            key = f"{box.table}|{name}"
            total = int((mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))
            found[key] = (found.get(key, 0) + total) % (1 << 64)
    return found


def dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash the replicated parameters and their optimizer's state."""
    hashed = xxhash.xxh3_64()
    for name, value in sorted(model.named_parameters()):
        if "top" in name:
            hashed.update(name.encode() + value.detach().numpy().tobytes())
            state = optimizer.state[value]
            for key in sorted(state):
                hashed.update(key.encode() + torch.as_tensor(state[key]).numpy().tobytes())
    return hashed.hexdigest()


def join() -> None:
    if not PLANNED_STEPS:
        dist.init_process_group("gloo")
        return
    # torchrun assigns ranks by address, and a restarted pod has another one. A survivor keeps its rank.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0"
    )
    rank, world_size = int(os.environ["JOB_COMPLETION_INDEX"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def main() -> None:
    """Train for STEPS steps, from the last checkpoint."""
    torch.set_num_threads(1)
    join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    events = EventClient(rank=rank, world_size=world_size)
    torch.manual_seed(20261126)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    sharders: Any = [RowSharder(fused_params=fused)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu", local_world_size=1)
    )
    model = DistributedModelParallel(
        (whole := GroupModel()),
        device=torch.device("cpu"),
        plan=planner.collective_plan(whole, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    top = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), partial(torch.optim.Adam, lr=1e-3)
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, top])
    sampler = deltashard.ResumableSampler(range(SAMPLES), seed=7, drop_last=True)
    loader: Any = DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler, collate_fn=list)

    terms: dict[str, Any] = {}
    if PLANNED_STEPS:
        terms = {"recovery": "partial", "pls_target": 0.1, "planned_steps": PLANNED_STEPS}
    ckpt = deltashard.Checkpointer(
        model,
        optimizer,
        on_event=lambda name, facts: (
            events.send(name, step=facts["step"], stall_s=facts["stall_s"]) if name == "snapshot" else None
        ),
        **terms,
    )
    resumed = ckpt.restore()
    step = resumed.step if resumed else 0
    loader = ckpt.wrap(loader)
    events.send(
        "began",
        step=step,
        seq=resumed.seq if resumed else None,
        source=resumed.source if resumed else None,
        exact=None if resumed is None else resumed.verified if resumed.mode == "full" else resumed.exact,
        mode=resumed.mode if resumed else None,
        pls=resumed.pls if resumed else 0.0,
        rank_steps=resumed.rank_steps if resumed else [],
        notes=list(resumed.notes) if resumed else [],
        attempt=ckpt.attempt,
        sums=sums(ckpt),
        dense=dense(model, top),
    )
    with ckpt:
        while step < STEPS:
            for samples in loader:
                optimizer.zero_grad()
                wanted = torch.tensor([float(sample % 3 == 0) for sample in samples])
                logits = model(features_of(samples))
                torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()
                optimizer.step()
                step += 1
                events.send(
                    "step", step=step, attempt=ckpt.attempt, samples=samples, epoch=loader.epoch, sums=sums(ckpt),
                    dense=dense(model, top),
                )  # fmt: skip
                if PAUSE_AT.get(step) == rank:
                    events.send("paused", step=step)
                    threading.Event().wait()
                try:
                    ckpt.step()
                except deltashard.FencedError as error:
                    events.send("fenced", step=step, why=str(error))
                    raise
                if step in SAVE_AT:
                    ckpt.save().wait(60)
                if step == STEPS:
                    break
                time.sleep(PACE_S)
    events.send("finished", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
