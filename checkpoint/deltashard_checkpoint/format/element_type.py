"""Element types of the format: stored code, size, and the numpy type that carries their bits.

numpy has no bfloat16 and no float8: their bits are carried as uint16 and uint8, and only the kernels (or torch, in the
trainer) interpret them. Codes are part of the format: add codes, never renumber them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltashard_checkpoint.errors import CorruptObject, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type."""

    name: str
    code: int
    itemsize_bytes: int
    carrier: np.dtype[np.generic]
    """numpy type of the same size that carries the bits: uint16 for bfloat16, uint8 for the float8 family."""
    floating: bool


def _dtype(name: str, code: int, carrier: str, *, floating: bool = False) -> DType:
    held: np.dtype[np.generic] = np.dtype(carrier)
    return DType(name=name, code=code, itemsize_bytes=held.itemsize, carrier=held, floating=floating)


ALL = (
    _dtype("float32", 1, "<f4", floating=True),
    _dtype("float16", 2, "<f2", floating=True),
    _dtype("bfloat16", 3, "<u2", floating=True),
    _dtype("float64", 4, "<f8", floating=True),
    _dtype("int8", 5, "i1"),
    _dtype("int16", 6, "<i2"),
    _dtype("int32", 7, "<i4"),
    _dtype("int64", 8, "<i8"),
    _dtype("uint8", 9, "u1"),
    _dtype("uint16", 10, "<u2"),
    _dtype("uint32", 11, "<u4"),
    _dtype("uint64", 12, "<u8"),
    _dtype("bool", 13, "u1"),
    _dtype("complex64", 14, "<c8"),
    _dtype("complex128", 15, "<c16"),
    _dtype("float8_e4m3fn", 16, "u1", floating=True),
    _dtype("float8_e5m2", 17, "u1", floating=True),
    _dtype("float8_e4m3fnuz", 18, "u1", floating=True),
    _dtype("float8_e5m2fnuz", 19, "u1", floating=True),
)
_BY_NAME = {each.name: each for each in ALL}
_BY_CODE = {each.code: each for each in ALL}
WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Supported dtypes of a table's weights."""


def by_name(name: str) -> DType:
    """Return the type named `name`; raises `UserError`."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UserError(f"element type {name!r} cannot be stored", remedy=f"one of {', '.join(_BY_NAME)}")
    return found


def by_code(code: int) -> DType:
    """Return the type with the stored code `code`; raises `CorruptObject`."""
    found = _BY_CODE.get(code)
    if found is None:
        raise CorruptObject(f"element type code {code} is unknown")
    return found


def is_known(name: str) -> bool:
    return name in _BY_NAME
