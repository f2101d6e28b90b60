"""The load tests' arithmetic."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.load.simulation import measure


def test_quantiles_are_samples() -> None:
    """By nearest rank, in any order; of nothing there is none."""
    samples = [float(n) for n in range(100, 0, -1)]
    assert [measure.quantile(samples, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert measure.quantile([7.0], 0.99) == 7.0
    assert math.isnan(measure.quantile([], 0.5))


def test_pages_are_read_by_name_and_labels() -> None:
    """Sums over the series asked for; a histogram's difference is what came between two pages."""
    registry = CollectorRegistry()
    counter = Counter("asked", "x", ("outcome", "source"), registry=registry)
    times = Histogram("took_seconds", "x", ("kind",), buckets=(1.0, 2.0, 4.0), registry=registry)
    counter.labels("good", "api").inc(3)
    counter.labels("good", "cache").inc(4)
    counter.labels("bad", "api").inc(5)
    times.labels("job").observe(3.5)
    before = generate_latest(registry).decode()
    assert measure.value(before, "asked_total", outcome="good") == 7
    assert measure.value(before, "asked_total") == 12
    assert measure.value(before, "nobody_total") == 0
    for seconds in (0.5, 1.5, 1.5, 100.0):
        times.labels("job").observe(seconds)
    times.labels("pod").observe(0.1)
    after = generate_latest(registry).decode()
    came = measure.histogram(after, "took_seconds", kind="job").since(
        measure.histogram(before, "took_seconds", kind="job")
    )
    assert came.count == 4
    assert came.quantile(0.25) == pytest.approx(1.0)
    assert came.quantile(0.5) == pytest.approx(1.5)
    assert came.quantile(1.0) == 4.0, "the last bound that is finite"
    assert math.isnan(measure.histogram(after, "took_seconds", kind="x").quantile(0.5))
