"""Quantiles of samples and of Prometheus text pages, by pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


def quantile(samples: Iterable[float], q: float) -> float:
    """Return the q-quantile by the nearest rank, which is one of the samples; NaN without samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def value(page: str, name: str, /, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels; 0 without samples."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Cumulative counts by upper bound, as in Prometheus."""

    bounds: Sequence[tuple[float, float]]
    """(upper bound, count of values not above it), bounds rising; the last is infinite."""

    @property
    def count(self) -> float:
        return self.bounds[-1][1] if self.bounds else 0.0

    def since(self, before: Histogram) -> Histogram:
        then = dict(before.bounds)
        return Histogram(bounds=[(bound, count - then.get(bound, 0.0)) for bound, count in self.bounds])

    def quantile(self, q: float) -> float:
        """Estimate the quantile linearly within its bucket, like Prometheus' histogram_quantile; NaN if empty."""
        if not self.count:
            return math.nan
        rank, low, below = q * self.count, 0.0, 0.0
        for bound, count in self.bounds:
            if count >= rank and count > below:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return low


def histogram(page: str, name: str, /, **labels: str) -> Histogram:
    """Return a histogram of a page, summed over all its series that have these labels."""
    counts: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return Histogram(bounds=sorted(counts.items()))


def spread(samples: Mapping[str, float] | Sequence[float]) -> dict[str, float]:
    values = list(samples.values()) if isinstance(samples, Mapping) else list(samples)
    return {
        "p50": quantile(values, 0.5),
        "p99": quantile(values, 0.99),
        "max": max(values, default=math.nan),
        "n": len(values),
    }
