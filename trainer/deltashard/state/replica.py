"""State that is replicated on all ranks: dense tensors, and tables that are not sharded.

One owner saves each replica; every rank computes the owner by the same rule. Data-parallel training should keep
replicas equal. To verify this, a sum over a few of their values, randomly sampled at each snapshot, is compared between
the ranks. Two different tables with one name would be detected at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from deltashard.state.value import array_of

MAX_OWNERS = 8
"""Maximum number of ranks that share the saving of replicas."""
SUM_WIDTH = 8
"""Hexadecimal digits of a sum."""
_SAMPLED = 512
"""Values of a tensor that a sum covers."""
_MAX_SHOWN = 4


def owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank that saves each replica, by name, given sizes in bytes: the largest first, to the least loaded rank."""
    load = [0] * min(world_size, MAX_OWNERS)
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = rank = min(range(len(load)), key=lambda each: (load[each], each))
        load[rank] += sizes[name]
    return found


def sums(replicas: Mapping[str, Tensor], seed: int) -> str:
    """SUM_WIDTH hexadecimal digits per replica, by sorted name; `seed` selects the values, equally on all ranks."""
    found = []
    for name in sorted(replicas):
        flat = replicas[name].detach().reshape(-1)
        if flat.numel() > _SAMPLED:
            drawn = np.random.default_rng([seed, flat.numel()]).integers(0, flat.numel(), _SAMPLED)
            flat = flat[torch.from_numpy(drawn).to(flat.device)]
        values = array_of(flat.cpu().contiguous())
        found.append(xxhash.xxh32_hexdigest(values.tobytes()))
    return "".join(found)


def differing_replicas(names: Collection[str], sums_by_rank: Mapping[int, str]) -> list[str]:
    """Replicas that differ from rank 0's, with their ranks, from the sums by rank."""
    zero = sums_by_rank[0]
    found: dict[str, list[int]] = {}
    for rank in sorted(sums_by_rank):
        for i, name in enumerate(sorted(names)):
            if (
                sums_by_rank[rank][i * SUM_WIDTH : (i + 1) * SUM_WIDTH]
                != zero[i * SUM_WIDTH : (i + 1) * SUM_WIDTH]
            ):
                found.setdefault(name, []).append(rank)
    return [
        f"{name} on rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks, _MAX_SHOWN)}"
        for name, ranks in found.items()
    ]


def format_ranks(ranks: Sequence[int], limit: int) -> str:
    return ", ".join(map(str, ranks[:limit])) + (" and more" if len(ranks) > limit else "")
