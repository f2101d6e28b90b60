"""One rank saves a replica, and all ranks choose the same one. Replicas that differ are found and named."""

from __future__ import annotations

import torch
from deltashard.state.replica import MAX_OWNERS, differing_replicas, owners, sums
from hypothesis import given
from hypothesis import strategies as st


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), max_size=40),
    world_size=st.integers(1, 20),
)
def test_replica_owners_are_balanced(sizes: dict[str, int], world_size: int) -> None:
    found = owners(sizes, world_size)
    assert found == owners(dict(reversed(sizes.items())), world_size)
    assert found.keys() == sizes.keys()
    load = [0] * min(world_size, MAX_OWNERS)
    for name, rank in found.items():
        load[rank] += sizes[name]
    assert max(load) - min(load) <= max(sizes.values(), default=0)


def test_one_changed_value_of_a_small_tensor_is_detected() -> None:
    zero = {"a": torch.arange(6.0), "b": torch.ones(3, 2, dtype=torch.bfloat16), "empty": torch.empty(0)}
    other = {name: tensor.clone() for name, tensor in zero.items()}
    assert differing_replicas(zero, {0: sums(zero, 7), 1: sums(other, 7)}) == []
    other["b"][2, 1] = 2
    assert differing_replicas(zero, {0: sums(zero, 7), 1: sums(other, 7), 2: sums(zero, 7)}) == [
        "b on rank 1"
    ]
    by_rank = {0: sums(zero, 7)} | {rank: sums(other, 7) for rank in range(1, 7)}
    assert differing_replicas(zero, by_rank) == ["b on ranks 1, 2, 3, 4 and more"]
