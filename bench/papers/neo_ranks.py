"""Ranks of TorchRec that train and save in one sharding, and restore in others: `neo_ranks.py FOLDER STAGES`.

STAGES is JSON: lists of [what, name, sharding, world, source], `what` being "save" (train three steps, save after the
second and after the third, so that a restore reads a baseline and an increment) or "restore" (run `source` into a model
with other rows). Then every rank writes the content of its shards to FOLDER/NAME-RANK.npz. One process imports
TorchRec and forks the ranks of each stage, as torchrun would start them; it exits with 0 only if all ranks did.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = 32
BAGS = {"t_users": 4001, "t_items": 1003, "t_shops": 96}
BATCH, IDS = 64, 5
TIMEOUT_S = 120


def main() -> int:
    folder, stages = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    for heavy in (
        "torch._dynamo",
        "torchrec.distributed.planner",
    ):  # importing takes seconds, which each rank would spend
        importlib.import_module(heavy)

    for number, (what, name, sharding, world, source) in enumerate(stages):
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    _rank(folder, number, what, name, sharding, rank, world, source)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            print(f"{what} {name} as {sharding} on {world} ranks ended with {codes}", file=sys.stderr)
            return 1
    return 0


def _rank(
    folder: Path, number: int, what: str, name: str, sharding: str, rank: int, world: int, source: str
) -> None:
    import torch
    import torch.distributed as dist
    from deltashard import Checkpointer

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'group-{number}'}", rank=rank, world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    torch.manual_seed(1000 * number + rank)
    model, dense = _model(sharding, world)
    ckpt = Checkpointer(model, dense, url=folder / "store", run=name, encoding="fp32", grace_s=None)
    if what == "save":
        ckpt.restore()
        for step in range(3):
            dense.zero_grad()
            model(_batch(step, rank)).backward()
            dense.step()
            ckpt.step()
            if step:
                ckpt.save().wait(TIMEOUT_S)
    else:
        restored = ckpt.restore(from_run=source)
        assert restored is not None
        assert restored.step == 3, restored
    np.savez(folder / f"{name}-{rank}.npz", **_shards(ckpt))
    ckpt.close()
    dist.barrier()
    dist.destroy_process_group()


def _model(sharding: str, world: int) -> tuple[Any, Any]:
    """Build three bags and a linear layer, all tables in one sharding, with fused exact row-wise Adagrad."""
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingType
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    class NeoSharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
            return [kind.value for kind in ShardingType]

    class BagModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name, embedding_dim=COLUMNS, num_embeddings=rows, feature_names=[f"f_{name}"]
                    )
                    for name, rows in BAGS.items()
                ],
                device=torch.device("meta"),
            )
            self.over = nn.Linear(len(BAGS) * COLUMNS, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            return (self.over(self.bags(batch).values()) - 1).square().mean()

    model = BagModel()
    sharders: Any = [
        NeoSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={
            name: ParameterConstraints(sharding_types=[sharding], min_partition=COLUMNS // 2) for name in BAGS
        },
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    named = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, torch.optim.Adam(named.values(), lr=0.01)


def _batch(step: int, rank: int) -> Any:
    import torch
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(100 * step + rank)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f_{name}" for name in BAGS],
        values=torch.cat([torch.randint(rows, (BATCH * IDS,), generator=rng) for rows in BAGS.values()]),
        lengths=torch.full((BATCH * len(BAGS),), IDS, dtype=torch.int32),
    )


def _shards(ckpt: Any) -> dict[str, np.ndarray]:
    """Return `table|first row:last|first column:last|section` -> values of every shard that this rank saves."""
    found = {}
    for shard in ckpt._program.tracking.saved:  # noqa: SLF001 - the library has no public accessor for its shards
        box = shard.box
        place = f"{box.table}|{box.row_start}:{box.row_stop}|{box.col_start}:{box.col_stop}"
        for name, tensor in {"weights": shard.param.detach(), **shard.state_tensors()}.items():
            found[f"{place}|{name}"] = tensor.numpy().copy()
    return found


if __name__ == "__main__":
    sys.exit(main())
