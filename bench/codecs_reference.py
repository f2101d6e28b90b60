"""The two quantizers of Check-N-Run's comparison that the product does not have: symmetric, and k-means per row.

Plain numpy, float64, slow: references for tests/unit/codecs and bench/codec_speeds.py. They return dequantized rows,
as `through_codec` does for the product's codec, so that errors are comparable.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.codecs.decoder import decode_rows
from deltashard_checkpoint.codecs.encoding import section_bytes
from deltashard_checkpoint.codecs.quantizer import Search, encode_rows
from deltashard_checkpoint.vocabulary import BITS_CHOICES, ENCODINGS

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def symmetric(x: npt.NDArray[np.floating], bits: int) -> F64:
    v = x.astype(np.float64)
    high = np.abs(v).max(axis=1, keepdims=True)
    return uniform(v, -high, high, bits)


def asymmetric(x: npt.NDArray[np.floating], bits: int) -> F64:
    """Uniform over [min x, max x] of each row, with exact scale and bias."""
    v = x.astype(np.float64)
    return uniform(v, v.min(axis=1, keepdims=True), v.max(axis=1, keepdims=True), bits)


def uniform(v: F64, low: F64, high: F64, bits: int) -> F64:
    """Return the rows [n, D] rounded to the nearest of 2**bits equal steps of [low, high] (each [n, 1])."""
    scale = (high - low) / (2**bits - 1)
    scale[scale == 0] = 1
    return np.clip(np.rint((v - low) / scale), 0, 2**bits - 1) * scale + low


def k_means(x: npt.NDArray[np.floating], bits: int, iterations: int = 15) -> F64:
    """Run Lloyd's algorithm within each row with 2**bits centroids, initially uniform between min and max."""
    v = x.astype(np.float64)
    low, high = v.min(axis=1, keepdims=True), v.max(axis=1, keepdims=True)
    centroids = low + (high - low) * np.linspace(0, 1, 2**bits)
    for _ in range(iterations):
        nearest = np.abs(v[:, :, None] - centroids[:, None, :]).argmin(axis=2)
        for c in range(2**bits):
            held = nearest == c
            count = held.sum(axis=1)
            mean = (v * held).sum(axis=1) / np.maximum(count, 1)
            centroids[:, c] = np.where(count > 0, mean, centroids[:, c])
    nearest = np.abs(v[:, :, None] - centroids[:, None, :]).argmin(axis=2)
    return np.take_along_axis(centroids, nearest, axis=1)


def rows_like(kind: str, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return rows of one of two distributions: `gaussian` with row means, or `student`-t(3)."""
    rng = np.random.default_rng(seed)
    if kind == "gaussian":
        x = rng.normal(0, 0.05, (rows, columns)) + rng.normal(0, 0.03, (rows, 1))
    else:
        x = 0.03 * rng.standard_t(3, (rows, columns))
    return x.astype(np.float32)


def mean_l2(x: npt.NDArray[np.floating], y: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt(((x.astype(np.float64) - y) ** 2).sum(axis=1)).mean())


def through_codec(weights: F32, bits: int, search: Search | None = None) -> F32:
    """Encode and decode rows [n, D] with the product's codec at `bits`; without `search`, its default range search."""
    encoding = ENCODINGS[BITS_CHOICES[bits]]
    rows, columns = weights.shape
    scales, biases, codes = (np.empty(size, np.uint8) for size in section_bytes(encoding, rows, columns))
    encoded = encode_rows(encoding, weights, scales, biases, codes, search=search)
    if not encoded.fits:  # the codec stores such a block raw
        return weights.copy()
    return decode_rows(
        encoding,
        scales,
        biases,
        codes,
        encoded.exponent,
        rows=rows,
        columns=columns,
        exceptions=encoded.exceptions,
    )


def mean_error(x: F32, bits: int, search: Search | None = None) -> float:
    """Return the mean L2 distance between a row and its decoded value from the product's codec."""
    return mean_l2(x, through_codec(x, bits, search))


def sample_of(rows: F32) -> F32:
    places = np.random.default_rng(0).choice(len(rows), min(len(rows), 4096), replace=False, shuffle=False)
    return np.ascontiguousarray(rows[np.sort(places)])
