"""A training's lookups as in production: which rows an interval changes, and how often each is looked up.

*Which*: a hot set that every interval changes, and as many rows drawn repeatedly from a pool. Of N rows, after k
intervals, from any starting interval:

    S_k = hot + pool * (1 - (1 - drawn / pool)^k),   hot + drawn = .26

With the three shares below S is .26 .31 .35 .387 .417 .442 .463 (Check-N-Run, NSDI'22, reports 26 % an interval), and
.52 after eleven, which the paper also reports and which was not fitted.

*How often*: a histogram that Meta published with its lookups (facebookresearch/dlrm_datasets): of all rows that one
batch of all tables looks up, which share is looked up once, twice, three or four times, and so on. Bytes of a
checkpoint depend on *which* alone; *how often* makes the rows' values those of a training, hot rows in small steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HOT, POOL, DRAWN = 0.2005, 0.372, 0.0595
S = (0.26, 0.31, 0.35, 0.385, 0.415, 0.44, 0.46)
"""Target shares of rows changed since the baseline, after 1, 2, ... intervals."""
OPEN_END = 2.0
"""The last bin, of more than 32,768 lookups, is assumed to end at this multiple of it."""

LOCALITY = {
    "2021": {
        "rows": (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, 0, 0, 0, 0, 0, 0, 0),
        "lookups": (
            0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048, 0.043,
            0.031, 0.023, 0.019,
        ),
        "mean": 6.9,
    },
    "2022": {
        "rows": (0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001, 0, 0, 0, 0, 0),
        "lookups": (
            0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054, 0.040, 0.072, 0.064, 0.047,
            0.021, 0.017, 0.076,
        ),
        "mean": 12.7,
    },
}  # fmt: skip
"""fbgemm_t856_bs65536 and fbgemm_t788_bs131072_0: shares of rows and of lookups by lookups of a row, in bins of
(2^(i-1), 2^i], and the mean. As published, to three digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How often rows are looked up: one bin for each power of two, the first one of rows looked up once."""

    rows: npt.NDArray[np.float64]
    """Share of the rows of each bin; sums to 1."""
    lookups: npt.NDArray[np.float64]
    """Share of the lookups of each bin; sums to 1."""
    mean: float
    """Lookups of a row."""

    @classmethod
    def published(cls, year: str) -> Locality:
        """Return one of `LOCALITY`. Bins with too few rows for three digits get their share from their lookups."""
        known = LOCALITY[year]
        rows, lookups = np.array(known["rows"], np.float64), np.array(known["lookups"], np.float64)
        mean = float(known["mean"])  # type: ignore[arg-type]
        few = rows < 0.0015
        rows[few] = (lookups * mean / typical())[few]
        return cls(rows=rows / rows.sum(), lookups=lookups / lookups.sum(), mean=mean)

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64]) -> Locality:
        bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), len(typical()) - 1)
        rows = np.bincount(bins, minlength=len(typical()))
        lookups = np.bincount(bins, counts, minlength=len(typical()))
        return cls(rows=rows / rows.sum(), lookups=lookups / lookups.sum(), mean=float(counts.mean()))

    def distance(self, other: Locality) -> tuple[float, float]:
        """Return the total variation between row shares and between lookup shares: 0 equal, 1 disjoint."""
        return (
            float(np.abs(self.rows - other.rows).sum() / 2),
            float(np.abs(self.lookups - other.lookups).sum() / 2),
        )


def typical() -> npt.NDArray[np.float64]:
    """Return each bin's lookups of a row: the middle of its whole numbers on a logarithmic scale."""
    high = np.array([1 << i for i in range(16)] + [int(OPEN_END * (1 << 15))], np.float64)
    low = np.concatenate([[1.0], high[:-1] + 1])
    return np.sqrt(low * high)


def lookups_of(rows: int, locality: Locality, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return lookups (int64 [rows]) in descending order whose histogram is that of `locality`.

    Every bin gets its share of the rows, within one. Within a bin counts are spread evenly between its ends, by a power
    that gives the bin the mean of its lookups.
    """
    edges = np.round(np.cumsum(locality.rows) * rows).astype(np.int64)
    counts = np.ones(rows, np.int64)
    for i in range(1, len(edges)):
        first, last = edges[i - 1], edges[i]
        low, high = (1 << (i - 1)) + 1, 1 << i if i < 16 else int(OPEN_END * (1 << 15))
        if last > first:
            wanted = locality.lookups[i] * locality.mean / locality.rows[i]
            share = np.clip((wanted - low) / max(high - low, 1), 0.02, 0.98)
            spread = rng.random(last - first) ** (1 / share - 1)  # of mean `share`
            counts[first:last] = np.rint(low + (high - low) * spread)
    return np.sort(counts)[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLookups:
    """The lookups of one interval."""

    ids: npt.NDArray[np.int64]
    """Rows, ascending, without repeats."""
    counts: npt.NDArray[np.int64]


def intervals(rows: int, count: int, locality: Locality, seed: int = 0) -> Iterator[IntervalLookups]:
    """Return `count` intervals of a table of `rows` rows. Rows in every interval are looked up most."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows)
    hot, pool = order[: round(rows * HOT)], order[round(rows * HOT) : round(rows * (HOT + POOL))]
    for _ in range(count):
        drawn = rng.choice(pool, round(rows * DRAWN), replace=False)
        touched = np.concatenate([hot, drawn])
        looked_up = lookups_of(len(touched), locality, rng)
        by_row = np.argsort(touched)
        yield IntervalLookups(ids=touched[by_row].astype(np.int64), counts=looked_up[by_row])


def growth(rows: int, locality: Locality, most: int = 11) -> list[float]:
    """Return the share of the rows changed in the first 1, 2, ... intervals of such a table."""
    seen = np.zeros(rows, np.bool_)
    shares = []
    for interval in intervals(rows, most, locality):
        seen[interval.ids] = True
        shares.append(float(seen.mean()))
    return shares
