"""Check-N-Run's four quantizers on the same rows: errors, and processor time of a row on one thread.

The product does not have symmetric and k-means, so they are kernels here, compiled by numba. Plain asymmetric, greedy
and adaptive are the product's own codecs, with the scales that it stores. Symmetric and k-means keep exact scales and
centroids, and their kernels do not pack codes: both are favoured.
"""

from __future__ import annotations

from collections.abc import Callable

import codecs_reference as reference
import numba
import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.codecs.encoding import section_bytes
from deltashard_checkpoint.codecs.quantizer import PLAIN, Search, encode_rows
from deltashard_checkpoint.vocabulary import ENCODINGS
from measuring import best_cpu_s

F32 = npt.NDArray[np.float32]
LOW_BITS = (2, 3, 4)
ITERATIONS = 15
PAPER_SEARCH = Search(kind="greedy", bins=25, ratio=0.6)
REFITS = [
    Search(kind="refit", starts=starts, passes=passes)
    for starts in (1, 2, 3, 4, 6, 8, 12)
    for passes in (1, 2, 3, 4)
]
TABLE_BYTES = 1e12
"""Bytes of fp32 weights of the table that hours are extrapolated to."""


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def k_means_rows(x, levels, iterations, codes, books):
    """Run Lloyd's algorithm in each row, initially uniform; centroids stay sorted, so bisection finds the nearest."""
    n, d = x.shape
    sums, counts, borders = np.empty(levels), np.empty(levels), np.empty(levels - 1)
    for r in range(n):
        row, book = x[r], books[r]
        low, high = row.min(), row.max()
        for c in range(levels):
            book[c] = low + (high - low) * c / (levels - 1)
        for turn in range(iterations + 1):
            for c in range(levels - 1):
                borders[c] = (book[c] + book[c + 1]) / 2
            sums[:], counts[:] = 0, 0
            for j in range(d):
                c = np.searchsorted(borders, row[j])
                codes[r, j] = c
                sums[c] += row[j]
                counts[c] += 1
            if turn < iterations:
                for c in range(levels):
                    if counts[c]:
                        book[c] = sums[c] / counts[c]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def symmetric_rows(x, top, codes, scales):
    """Return codes of each row, uniform over [-max|x|, max|x|] with codes 0 to `top`."""
    n, d = x.shape
    for r in range(n):
        most = np.float32(0)
        for j in range(d):
            most = max(most, abs(x[r, j]))
        scale = 2 * most / np.float32(top) if most > 0 else np.float32(1)
        scales[r] = scale
        inverse = np.float32(1) / scale
        for j in range(d):
            codes[r, j] = np.uint8((x[r, j] + most) * inverse + np.float32(0.5))


def tuned(x: F32, bits: int) -> Search:
    """Auto-tune: return the refit with the fewest passes whose error on a sample is within 1 % of the least one."""
    sample = reference.sample_of(x)
    trials = {search: reference.mean_error(sample, bits, search) for search in REFITS}
    enough = min(trials.values()) * 1.01
    found = [search for search in trials if trials[search] <= enough]
    return min(found, key=lambda search: (search.starts + search.passes, trials[search]))


def errors(x: F32, bits: int, chosen: Search) -> dict[str, float]:
    """Return the mean L2 distance of a row of `x` (float32 [n, D]) and its decoded value."""
    found = {
        "symmetric": reference.mean_l2(x, reference.symmetric(x, bits)),
        "asymmetric": reference.mean_error(x, bits, PLAIN),
        "greedy": reference.mean_error(x, bits, PAPER_SEARCH),
        "adaptive": reference.mean_error(x, bits, chosen),
    }
    if bits in LOW_BITS:
        found["k-means"] = reference.mean_l2(x, k_means(x, bits))
    return found


def k_means(x: F32, bits: int) -> npt.NDArray[np.float64]:
    v = x.astype(np.float64)
    codes, books = np.empty(x.shape, np.uint8), np.empty((len(x), 2**bits))
    k_means_rows(v, 2**bits, ITERATIONS, codes, books)
    return np.take_along_axis(books, codes.astype(np.int64), axis=1)


def latencies(x: F32, bits: int, chosen: Search, *, seconds: float) -> dict[str, float]:
    n = len(x)
    few = np.ascontiguousarray(x[: max(64, n // 64)])  # k-means is slow; each row costs the same
    codes, scales = np.empty(x.shape, np.uint8), np.empty(n, np.float32)
    books, wide = np.empty((len(few), 2**bits)), few.astype(np.float64)
    few_codes = np.empty(few.shape, np.uint8)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "symmetric": (n, lambda: symmetric_rows(x, 2**bits - 1, codes, scales)),
        "asymmetric": (n, _encoder(x, bits, PLAIN)),
        "greedy": (n, _encoder(x, bits, PAPER_SEARCH)),
        "adaptive": (n, _encoder(x, bits, chosen)),
        "k-means": (len(few), lambda: k_means_rows(wide, 2**bits, ITERATIONS, few_codes, books)),
    }
    best = best_cpu_s(seconds, {name: call for name, (_, call) in work.items()})
    return {name: best[name] / rows * 1e9 for name, (rows, _) in work.items()}


def hours(row_ns: float, columns: int) -> float:
    """Return one thread's hours for a table of `TABLE_BYTES`."""
    return TABLE_BYTES / (4 * columns) * row_ns / 3600e9


def _encoder(x: F32, bits: int, search: Search) -> Callable[[], object]:
    encoding = ENCODINGS[f"q{bits}"]
    buffers = [np.empty(size, np.uint8) for size in section_bytes(encoding, *x.shape)]
    return lambda: encode_rows(encoding, x, *buffers, search=search)
