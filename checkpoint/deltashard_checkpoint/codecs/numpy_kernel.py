"""Kernels in numpy: the reference for `_native.c`, which equals them bit for bit, and the slow fallback.

Callers check shapes. Row positions and ids are untrusted stored data; they are checked here before anything is written.
Arithmetic is float32, rounded after every operation; sums run over columns in order; the fused multiply-add of decoding
rounds once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_F32 = np.float32
_LARGEST = np.finfo(np.float32).max
AS_IS, AS_HALF, AS_BFLOAT = 0, 1, 2
_quiet = np.errstate(all="ignore")


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float32, rounded once: exact in float64 (a has 8 bits), with the sum rounded to odd first."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = even & np.isfinite(total) & (error != 0)
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total).astype(_F32)


def half_bits(x: Array) -> Array:
    """float32 -> float16 bits, round to nearest even; every NaN becomes the quiet NaN of its sign."""
    signs = (x.view(np.uint32) >> 16 & 0x8000).astype(np.uint16)
    return np.where(np.isnan(x), signs | np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))


def bfloat_bits(x: Array) -> Array:
    """float32 -> bfloat16 bits, round to nearest even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@_quiet
def row_ranges(x: Array, lo: Array, hi: Array) -> None:
    """Compute the min and max of every row of float32 x [n, D], with -0 as 0; both NaN if the row has a NaN."""
    lo[:], hi[:] = x.min(axis=1) + _F32(0), x.max(axis=1) + _F32(0)
    bad = np.isnan(x).any(axis=1)
    lo[bad] = hi[bad] = np.nan


@_quiet
def encode(  # noqa: PLR0913
    x: Array,
    bits: int,
    unit: float,
    given: bool,
    lo: Array,
    hi: Array,
    scales: Array,
    biases: Array,
    codes: Array,
) -> int:
    """Quantize the rows of float32 x [n, D] over [lo, hi] (computed as min and max unless `given`).

    lo, hi float32 [n]; scales, biases float32 [n] for 8 bits, else uint16 [n] holding float16; codes uint8 [n, bytes].
    Returns the number of special rows: not finite, or poorly represented by a float16 scale and bias times 1 / unit.
    """
    if not given:
        row_ranges(x, lo, hi)
    a, b = lo, hi
    wild = ~(np.abs(b - a) <= _LARGEST)
    if bits == 8:
        scale, inverse, units = _byte_scales(b - a)
        scales[:] = np.where(wild, _F32(0), scale)
        biases[:] = bias = np.where(wild, _F32(0), a)
        inverse = np.where(wild, _F32(0), inverse)
        special, values, bias = wild, x * units[:, None], bias * units
    else:
        u = _F32(unit)
        magnitude = np.where(np.abs(a) > np.abs(b), np.abs(a), np.abs(b)) * u
        span = (b - a) * u
        special = ~(magnitude < _F32(32768))
        special |= ~((span >= _F32(2.0 ** (2 * bits - 21))) | (span <= magnitude * _F32(2.0**-9)))
        bias16 = (a * u).astype(np.float16)
        bias = bias16.astype(_F32)
        rest = b * u - bias
        scale16 = np.where(rest == 0, _F32(1), rest / _F32((1 << bits) - 1)).astype(np.float16)
        scale16[(scale16.view(np.uint16) & 0x7FFF) == 0] = 1
        special |= (a == b) & (bias != a * u) | wild
        inverse = np.where(wild, _F32(0), _F32(1) / scale16.astype(_F32))
        bias = np.where(wild, _F32(0), bias)
        scales[:] = np.where(wild, 0, scale16.view(np.uint16))
        biases[:] = np.where(wild, 0, bias16.view(np.uint16))
        values = x * u
    q = (values - bias[:, None]) * inverse[:, None]
    q = np.where(q > 0, q, _F32(0))
    top = _F32((1 << bits) - 1)
    q = np.rint(np.where(q < top, q, top)).astype(np.uint8)
    codes[:] = np.packbits(_bits_of(q, bits), axis=1, bitorder="little")
    return int(special.sum())


def _byte_scales(span: Array) -> tuple[Array, Array, Array]:
    """Return (scale, 1 / scale in units, units in 1) of q8 rows with this span, as in torch.

    torch divides by span + 1e-8. Below a span of 2**-14 (where that moves a code by 4 % of a step) it would cause large
    errors, so the epsilon is omitted. Rows that span less than 255 / the largest float (8e-37) have a subnormal scale
    without a finite inverse: the scale is rounded up, so that 255 steps reach the top, and codes use units of 2**-126.
    """
    scale = span / _F32(255)
    inverse = _F32(255) / np.where(span >= _F32(2.0**-14), span + _F32(1e-8), span)
    tiny = ~(inverse <= _LARGEST) & (span > 0)
    scale = np.where(tiny & (scale * _F32(255) < span), np.nextafter(scale, _F32(1)), scale)
    inverse = np.where(tiny, _F32(1) / (scale * _F32(2.0**126)), np.where(span > 0, inverse, _F32(0)))
    return scale, inverse, np.where(tiny, _F32(2.0**126), _F32(1))


def _bits_of(q: Array, bits: int) -> Array:
    """The low `bits` bits of each code, lowest first: uint8 [n, D * bits]."""
    return ((q[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1).reshape(len(q), -1)


def _loss(x: Array, qmax: Any, lo: Array, hi: Array) -> Array:
    """Squared error of quantizing each row over [lo, hi] with a float32 scale; columns are summed in order."""
    scale = (hi - lo) / qmax
    scale = np.where(scale == 0, _F32(1), scale)
    inverse, loss = _F32(1) / scale, np.zeros(len(x), _F32)
    for v in x.T:
        e = v - (_code(v, lo, inverse, qmax) * scale + lo)
        loss += e * e
    return loss


def _code(v: Array, low: Array, inverse: Array, qmax: Any) -> Array:
    q = (v - low) * inverse
    q = np.where(q > 0, q, _F32(0))
    return np.rint(np.where(q < qmax, q, qmax))


@_quiet
def greedy(x: Array, bits: int, bins: int, steps: int, lo: Array, hi: Array) -> None:
    """Range search of Check-N-Run and PyTorch: trim the cheaper end by a bin, `steps` times; keep the best range.

    lo, hi float32 [n]: the rows' ranges, replaced by the best ranges (unchanged for rows that are not finite).
    """
    qmax = _F32((1 << bits) - 1)
    a, b = lo.copy(), hi.copy()
    step = (b - a) / _F32(bins)
    best = _loss(x, qmax, a, b)
    for _ in range(steps):
        a1, b2 = a + step, b - step
        e1, e2 = _loss(x, qmax, a1, b), _loss(x, qmax, a, b2)
        left = e1 < e2
        a, b, e = np.where(left, a1, a), np.where(left, b, b2), np.where(left, e1, e2)
        better = e < best
        best = np.where(better, e, best)
        lo[better], hi[better] = a[better], b[better]


@_quiet
def refit(x: Array, bits: int, trims: Array, passes: int, lo: Array, hi: Array) -> None:
    """Range search by least squares (`quantizer` describes it). lo, hi float32 [n] as for `greedy`.

    trims float32 [starts, 2]: fractions of the range trimmed below and above at each start.
    """
    n, d = x.shape
    qmax, count = _F32((1 << bits) - 1), _F32(d)
    mean = np.zeros(n, _F32)
    for v in x.T:
        mean += v
    mean /= count
    x = x - mean[:, None]
    best, slope, base = np.zeros((3, n), _F32)

    def fit(low: Array, scale: Array) -> None:
        q1, q2, qv = np.zeros((3, n), _F32)
        inverse = _F32(1) / scale
        for v in x.T:
            q = _code(v, low, inverse, qmax)
            q1[:], q2[:], qv[:] = q1 + q, q2 + q * q, qv + q * v
        s = qv / (q2 - q1 * q1 / count)
        gain = qv * s
        kept = (gain > best) & (s > 0) & (scale > 0)
        best[kept], slope[kept], base[kept] = gain[kept], s[kept], (_F32(0) - s * q1 / count)[kept]

    for below, above in trims:
        low = (lo - mean) + below * (hi - lo)
        fit(low, (((hi - mean) - above * (hi - lo)) - low) / qmax)
    for _ in range(1, passes):
        fit(base.copy(), slope.copy())
    found = best > 0
    lo[found] = (base + mean)[found]
    hi[found] = lo[found] + (slope * qmax)[found]


def check_rows(rows: Array, take: Array, limit: int) -> int:
    """Return the index of the first taken row position outside [0, limit), or -1. An empty `take` takes all."""
    bad = (rows < 0) | (rows >= limit)
    if len(take):
        bad &= take
    return int(bad.argmax()) if bad.any() else -1


@_quiet
def decode(  # noqa: PLR0913
    codes: Array, scales: Array, biases: Array, bits: int, unit: float, first: int, out: Array, store: int,
    rows: Array, take: Array,
) -> None:  # fmt: skip
    """Set out[rows[i]] to decoded row i, columns from `first` on, for the taken rows; an empty `take` takes all.

    codes, scales, biases as written by `encode`; unit: 2**exponent; out [R, C] float32 or float64, or uint16 with
    store AS_HALF or AS_BFLOAT. Row positions must be checked.
    """
    if len(take):
        codes, scales, biases, rows = codes[take], scales[take], biases[take], rows[take]
    if bits == 8:
        s, b = scales, biases
    else:
        s, b = (each.view(np.float16).astype(_F32) * _F32(unit) for each in (scales, biases))
        constant = (scales & 0xFF00) == 0x7D00
        word = biases.astype(np.uint32) << 16 | codes[:, 0].astype(np.uint32) << 8 | scales & np.uint32(0xFF)
        s, b = np.where(constant, _F32(0), s), np.where(constant, word.view(_F32), b)
    columns = slice(first * bits, (first + out.shape[1]) * bits)
    flags = np.unpackbits(codes, axis=1, bitorder="little")[:, columns].reshape(
        len(codes), out.shape[1], bits
    )
    q = (flags << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    v = fused(q, s[:, None], b[:, None])
    out[rows] = half_bits(v) if store == AS_HALF else bfloat_bits(v) if store == AS_BFLOAT else v


def copy_scatter(values: Array, out: Array, rows: Array, take: Array) -> None:
    """Set out[rows[i]] = values[i] for the taken rows: uint8 [n, w] into uint8 [R, w], any stride between rows."""
    chosen = take if len(take) else slice(None)
    out[rows[chosen]] = values[chosen]


def gather(values: Array, rows: Array, out: Array, places: Array) -> None:
    """Set out[i] = values[rows[i]], or out[places[i]] if `places` is not empty. Positions must be checked."""
    out[places if len(places) else slice(len(rows))] = values[rows]


def count_flags(flags: Array, mask: int) -> int:
    """Count the `flags` (uint8 [n]) that have a bit of `mask`."""
    return int(np.count_nonzero(flags & mask))


def find_flags(flags: Array, mask: int, rows: Array) -> int:
    """Write the positions of the `flags` that have a bit of `mask` to `rows` (int64), ascending. Returns the count."""
    found = np.flatnonzero(flags & mask)
    rows[: len(found)] = found
    return len(found)


def move_flags(flags: Array, bits: int, left: bool) -> None:
    """Shift `bits` of every flag one bit up (`left`) or down; target bits that are already set stay set."""
    moving = flags & np.uint8(bits)
    flags[:] = (flags & np.uint8(0xFF ^ bits)) | (moving << 1 if left else moving >> 1)


def hash_rows(words: Array, weights: Array, out: Array) -> None:
    """out[i] += sum_j weights[j] * words[i, j] mod 2**64; words uint32 [n, k], weights and out uint64."""
    out += (words.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)


def hash_some_rows(words: Array, weights: Array, rows: Array, out: Array) -> None:
    """Like `hash_rows` for the given rows: out[i] += hash of words[rows[i]]. Positions must be checked."""
    hash_rows(words[rows], weights, out)


def _gaps(ids: Array) -> Array:
    return np.diff(ids, prepend=np.int64(-1)) - 1


def _lengths(gaps: Array) -> Array:
    lengths = np.ones(len(gaps), np.int64)
    for k in range(1, 9):
        lengths += gaps >> (7 * k) > 0
    return lengths


def delta_bytes(ids: Array) -> int:
    """Return the bytes of the delta-varint form of ids, or -1 if they are not strictly ascending and >= 0."""
    if len(ids) and (ids[0] < 0 or (np.diff(ids) <= 0).any()):
        return -1
    return int(_lengths(_gaps(ids)).sum())


def write_deltas(ids: Array, out: Array) -> None:
    """Write the LEB128 of each id minus its predecessor minus one (the first id unchanged) to uint8 out."""
    gaps = _gaps(ids)
    lengths = _lengths(gaps)
    starts = np.cumsum(lengths) - lengths
    for k in range(int(lengths.max(initial=0))):
        some = lengths > k
        more = np.where(lengths[some] > k + 1, 0x80, 0)
        out[starts[some] + k] = (gaps[some] >> (7 * k)) & 0x7F | more


def read_deltas(data: Array, low: int, high: int, ids: Array) -> int:
    """Inverse of `write_deltas`. Returns 0, or 1 truncated, 2 overlong, 3 outside [low, high), 4 trailing bytes."""
    stream, last = iter(data.tolist()), -1
    for i in range(len(ids)):
        gap = shift = 0
        while True:
            byte = next(stream, None)
            if byte is None:
                return 1
            if shift > 56:
                return 2
            gap |= (byte & 0x7F) << shift
            if byte < 128:
                if byte == 0 and shift > 0:
                    return 2
                break
            shift += 7
        last += 1 + gap
        if gap >= high or not low <= last < high:
            return 3
        ids[i] = last
    return 0 if next(stream, None) is None else 4


def write_bitmap(ids: Array, first: int, out: Array) -> None:
    """Set bit ids[i] - first in zeroed uint8 out, low bits first."""
    flags = np.zeros(8 * len(out), np.uint8)
    flags[ids - first] = 1
    out |= np.packbits(flags, bitorder="little")


def read_bitmap(data: Array, first: int, ids: Array) -> int:
    """Fill ids with first + position of each set bit. Returns the number of set bits; never writes past ids."""
    found = np.flatnonzero(np.unpackbits(data, bitorder="little"))
    ids[: len(found)] = first + found[: len(ids)]
    return len(found)
