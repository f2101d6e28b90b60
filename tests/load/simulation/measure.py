"""Figures out of samples and of Prometheus' text pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


def quantile(samples: Iterable[float], q: float) -> float:
    """The q-quantile by the nearest rank: one of the samples; NaN of none."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def value(page: str, name: str, /, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0 of none."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Cumulative counts by upper bound, as Prometheus has them."""

    bounds: Sequence[tuple[float, float]]
    """(upper bound, how many were not above it), bounds rising; the last is infinite."""

    @property
    def count(self) -> float:
        return self.bounds[-1][1] if self.bounds else 0.0

    def since(self, before: Histogram) -> Histogram:
        """What came after `before`."""
        then = dict(before.bounds)
        return Histogram(bounds=[(bound, count - then.get(bound, 0.0)) for bound, count in self.bounds])

    def quantile(self, q: float) -> float:
        """An estimate, linear within its bucket, as Prometheus' histogram_quantile; NaN of none."""
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
    """A histogram of a page: the sum of all its series that have these labels."""
    counts: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return Histogram(bounds=sorted(counts.items()))


def spread(samples: Mapping[str, float] | Sequence[float]) -> dict[str, float]:
    """p50, p99 and the worst of samples, for a report."""
    values = list(samples.values()) if isinstance(samples, Mapping) else list(samples)
    return {
        "p50": quantile(values, 0.5),
        "p99": quantile(values, 0.99),
        "max": max(values, default=math.nan),
        "n": len(values),
    }
