"""Unsharded managed collisions of TorchRec: a restore returns the history that they collect between evictions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from deltashard.errors import CheckpointMismatch
from deltashard.state.managed_collision import histories
from deltashard.state.value import decode_value, encode_value
from torch import nn


def torchrec(module: str) -> Any:
    """Import TorchRec when a test runs, because the import takes seconds in each process that collects tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"torchrec.{module}")


def module(policy: str = "DistanceLFU_EvictionPolicy") -> Any:
    mc_modules = torchrec("modules.mc_modules")
    return mc_modules.MCHManagedCollisionModule(
        zch_size=60,
        device=torch.device("cpu"),
        input_hash_size=1 << 40,
        eviction_interval=4,
        eviction_policy=getattr(mc_modules, policy)(),
    )


def look_up(managed: Any, step: int) -> torch.Tensor:
    ids = torch.randint(step * 9, step * 9 + 90, (30,), generator=torch.Generator().manual_seed(step))
    jagged = torchrec("sparse.jagged_tensor").JaggedTensor(ids, lengths=torch.ones(30, dtype=torch.int32))
    found = managed({"f": jagged})
    return found["f"].values().clone()


@pytest.mark.parametrize("at", range(7))
def test_remapping_continues_after_a_restore(at: int) -> None:
    """Snapshots are before the first lookup, between two evictions and right after one.

    A restore of `state_dict` alone would evict at other steps.
    """
    lost, whole = module(), module()
    wanted = [look_up(whole, step) for step in range(14)]
    for step in range(at):
        look_up(lost, step)
    (source,) = histories(nn.Sequential(lost))
    held = decode_value(encode_value(source.get()).to_bytes())
    resumed = module()
    resumed.load_state_dict(lost.state_dict())
    (target,) = histories(nn.Sequential(resumed))
    assert source.name == target.name == "collisions:0"
    target.set(held)
    found = [look_up(resumed, step) for step in range(at, 14)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted[at:], strict=True))
    a, b = resumed.evict(), whole.evict()
    assert torch.equal(a, b)


def test_another_eviction_policy_is_refused() -> None:
    """Another policy keeps another history."""
    lost = module()
    look_up(lost, 0)
    (source,) = histories(nn.Sequential(lost))
    (target,) = histories(nn.Sequential(module("LFU_EvictionPolicy")))
    with pytest.raises(CheckpointMismatch, match="eviction policy"):
        target.set(source.get())
