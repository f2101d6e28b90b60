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


def test_the_histogram_counts_by_powers_of_two(papers):
    reuse = papers("reuse")
    made = reuse.Locality.of(np.array([1, 1, 2, 3, 4, 5, 32_768, 32_769, 10**6]))
    assert [round(share * 9) for share in made.rows] == [2, 1, 2, 1] + [0] * 11 + [1, 2]
    assert made.distance(made) == (0, 0)
    other = reuse.Locality.of(np.array([64]))
    assert made.distance(other) == (pytest.approx(1), pytest.approx(1))


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


def test_rows_of_every_interval_are_looked_up_most_evenly(papers):
    """Which rows an interval looks up most are those that all intervals touch."""
    reuse = papers("reuse")
    one, other = reuse.intervals(20_000, 2, reuse.Locality.published("2022"))
    hot = np.intersect1d(one.ids[one.counts > 4], other.ids)
    assert len(hot) > 0.99 * (one.counts > 4).sum()
