"""The share of rows touched: through what is known, always growing, never above all."""

from __future__ import annotations

import pytest
from deltashard_cli.planning.growth import EXPONENT, PAPER, fitted
from hypothesis import given
from hypothesis import strategies as st

shares = st.floats(1e-4, 0.999)
times = st.floats(1, 1e6)
INCREMENTS = (0.26, 0.31, 0.35, 0.385, 0.415, 0.44, 0.46)


@given(times, shares)
def test_one_point_is_gone_through(seconds, share):
    growth = fitted([(seconds, share)])
    assert growth.exponent == EXPONENT
    assert growth.touched(seconds) == pytest.approx(share)


@given(times, shares, st.floats(2, 100), shares, times)
def test_it_grows_and_stays_a_share(seconds, share, later, more, at):
    growth = fitted([(seconds, share), (seconds * later, more)])
    assert 0 <= growth.touched(at) <= growth.touched(2 * at) <= 1
    assert growth.touched(0) == growth.touched(-1) == 0


def test_two_points_are_gone_through():
    growth = fitted([(60.0, 0.05), (3600.0, 0.4)])
    assert growth.touched(60) == pytest.approx(0.05)
    assert growth.touched(3600) == pytest.approx(0.4)


def test_check_n_runs_increments():
    growth = fitted([PAPER])
    for at, share in enumerate(INCREMENTS, 1):
        assert growth.touched(1800 * at) == pytest.approx(share, abs=0.015)


def test_points_of_one_time_are_averaged_and_none_is_the_papers():
    assert fitted([(60.0, 0.1), (66.0, 0.12)]).exponent == EXPONENT
    assert fitted([]) == fitted([PAPER])
    assert fitted([(60.0, 0.0), (60.0, 1.0)]).touched(60) > 0
