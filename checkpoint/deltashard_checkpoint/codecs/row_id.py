"""Row ids of a frame: strictly ascending int64 >= 0, in the smallest of three forms.

    RANGE   8 bytes: the first id; the ids are [first, first + n)
    BITMAP  8 bytes: the first id, then one bit per id of [first, last], low bits first (3.9 bits a row at 26 % density)
    DELTAS  LEB128 of each id minus its predecessor minus one, the first id unchanged (sparse frames: 1-3 bytes a row)

Decoding trusts nothing: lengths, counts, order, bounds, overlong varints and trailing bytes are all checked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs.encoding import EncodingError
from deltashard_checkpoint.errors import CorruptObject

RANGE, BITMAP, DELTAS = 0, 1, 2

Ids = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
MAX_ID = 1 << 62


def encode_ids(ids: Ids | range) -> tuple[int, bytes]:
    """Return (kind, bytes) of the smallest form of `ids`: strictly ascending int64 [n] >= 0, or a `range` of step 1.

    Raises `EncodingError` for ids that are unsorted, repeated, negative, or not int64 [n].
    """
    if isinstance(ids, range):
        if ids.step != 1 or ids.start < 0 or ids.stop > MAX_ID:
            raise EncodingError(f"row ids {ids}", remedy="a range of step 1 within [0, 2**62)")
        return RANGE, ids.start.to_bytes(8, "little")
    if ids.ndim != 1 or ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise EncodingError(f"row ids of {ids.dtype}{list(ids.shape)}", remedy="contiguous int64 [n]")
    n = len(ids)
    if n == 0:
        return RANGE, bytes(8)
    k = kernel_choice.active()
    deltas = int(k.delta_bytes(ids))
    first, last = int(ids[0]), int(ids[-1])
    if deltas < 0 or last >= MAX_ID:
        raise EncodingError(
            "row ids are not strictly ascending within [0, 2**62)", remedy="sort them, drop repeats"
        )
    if last - first + 1 == n:
        return RANGE, first.to_bytes(8, "little")
    bitmap = 8 + (last - first) // 8 + 1
    if bitmap <= deltas:
        out = np.zeros(bitmap, np.uint8)
        out[:8] = np.frombuffer(first.to_bytes(8, "little"), np.uint8)
        k.write_bitmap(ids, first, out[8:])
        return BITMAP, out.tobytes()
    out = np.empty(deltas, np.uint8)
    k.write_deltas(ids, out)
    return DELTAS, out.tobytes()


def decode_ids(kind: int, buf: Buffer, n: int, bounds: tuple[int, int]) -> Ids:  # noqa: C901
    """Decode the `n` ids of a section: int64 [n], strictly ascending within [bounds[0], bounds[1]).

    `n` determines the allocation, so callers must bound it by the frame's length. Raises `CorruptObject` for an unknown
    kind or for bytes that do not encode exactly such ids.
    """
    data = np.frombuffer(buf, np.uint8)
    low, high = bounds
    if not 0 <= low <= high <= MAX_ID or not 0 <= n <= high - low:
        raise CorruptObject(f"{n} row ids within [{low}, {high})")
    if kind in (RANGE, BITMAP):
        if len(data) < 8:
            raise CorruptObject(f"row ids of kind {kind} in {len(data)} bytes")
        first = int.from_bytes(data[:8].tobytes(), "little")
        if n == 0 and kind == RANGE and len(data) == 8:
            return np.empty(0, np.int64)
    if kind == RANGE:
        if len(data) != 8 or first < low or first + n > high:
            raise CorruptObject(
                f"row range [{first}, {first + n}) in {len(data)} bytes, expected within [{low}, {high})"
            )
        return np.arange(first, first + n, dtype=np.int64)
    ids = np.empty(n, np.int64)
    k = kernel_choice.active()
    if kind == BITMAP:
        bits = data[8:]
        # The first and the last byte contain the first and the last id, so each set of ids has exactly one form.
        if n == 0 or not len(bits) or not bits[0] & 1 or not bits[-1]:
            raise CorruptObject("row bitmap does not start and end with a row")
        last = first + (len(bits) - 1) * 8 + int(bits[-1]).bit_length() - 1
        if first < low or last >= high:
            raise CorruptObject(f"row bitmap of [{first}, {last}], expected within [{low}, {high})")
        count = int(k.read_bitmap(bits, first, ids))
        if count != n:
            raise CorruptObject(f"row bitmap holds {count} rows, its frame has {n}")
        return ids
    if kind == DELTAS:
        fault = int(k.read_deltas(data, low, high, ids))
        if fault:
            why = ("", "are truncated", "are overlong", f"leave [{low}, {high})", "have bytes left over")[
                fault
            ]
            raise CorruptObject(f"row deltas {why}")
        return ids
    raise CorruptObject(f"row ids of unknown kind {kind}")
