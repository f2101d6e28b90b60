"""The side list of a frame: rows that its encoding cannot hold, stored losslessly as float32 or float64.

Little-endian: count uint32, value bytes uint32 (4 or 8), positions uint32 [count] strictly ascending, zero padding to a
multiple of 8, values [count, D]. No bytes if there are no such rows, which is the normal case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import CorruptObject

NDArray = npt.NDArray[np.generic]


def exception_bytes(count: int, columns: int, value_bytes: int) -> int:
    """Return the size of a side list of `count` rows."""
    return 0 if count == 0 else 8 + -(-4 * count // 8) * 8 + count * columns * value_bytes


def write_exceptions(positions: npt.NDArray[np.int64], values: NDArray) -> bytes:
    """Encode the side list of `values` (float32 or float64 [count, D]) at ascending row `positions` of the frame."""
    count = len(positions)
    if count == 0:
        return b""
    head = np.array([count, values.itemsize], "<u4").tobytes() + positions.astype("<u4").tobytes()
    return head + bytes(-len(head) % 8) + np.ascontiguousarray(values).tobytes()


def read_exceptions(
    whole: npt.NDArray[np.uint8], rows: int, columns: int
) -> tuple[npt.NDArray[np.int64], NDArray]:
    """Decode a side list: (positions int64 [count], float32 or float64 [count, D]); raises `CorruptObject`."""
    if not len(whole):
        return np.empty(0, np.int64), np.empty((0, columns), np.float32)
    if len(whole) < 8:
        raise CorruptObject(f"exceptional rows in {len(whole)} bytes")
    count, value_bytes = (int(v) for v in whole[:8].view("<u4"))
    if (
        value_bytes not in (4, 8)
        or not 0 < count <= rows
        or len(whole) != exception_bytes(count, columns, value_bytes)
    ):
        raise CorruptObject(
            f"{count} exceptional rows of {columns} x {value_bytes} bytes in {len(whole)} bytes"
        )
    positions = whole[8 : 8 + 4 * count].view("<u4").astype(np.int64)
    if positions[-1] >= rows or (np.diff(positions) <= 0).any():
        raise CorruptObject(f"exceptional rows out of order, or beyond the frame's {rows}")
    values = whole[-count * columns * value_bytes :].view(f"<f{value_bytes}").reshape(count, columns)
    return positions, values
