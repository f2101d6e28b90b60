"""Auto-tune: the cheapest range search on the error plateau, chosen on a small sample of a table's rows.

Check-N-Run quantizes a uniform sample of 0.001 % of the rows over a grid of (bins, ratio), takes the cheapest pair
whose error is as good as the best, and keeps it for the whole checkpoint. This is that, over refits as well as greedy
searches. Everything is a pure function of the sample: cost is counted in passes over a row, never timed, so every
rank that sees the same sample chooses the same search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs.decoder import decode_rows
from deltashard_checkpoint.codecs.encoding import EncodingError, dtype_name, section_bytes
from deltashard_checkpoint.codecs.quantizer import PLAIN, Search, encode_rows, widened
from deltashard_checkpoint.vocabulary import Encoding

SAMPLE_FRACTION = 1e-5
SAMPLE_ROWS = 4096
"""At least this many rows are sampled (all, of a smaller table)."""

REFITS: tuple[Search, ...] = tuple(
    Search(kind="refit", starts=starts, passes=passes)
    for starts in (1, 2, 3, 4, 6, 8, 12)
    for passes in (1, 2, 3, 4)
)
GREEDIES: tuple[Search, ...] = tuple(
    Search(kind="greedy", bins=bins, ratio=ratio)
    for bins in (10, 25, 45, 100, 200)
    for ratio in (0.16, 0.2, 0.4, 0.6, 0.8)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One search tried on the sample."""

    search: Search
    error: float
    """Mean L2 error of a sampled row."""
    passes: int
    """Cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen, and all that was tried, cheapest first."""

    search: Search
    trials: tuple[Trial, ...]


def sample_positions(rows: int, seed: int, least: int = SAMPLE_ROWS) -> npt.NDArray[np.int64]:
    """Ascending positions of a uniform sample of a table's rows, without repeats: 0.001 %, at least `least`. int64."""
    wanted = min(rows, max(least, int(rows * SAMPLE_FRACTION)))
    generator = np.random.default_rng(seed)
    return np.sort(generator.choice(rows, wanted, replace=False, shuffle=False)).astype(np.int64)


def search_passes(search: Search) -> int:
    """Passes over a row that a search makes beyond plain quantization."""
    if search.kind == "greedy":
        return 2 * int(search.bins * search.ratio + 1e-6) + 1
    return search.starts + search.passes - 1 if search.kind == "refit" else 0


def mean_error(
    encoding: Encoding, weights: npt.NDArray[np.generic], search: Search, *, dtype: str | None = None
) -> float:
    """Mean L2 distance between finite rows and what is restored of them; 0 for a block the encoding does not fit."""
    restored_rows = _restored(encoding, weights, search, dtype=dtype)
    if restored_rows is None or not len(restored_rows[0]):
        return 0.0
    exact, restored = restored_rows
    return float(np.sqrt(((restored - exact) ** 2).sum(axis=1)).mean())


def relative_error(
    encoding: Encoding, weights: npt.NDArray[np.generic], *, dtype: str | None = None
) -> float | None:
    """sqrt(sum |x - x'|^2 / sum |x|^2) over finite rows x and what a save and a restore make of them, x'.

    None where there is nothing to compare: no row but zeros, or a block that the encoding does not fit.
    """
    restored_rows = _restored(encoding, weights, None, dtype=dtype)
    if restored_rows is None:
        return None
    exact, restored = restored_rows
    norm = float((exact**2).sum())
    return math.sqrt(float(((restored - exact) ** 2).sum()) / norm) if norm else None


def _restored(
    encoding: Encoding, weights: npt.NDArray[np.generic], search: Search | None, *, dtype: str | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """(finite rows, what is restored of them), float64 [m, D]; None for a block the encoding does not fit."""
    n, d = weights.shape
    scales, biases, codes = (np.empty(size, np.uint8) for size in section_bytes(encoding, n, d))
    encoded = encode_rows(encoding, weights, scales, biases, codes, dtype=dtype, search=search)
    if not encoded.fits:
        return None
    exact = widened(weights, dtype_name(weights, dtype)).astype(np.float64)
    restored = decode_rows(
        encoding,
        scales,
        biases,
        codes,
        encoded.exponent,
        rows=n,
        columns=d,
        exceptions=encoded.exceptions,
        dtype="float64",
    )
    finite = np.isfinite(exact).all(axis=1)
    return exact[finite], restored[finite].astype(np.float64)


def tune(
    encoding: Encoding,
    sample: npt.NDArray[np.generic],
    *,
    dtype: str | None = None,
    candidates: Sequence[Search] = (PLAIN, *REFITS),
    plateau: float = 0.01,
) -> Tuning:
    """The candidate with the fewest passes whose mean error is within `plateau` of the least error of all.

    Args:
        encoding: a quantized one.
        sample: C-contiguous rows [n, D] of one table.
        dtype: of the sample, where the array cannot say it.
        candidates: searches to try. `(PLAIN, *GREEDIES)` is the grid of the paper.
        plateau: relative error that is given away for speed.

    Raises:
        EncodingError: a raw encoding, no candidate, or an empty sample.
    """
    if not encoding.quantized or not len(sample) or not candidates:
        raise EncodingError(
            f"nothing to tune: {encoding.name}, {len(sample)} rows, {len(candidates)} candidates"
        )
    trials = sorted(
        (
            Trial(search=s, error=mean_error(encoding, sample, s, dtype=dtype), passes=search_passes(s))
            for s in candidates
        ),
        key=lambda t: (t.passes, t.error),
    )
    enough = min(t.error for t in trials) * (1 + plateau)
    chosen = next(t for t in trials if t.error <= enough)
    return Tuning(search=chosen.search, trials=tuple(trials))
