"""The reference kernels, in numba: what every native kernel must equal bit for bit, and what serves without a compiler.

All are `nogil` and cached on disk. They trust their callers for shapes (the public functions check them) but never
for *values* that came from a store: row positions are checked against the target, and ids against bounds, in the
kernel, before anything is written. Arithmetic is float32, rounded after every operation (LLVM contracts nothing unless
asked); the one fused multiply-add is spelled out. That makes equality with other kernels, and with torch, possible.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_F32 = np.float32
_FAST: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

_LARGEST = _F32(np.finfo(np.float32).max)
_MAGIC = _F32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
LANES = 16

AS_IS, AS_HALF, AS_BFLOAT = 0, 1, 2
"""How a float32 value is stored into a target: converted to its dtype, or as the bits of a float16 / bfloat16."""


@intrinsic
def _fused(_context, _a, _b, _c):  # type: ignore[no-untyped-def]
    """What a * b + c is in float32, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda _target, builder, _signature, args: builder.fma(*args)


fused: Any = _fused  # the decorator supplies the context


@njit(**_FAST)
def half_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> float16 bits, round to nearest even, overflow to infinity."""
    bits = _F32(x).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    a = bits & np.uint32(0x7FFFFFFF)
    if a >= np.uint32(0x47800000):
        return np.uint16(sign | (np.uint32(0x7E00) if a > np.uint32(0x7F800000) else np.uint32(0x7C00)))
    if a < np.uint32(0x38800000):
        # 0.5 has the spacing of float16 subnormals: the addition rounds for us.
        shifted = _F32(np.uint32(a).view(_F32) + _F32(0.5))
        return np.uint16(sign | (shifted.view(np.uint32) - np.uint32(0x3F000000)))
    rounded = a + np.uint32(0xFFF) + ((a >> np.uint32(13)) & np.uint32(1)) - np.uint32(0x38000000)
    return np.uint16(sign | (rounded >> np.uint32(13)))


@njit(**_FAST)
def bfloat_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> bfloat16 bits, round to nearest even; NaN stays NaN."""
    bits = _F32(x).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(**_FAST)
def half_value(h):  # type: ignore[no-untyped-def]
    """float16 bits -> float32, exactly."""
    sign = np.uint32(np.uint32(h & 0x8000) << np.uint32(16))
    e = np.uint32((h >> 10) & 31)
    m = np.uint32(h & 0x3FF)
    if e == 31:
        return np.uint32(sign | np.uint32(0x7F800000) | np.uint32(m << np.uint32(13))).view(_F32)
    if e == 0:
        return np.uint32(sign | _F32(_F32(m) * _F32(2.0**-24)).view(np.uint32)).view(_F32)
    return np.uint32(sign | np.uint32((e + 112) << np.uint32(23)) | np.uint32(m << np.uint32(13))).view(_F32)


@njit(**_FAST)
def row_range(row):  # type: ignore[no-untyped-def]
    """Smallest and largest value of float32 row [D], -0 as 0; both NaN where it has a NaN."""
    a = row[0]
    b = a
    bad = a != a
    for j in range(1, row.shape[0]):
        v = row[j]
        a = v if v < a else a
        b = v if v > b else b
        bad |= v != v
    if bad:
        return _F32(np.nan), _F32(np.nan)
    return a + _F32(0.0), b + _F32(0.0)


@njit(**_FAST)
def row_ranges(x, lo, hi):  # type: ignore[no-untyped-def]
    """`row_range` of every row of x [n, D] into lo, hi float32 [n]."""
    for i in range(x.shape[0]):
        lo[i], hi[i] = row_range(x[i])


@njit(**_FAST)
def byte_pair(a, b):  # type: ignore[no-untyped-def]
    """(scale, bias, 1 / scale in units, units in 1, is it exceptional) of a q8 row of range [a, b], as torch has them.

    torch divides by span + 1e-8; below a span of 2**-14 (where it moves a code by 4 % of a step) that would ruin rows,
    so it is left out. Rows that span less than 255 / the largest float (8e-37) have a subnormal scale and no finite
    inverse: the scale is rounded up, so that 255 steps reach the top, and codes are found in units of 2**-126.
    """
    if not abs(b - a) <= _LARGEST:
        return _F32(0.0), _F32(0.0), _F32(0.0), _F32(1.0), True
    span = b - a
    scale = _F32(span / _F32(255.0))
    inverse = _F32(255.0) / (span + _F32(1e-8) if span >= _F32(2.0**-14) else span)
    if inverse <= _LARGEST:
        return scale, a, inverse, _F32(1.0), False
    if span == _F32(0.0):
        return scale, a, _F32(0.0), _F32(1.0), False
    if scale * _F32(255.0) < span:
        scale = np.uint32(_F32(scale).view(np.uint32) + np.uint32(1)).view(_F32)
    return scale, a, _F32(1.0) / (scale * _F32(2.0**126)), _F32(2.0**126), False


@njit(**_FAST)
def half_pair(a, b, bits, unit):  # type: ignore[no-untyped-def]
    """(scale bits, bias bits, bias, 1 / scale, is it special) of a q4, q3, q2 row with range [a, b].

    In units of the frame's exponent, and without it as torch has them: the bias is rounded to float16 first, the scale
    is what remains of the range. Special: not finite, misfit at this exponent (`quantizer.choose_exponent`), or a
    constant that float16 cannot hold.
    """
    if not abs(b - a) <= _LARGEST:
        return np.uint16(0), np.uint16(0), _F32(0.0), _F32(0.0), True
    magnitude = (abs(a) if abs(a) > abs(b) else abs(b)) * unit
    span = (b - a) * unit
    special = not magnitude < _F32(32768.0)
    special |= not (span >= _F32(2.0 ** (2 * bits - 21)) or span <= magnitude * _F32(2.0**-9))
    bias16 = half_bits(a * unit)
    bias = half_value(bias16)
    rest = b * unit - bias
    scale16 = half_bits(_F32(1.0) if rest == _F32(0.0) else rest / _F32((1 << bits) - 1))
    if scale16 & 0x7FFF == 0:
        scale16 = np.uint16(0x3C00)
    special |= a == b and bias != a * unit
    return scale16, bias16, bias, _F32(1.0) / half_value(scale16), special


@njit(**_FAST)
def pack_row(row, unit, bias, inverse, bits, codes):  # type: ignore[no-untyped-def]
    """Sets codes = pack(round(clip((row * unit - bias) * inverse, 0, 2**bits - 1))), ties to even, NaN as 0."""
    top = _F32((1 << bits) - 1)
    word = np.uint32(0)
    held = 0
    at = 0
    for j in range(row.shape[0]):
        q = (row[j] * unit - bias) * inverse
        q = q if q > _F32(0.0) else _F32(0.0)
        q = q if q < top else top
        word |= np.uint32(np.uint32(np.rint(q)) << np.uint32(held))
        held += bits
        if held >= 8:
            codes[at] = np.uint8(word & np.uint32(0xFF))
            at += 1
            word = np.uint32(word >> np.uint32(8))
            held -= 8
    if held > 0:
        codes[at] = np.uint8(word & np.uint32(0xFF))


@njit(**_FAST)
def encode_bytes(x, given, lo, hi, scales, biases, codes):  # type: ignore[no-untyped-def]
    """`encode` for 8 bits: float32 scales and biases."""
    special = 0
    for i in range(x.shape[0]):
        if not given:
            lo[i], hi[i] = row_range(x[i])
        scale, bias, inverse, unit, wild = byte_pair(lo[i], hi[i])
        scales[i] = scale
        biases[i] = bias
        special += wild
        pack_row(x[i], unit, bias * unit, inverse, 8, codes[i])
    return special


@njit(**_FAST)
def encode_bits(x, bits, unit, given, lo, hi, scales, biases, codes):  # type: ignore[no-untyped-def]
    """`encode` for 2, 3 and 4 bits: float16 scales and biases, as uint16."""
    special = 0
    for i in range(x.shape[0]):
        if not given:
            lo[i], hi[i] = row_range(x[i])
        scale16, bias16, bias, inverse, misfit = half_pair(lo[i], hi[i], bits, unit)
        scales[i] = scale16
        biases[i] = bias16
        special += misfit
        pack_row(x[i], unit, bias, inverse, bits, codes[i])
    return special


def encode(x, bits, unit, given, lo, hi, scales, biases, codes):  # type: ignore[no-untyped-def]
    """Quantize the rows of float32 x [n, D] over [lo, hi] (found first, as min and max, unless `given`).

    lo, hi float32 [n]; scales, biases float32 [n] for 8 bits, else uint16 [n] holding float16; codes uint8 [n, bytes].
    Returns how many rows are special: not finite, or not well served by a float16 scale and bias times 1 / unit.
    """
    if bits == 8:
        return encode_bytes(x, given, lo, hi, scales, biases, codes)
    return encode_bits(x, bits, _F32(unit), given, lo, hi, scales, biases, codes)


@njit(**_FAST)
def load_tile(x, start, live, tile):  # type: ignore[no-untyped-def]
    """Sixteen rows from `start` as tile [D, 16]; lanes beyond `live` repeat the first row."""
    for lane in range(LANES):
        row = x[start + lane] if lane < live else x[start]
        for j in range(x.shape[1]):
            tile[j, lane] = row[j]


@njit(**_FAST)
def tile_loss(tile, qmax, lo, hi, loss):  # type: ignore[no-untyped-def]
    """Squared error, per lane, of quantizing the tile over [lo, hi] with a float32 scale."""
    scale = np.empty(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    for lane in range(LANES):
        s = (hi[lane] - lo[lane]) / qmax
        s = _F32(1.0) if s == _F32(0.0) else s
        scale[lane] = s
        inverse[lane] = _F32(1.0) / s
        loss[lane] = _F32(0.0)
    for j in range(tile.shape[0]):
        for lane in range(LANES):
            v = tile[j, lane]
            q = (v - lo[lane]) * inverse[lane]
            q = q if q > _F32(0.0) else _F32(0.0)
            q = q if q < qmax else qmax
            e = v - (((q + _MAGIC) - _MAGIC) * scale[lane] + lo[lane])
            loss[lane] += e * e


@njit(**_FAST)
def greedy(x, bits, bins, steps, lo, hi):  # type: ignore[no-untyped-def]
    """Range search of Check-N-Run and PyTorch: trim a bin where it costs less, `steps` times; keep the best visited.

    lo, hi float32 [n]: the rows' ranges, replaced by the ranges found (left alone where a row is not finite).
    """
    n, d = x.shape
    qmax = _F32((1 << bits) - 1)
    tile = np.empty((d, LANES), np.float32)
    a = np.zeros(LANES, np.float32)
    b = np.zeros(LANES, np.float32)
    a1 = np.empty(LANES, np.float32)
    b2 = np.empty(LANES, np.float32)
    e1 = np.empty(LANES, np.float32)
    e2 = np.empty(LANES, np.float32)
    step = np.empty(LANES, np.float32)
    best = np.empty(LANES, np.float32)
    for start in range(0, n, LANES):
        live = min(LANES, n - start)
        load_tile(x, start, live, tile)
        for lane in range(live):
            a[lane] = lo[start + lane]
            b[lane] = hi[start + lane]
        for lane in range(LANES):
            step[lane] = (b[lane] - a[lane]) / _F32(bins)
        tile_loss(tile, qmax, a, b, best)
        for _ in range(steps):
            for lane in range(LANES):
                a1[lane] = a[lane] + step[lane]
                b2[lane] = b[lane] - step[lane]
            tile_loss(tile, qmax, a1, b, e1)
            tile_loss(tile, qmax, a, b2, e2)
            for lane in range(live):
                if e1[lane] < e2[lane]:
                    a[lane] = a1[lane]
                    e = e1[lane]
                else:
                    b[lane] = b2[lane]
                    e = e2[lane]
                if e < best[lane]:
                    best[lane] = e
                    lo[start + lane] = a[lane]
                    hi[start + lane] = b[lane]


@njit(**_FAST)
def fit(tile, qmax, low, scale, best, slope, base):  # type: ignore[no-untyped-def]
    """One least-squares fit from the given ranges; keeps it, per lane, where it explains more than `best`."""
    inverse = np.empty(LANES, np.float32)
    q1 = np.zeros(LANES, np.float32)
    q2 = np.zeros(LANES, np.float32)
    qv = np.zeros(LANES, np.float32)
    count = _F32(tile.shape[0])
    for lane in range(LANES):
        inverse[lane] = _F32(1.0) / scale[lane]
    for j in range(tile.shape[0]):
        for lane in range(LANES):
            v = tile[j, lane]
            q = (v - low[lane]) * inverse[lane]
            q = q if q > _F32(0.0) else _F32(0.0)
            q = q if q < qmax else qmax
            q = (q + _MAGIC) - _MAGIC
            q1[lane] += q
            q2[lane] += q * q
            qv[lane] += q * v
    for lane in range(LANES):
        spread = q2[lane] - q1[lane] * q1[lane] / count
        s = qv[lane] / spread
        gain = qv[lane] * s
        if gain > best[lane] and s > _F32(0.0) and scale[lane] > _F32(0.0):
            best[lane] = gain
            slope[lane] = s
            base[lane] = _F32(0.0) - s * q1[lane] / count


@njit(**_FAST)
def refit(x, bits, trims, passes, lo, hi):  # type: ignore[no-untyped-def]
    """Range search by least squares (`quantizer` describes it). lo, hi float32 [n] as for `greedy`.

    trims float32 [starts, 2]: fractions of the range cut off below and above at each start.
    """
    n, d = x.shape
    qmax = _F32((1 << bits) - 1)
    tile = np.empty((d, LANES), np.float32)
    mean = np.empty(LANES, np.float32)
    low = np.zeros(LANES, np.float32)
    scale = np.zeros(LANES, np.float32)
    best = np.empty(LANES, np.float32)
    slope = np.empty(LANES, np.float32)
    base = np.empty(LANES, np.float32)
    for start in range(0, n, LANES):
        live = min(LANES, n - start)
        load_tile(x, start, live, tile)
        mean[:] = _F32(0.0)
        for j in range(d):
            for lane in range(LANES):
                mean[lane] += tile[j, lane]
        for lane in range(LANES):
            mean[lane] /= _F32(d)
            best[lane] = slope[lane] = base[lane] = _F32(0.0)
        for j in range(d):
            for lane in range(LANES):
                tile[j, lane] -= mean[lane]
        for s in range(trims.shape[0]):
            for lane in range(live):
                a = lo[start + lane]
                b = hi[start + lane]
                span = b - a
                low[lane] = (a - mean[lane]) + trims[s, 0] * span
                scale[lane] = (((b - mean[lane]) - trims[s, 1] * span) - low[lane]) / qmax
            fit(tile, qmax, low, scale, best, slope, base)
        for _ in range(1, passes):
            low[:] = base
            scale[:] = slope
            fit(tile, qmax, low, scale, best, slope, base)
        for lane in range(live):
            if best[lane] > _F32(0.0):
                lo[start + lane] = base[lane] + mean[lane]
                hi[start + lane] = lo[start + lane] + slope[lane] * qmax


@njit(**_FAST)
def check_rows(rows, take, limit):  # type: ignore[no-untyped-def]
    """Index of the first taken row position outside [0, limit), or -1. An empty `take` takes all."""
    for i in range(rows.shape[0]):
        if (take.shape[0] == 0 or take[i]) and (rows[i] < 0 or rows[i] >= limit):
            return i
    return -1


@njit(**_FAST)
def decode_row(codes, bits, first, s, b, out, store):  # type: ignore[no-untyped-def]
    """out[j] = fused(code first + j, s, b) for the row's columns, stored as `store` says."""
    mask = np.uint32((1 << bits) - 1)
    for j in range(out.shape[0]):
        bit = (first + j) * bits
        at = bit >> 3
        word = np.uint32(codes[at])
        if at + 1 < codes.shape[0]:
            word |= np.uint32(codes[at + 1]) << np.uint32(8)
        v: Any = fused(_F32((word >> np.uint32(bit & 7)) & mask), s, b)
        if store == AS_HALF:
            out[j] = half_bits(v)
        elif store == AS_BFLOAT:
            out[j] = bfloat_bits(v)
        else:
            out[j] = v


@njit(**_FAST)
def decode_bytes(codes, scales, biases, first, out, store, rows, take):  # type: ignore[no-untyped-def]
    """`decode` for 8 bits."""
    for i in range(codes.shape[0]):
        if take.shape[0] == 0 or take[i]:
            decode_row(codes[i], 8, first, scales[i], biases[i], out[rows[i]], store)


@njit(**_FAST)
def decode_bits(codes, scales, biases, bits, unit, first, out, store, rows, take):  # type: ignore[no-untyped-def]
    """`decode` for 2, 3 and 4 bits."""
    for i in range(codes.shape[0]):
        if take.shape[0] == 0 or take[i]:
            if scales[i] & 0xFF00 == 0x7D00:
                word = np.uint32(biases[i]) << np.uint32(16) | np.uint32(codes[i, 0]) << np.uint32(8)
                s = _F32(0.0)
                b = np.uint32(word | np.uint32(scales[i] & 0xFF)).view(_F32)
            else:
                s = half_value(scales[i]) * unit
                b = half_value(biases[i]) * unit
            decode_row(codes[i], bits, first, s, b, out[rows[i]], store)


def decode(codes, scales, biases, bits, unit, first, out, store, rows, take):  # type: ignore[no-untyped-def]
    """out[rows[i]] = decoded row i, columns from `first` on, for the taken rows; an empty `take` takes all.

    codes, scales, biases as `encode` left them; unit: 2**exponent; out [R, C] float32 or float64, or uint16 with
    store AS_HALF or AS_BFLOAT. Row positions were checked before.
    """
    if bits == 8:
        decode_bytes(codes, scales, biases, first, out, store, rows, take)
    else:
        decode_bits(codes, scales, biases, bits, _F32(unit), first, out, store, rows, take)


@njit(**_FAST)
def copy_scatter(values, out, rows, take):  # type: ignore[no-untyped-def]
    """out[rows[i]] = values[i] for the taken rows: uint8 [n, w] into uint8 [R, w], any stride between rows."""
    for i in range(values.shape[0]):
        if take.shape[0] == 0 or take[i]:
            out[rows[i], :] = values[i, :]


@njit(**_FAST)
def gather(values, rows, out, places):  # type: ignore[no-untyped-def]
    """out[i] = values[rows[i]]: uint8 [R, w] with any stride between rows, into uint8 [n, w]; rows were checked.

    With `places` (empty: none) out[places[i]], of uint8 [N, w].
    """
    for i in range(rows.shape[0]):
        to = places[i] if places.shape[0] else i
        out[to, :] = values[rows[i], :]


@njit(**_FAST)
def count_flags(flags, mask):  # type: ignore[no-untyped-def]
    """How many of `flags` (uint8 [n]) have one of the bits of `mask`."""
    count = 0
    for i in range(flags.shape[0]):
        if flags[i] & mask:
            count += 1
    return count


@njit(**_FAST)
def find_flags(flags, mask, rows):  # type: ignore[no-untyped-def]
    """Their positions, ascending, into `rows` (int64, long enough); returns how many."""
    count = 0
    for i in range(flags.shape[0]):
        if flags[i] & mask:
            rows[count] = i
            count += 1
    return count


@njit(**_FAST)
def move_flags(flags, bits, left):  # type: ignore[no-untyped-def]
    """`bits` of every flag go one place up (`left`) or down; what is at the target stays set."""
    for i in range(flags.shape[0]):
        moving = flags[i] & np.uint8(bits)
        moved = moving << 1 if left else moving >> 1
        flags[i] = (flags[i] & np.uint8(0xFF ^ bits)) | np.uint8(moved)


@njit(**_FAST)
def hash_rows(words, weights, out):  # type: ignore[no-untyped-def]
    """out[i] += sum_j weights[j] * words[i, j] mod 2**64; words uint32 [n, k], weights and out uint64."""
    for i in range(words.shape[0]):
        h = np.uint64(0)
        for j in range(words.shape[1]):
            h += weights[j] * np.uint64(words[i, j])
        out[i] += h


@njit(**_FAST)
def hash_some_rows(words, weights, rows, out):  # type: ignore[no-untyped-def]
    """Like `hash_rows` for the given rows only: out[i] += hash of words[rows[i]]; rows were checked."""
    for i in range(rows.shape[0]):
        h = np.uint64(0)
        r = rows[i]
        for j in range(words.shape[1]):
            h += weights[j] * np.uint64(words[r, j])
        out[i] += h


@njit(**_FAST)
def delta_bytes(ids):  # type: ignore[no-untyped-def]
    """Bytes of the delta-varint form of ascending ids, or -1 when they are not strictly ascending and >= 0."""
    total = 0
    last = np.int64(-1)
    for i in range(ids.shape[0]):
        v = ids[i]
        if v <= last:
            return -1
        gap = v - last - 1
        total += 1
        while gap >= 128:
            gap >>= 7
            total += 1
        last = v
    return total


@njit(**_FAST)
def write_deltas(ids, out):  # type: ignore[no-untyped-def]
    """LEB128 of each id minus its predecessor minus one (the first id as it is) into uint8 out."""
    at = 0
    last = np.int64(-1)
    for i in range(ids.shape[0]):
        gap = ids[i] - last - 1
        while gap >= 128:
            out[at] = np.uint8((gap & 0x7F) | 0x80)
            gap >>= 7
            at += 1
        out[at] = np.uint8(gap)
        at += 1
        last = ids[i]


@njit(**_FAST)
def read_deltas(data, low, high, ids):  # type: ignore[no-untyped-def]
    """Inverse of `write_deltas`: 0, or 1 truncated, 2 overlong, 3 outside [low, high), 4 bytes left over."""
    at = 0
    last = np.int64(-1)
    size = data.shape[0]
    for i in range(ids.shape[0]):
        gap = np.uint64(0)
        shift = 0
        while True:
            if at >= size:
                return 1
            byte = data[at]
            at += 1
            if shift > 56:
                return 2
            gap |= np.uint64(byte & 0x7F) << np.uint64(shift)
            if byte < 128:
                if byte == 0 and shift > 0:
                    return 2
                break
            shift += 7
        if gap >= np.uint64(high):
            return 3
        value = last + np.int64(1) + np.int64(gap)
        if value < low or value >= high:
            return 3
        ids[i] = value
        last = value
    return 0 if at == size else 4


@njit(**_FAST)
def write_bitmap(ids, first, out):  # type: ignore[no-untyped-def]
    """Sets bit ids[i] - first of zeroed uint8 out, low bits first."""
    for i in range(ids.shape[0]):
        k = ids[i] - first
        out[k >> 3] |= np.uint8(1 << (k & 7))


@njit(**_FAST)
def read_bitmap(data, first, ids):  # type: ignore[no-untyped-def]
    """Fills ids with first + the position of each set bit; the number of set bits (nothing is written past ids)."""
    count = 0
    for i in range(data.shape[0]):
        byte = data[i]
        if byte == 0:
            continue
        for k in range(8):
            if byte & (1 << k):
                if count < ids.shape[0]:
                    ids[count] = first + i * 8 + k
                count += 1
    return count
