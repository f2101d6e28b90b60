"""What is compared: SHA-256 sums, of what a rank holds, or held last, and of what a checkpoint has in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Content = dict[str, Any]
"""What one rank holds: {"shards": [{"table", "rows", "weights", "state"}, ...], "dense": {name: hash}}."""

Kept = dict[str, Any]
"""What a rank held last, as it said itself (`held.py`): a `Content`, with the last "step" that it finished, and each
shard with the "step" that updated it last: of a survivor perhaps the one after, which was never finished."""
_AT_ONCE = 4 << 20
"""Bytes: Python does not run while they are summed, and who waits for it must not take that for the end of it."""


def sha256(values: Tensor) -> str:
    """Of a tensor's bytes, in order."""
    data = memoryview(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    found = hashlib.sha256()
    for at in range(0, len(data), _AT_ONCE):
        found.update(data[at : at + _AT_ONCE])
    return found.hexdigest()


def dense_of(parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Hashes of dense parameters, and of their optimizer's state as `name:key`."""
    found = {name: sha256(value) for name, value in parameters.items()}
    for name in parameters:
        found |= {
            f"{name}:{key}": sha256(torch.as_tensor(value)) for key, value in state.get(name, {}).items()
        }
    return found


def short(table: str) -> str:
    return table.removesuffix(".weight").rsplit(".", maxsplit=1)[-1]
