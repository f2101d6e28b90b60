"""Fingerprint of a batch, taken at delivery because training may modify the batch afterwards.

Tensors and arrays up to 256 KiB are hashed whole. For larger ones, 256 blocks of 1 KiB are hashed. At most 64 tensors
per batch and 256 entries per list are read. Device tensors contribute only shape and dtype, because reading them would
synchronize with the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

_WHOLE_BYTES = 1 << 18
_BLOCKS, _BLOCK_BYTES = 256, 1024
_MAX_TENSORS = 64
_MAX_ENTRIES = 256
_MAX_DEPTH = 8


def fingerprint(batch: Any) -> str | None:
    """Return 128 bits of the content as hex digits, or None if the batch contains no hashable value."""
    walk = _Walk()
    walk.visit(batch, 0)
    return walk.digest.hexdigest() if walk.leaves else None


class _Walk:
    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self.leaves = 0

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value, depth)
        elif isinstance(value, (str, bytes, bool, int, float, complex, np.generic)):
            self.leaves += 1
            self.digest.update(
                value if isinstance(value, bytes) else f"{type(value).__name__}{value!r}".encode()
            )
        elif depth >= _MAX_DEPTH:
            self.digest.update(type(value).__name__.encode())
        elif isinstance(value, Mapping):
            for key in value:
                self.digest.update(repr(key).encode())
                self.visit(value[key], depth + 1)
        elif isinstance(value, (list, tuple)):
            self.digest.update(b"[%d" % len(value))
            count = len(value)
            for k in range(min(count, _MAX_ENTRIES)):
                self.visit(value[k if count <= _MAX_ENTRIES else count * k // _MAX_ENTRIES], depth + 1)
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        """Visit the attributes of an object such as a KeyedJaggedTensor."""
        self.digest.update(type(value).__name__.encode())
        if (dataclasses.is_dataclass(value) or hasattr(value, "__dict__")) and not callable(value):
            held = vars(value) if hasattr(value, "__dict__") else {}
            self.visit({key: held[key] for key in sorted(held)}, depth + 1)

    def _tensor(self, value: torch.Tensor) -> None:
        self.digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout == torch.sparse_coo and value.device.type == "cpu":
            value = value._values()  # noqa: SLF001 - the public accessor refuses uncoalesced tensors
        plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
        if not plain or not value.numel() or self.leaves >= _MAX_TENSORS:
            return
        if value.requires_grad:
            value = value.detach()
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        if value.dim() and not value.is_contiguous():
            row_bytes = value[0].numel() * value.element_size()
            value = value[:: max(1, value.shape[0] * row_bytes // _WHOLE_BYTES)].contiguous()
        self.leaves += 1
        if value.numel() * value.element_size() > _WHOLE_BYTES:
            self._blocks(value.reshape(-1).view(torch.uint8))
        else:
            self.digest.update((value if value.dim() else value.reshape(1)).view(torch.uint8).numpy().data)

    def _array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        if value.dtype.hasobject:
            self.visit(value.tolist(), depth + 1)
            return
        self.digest.update(f"{value.dtype}{value.shape}".encode())
        if value.size:
            self.leaves += 1
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            if flat.size > _WHOLE_BYTES:
                self._blocks(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
            else:
                self.digest.update(flat.data)

    def _blocks(self, flat: torch.Tensor) -> None:
        """Hash evenly spaced blocks of `flat`, a contiguous uint8[n] with n > `_WHOLE_BYTES`."""
        step = (flat.numel() - _BLOCK_BYTES) // (_BLOCKS - 1)
        self.digest.update(flat.as_strided((_BLOCKS, _BLOCK_BYTES), (step, 1)).contiguous().numpy().data)
