"""What is compared: SHA-256 sums, of what a rank holds and of what a checkpoint has in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Content = dict[str, Any]
"""What one rank holds: {"shards": [{"table", "rows", "weights", "state"}, ...], "dense": {name: hash}}."""


def sha256(values: Tensor) -> str:
    """Of a tensor's bytes, in order."""
    return hashlib.sha256(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def dense_of(parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Hashes of dense parameters, and of their optimizer's state as `name:key`."""
    found = {name: sha256(value) for name, value in parameters.items()}
    for name in parameters:
        found |= {
            f"{name}:{key}": sha256(torch.as_tensor(value)) for key, value in state.get(name, {}).items()
        }
    return found
