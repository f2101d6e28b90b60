"""SHA-256 sums of a rank's current content, its last recorded content, and a checkpoint's content at the same place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Content = dict[str, Any]
"""The content of one rank: {"shards": [{"table", "rows", "weights", "state"}, ...], "dense": {name: hash}}."""

Kept = dict[str, Any]
"""A rank's last recorded content (`held.py`): a `Content` with the last "step" that it finished, and each shard
with the "step" that updated it last: for a survivor this can be the next, unfinished step."""
_AT_ONCE = 4 << 20
"""Bytes per chunk: the hash blocks Python, and a waiting process must not take a long pause for a failure."""


def sha256(values: Tensor) -> str:
    data = memoryview(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    found = hashlib.sha256()
    for at in range(0, len(data), _AT_ONCE):
        found.update(data[at : at + _AT_ONCE])
    return found.hexdigest()


def dense_of(parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return hashes of dense parameters, and of their optimizer's state as `name:key`."""
    found = {name: sha256(value) for name, value in parameters.items()}
    for name in parameters:
        found |= {
            f"{name}:{key}": sha256(torch.as_tensor(value)) for key, value in state.get(name, {}).items()
        }
    return found


def short(table: str) -> str:
    return table.removesuffix(".weight").rsplit(".", maxsplit=1)[-1]
