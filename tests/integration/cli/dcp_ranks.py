"""Scenarios for `rank_zygote`: ranks save or load sharded state dicts with plain torch.distributed.checkpoint.

`WORKDIR/whole.pt` holds a dict of unsharded tensors. `save` shards them in each supported way into
`WORKDIR/saved-KIND`. `load` reads `WORKDIR/exported` into shards of other sizes and compares them.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

KINDS = ("rows", "columns", "sharded", "plain", "replicated")


def sharded(whole, kind, mesh, *, empty):
    values = torch.zeros_like(whole) if empty else whole
    if kind == "plain":
        return values.clone()
    if kind == "sharded":  # uneven: rank 0 has one row, and the last rank has the rest
        rank, world = dist.get_rank(), dist.get_world_size()
        stop = len(whole) if rank == world - 1 else rank + 1
        offsets = [rank, *([0] * (whole.dim() - 1))]
        local = LocalShard.from_tensor_and_offsets(values[rank:stop].clone(), offsets, rank)
        return init_from_local_shards([local], *whole.shape)
    placement = {"rows": Shard(0), "columns": Shard(whole.dim() - 1), "replicated": Replicate()}[kind]
    return distribute_tensor(values, mesh, [placement])


def same(whole, part):
    """Return whether the rank's part equals the unsharded tensor bit for bit."""
    if isinstance(part, ShardedTensor):
        (local,) = part.local_shards()
        start = local.metadata.shard_offsets[0]
        return torch.equal(local.tensor, whole[start : start + len(local.tensor)])
    return torch.equal(part.full_tensor() if isinstance(part, DTensor) else part, whole)


def save(_rank: int, workdir: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.load(workdir / "whole.pt", weights_only=True)
    for kind in KINDS:
        held = {name: sharded(each, kind, mesh, empty=False) for name, each in whole.items()}
        dcp.save({"model": held, "step": 3}, checkpoint_id=workdir / f"saved-{kind}")


def load(_rank: int, workdir: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.load(workdir / "whole.pt", weights_only=True)
    for kind in KINDS:
        held = {name: sharded(each, kind, mesh, empty=True) for name, each in whole.items()}
        dcp.load(held, checkpoint_id=workdir / "exported")
        for name, each in whole.items():
            assert same(each, held[name]), (kind, name)
