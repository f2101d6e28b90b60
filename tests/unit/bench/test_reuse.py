"""The trace of `make papers` touches rows as Check-N-Run reports it, and as often as Meta's histograms say."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("year", ["2021", "2022"])
def test_lookups_have_the_published_histogram(papers, year):
    """Rows exactly, lookups nearly: the hottest rows are too few in a table of this size."""
    reuse = papers("reuse")
    wanted = reuse.Locality.published(year)
    assert wanted.rows.sum() == pytest.approx(1)
    made = reuse.Locality.of(reuse.lookups_of(200_000, wanted, np.random.default_rng(1)))
    by_rows, by_lookups = made.distance(wanted)
    assert by_rows < 0.001
    assert by_lookups < 0.08
    assert made.mean == pytest.approx(wanted.mean, rel=0.05)


@pytest.mark.parametrize("since", [0, 6], ids=["from the start", "whenever one starts to count"])
def test_rows_changed_since_a_baseline_grow_as_reported(papers, since):
    reuse = papers("reuse")
    seen = np.zeros(30_000, np.bool_)
    growth = []
    for i, interval in enumerate(reuse.intervals(len(seen), since + 11, reuse.Locality.published("2021"))):
        assert (np.diff(interval.ids) > 0).all()
        assert interval.counts.min() >= 1
        if i >= since:
            seen[interval.ids] = True
            growth.append(seen.mean())
    assert growth[:7] == pytest.approx(reuse.S, abs=0.008)
    assert growth[10] == pytest.approx(0.52, abs=0.01)
