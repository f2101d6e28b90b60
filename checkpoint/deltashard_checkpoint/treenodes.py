"""What a typed tree is made of: the header, the limits, and the two leaf types of its own (see `trees`)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAGIC = b"DSTREE"
VERSION = 1
ALIGN = 64
MAX_DEPTH = 100
MAX_DIMS = 32
HEADER = struct.Struct("<6sHQQII")  # magic, version, structure bytes, total bytes, leaves, 0
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None, "int": int, "float": float, "complex": complex, "bool": bool, "str": str, "bytes": bytes,
    "list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset,
}  # fmt: skip
NUMPY_TYPE = re.compile(
    r"[<>|][biufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
MAX_DIM = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor as raw contiguous bytes (row-major), with the name of its element type (see `dtypes`)."""

    dtype: str
    shape: tuple[int, ...]
    data: Any
    """A contiguous buffer of prod(shape) x itemsize bytes; after decoding a read-only or writable memoryview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A value under a caller's own type name: `adapt` makes these, `untag` takes them back."""

    tag: str
    value: Any


def aligned(n: int) -> int:
    """`n` rounded up to where the next leaf may begin."""
    return -(-n // ALIGN) * ALIGN
