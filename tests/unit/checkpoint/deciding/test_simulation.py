"""The simulator against exact forms: every difference is within what its own error allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from deltashard_checkpoint.deciding.interval import share, young
from deltashard_checkpoint.deciding.simulation import (
    Estimate,
    Run,
    exponential_gaps,
    full_recovery,
    gamma_gaps,
    lost_work,
    partial_recovery,
    partial_renewal_overhead,
    portions_lost,
    renewal_overhead,
    trace_gaps,
    weibull_gaps,
)

HOUR = 3600.0
MTBF_S = 20 * HOUR
CPR = Run(interval_s=young(3.7 * 60, MTBF_S), save_s=3.7 * 60, recover_s=6.6 * 60)
FAILURES = 200_000
SIGMAS = 4.0
"""A seed is given, so what holds once holds always."""


def within(found: Estimate, exact: float) -> None:
    assert found.error > 0
    assert abs(found.mean - exact) <= SIGMAS * found.error
    assert found.error <= 0.02 * abs(exact)  # else the first says nothing


def random() -> np.random.Generator:
    return np.random.default_rng(20)


def test_cprs_full_recovery_exactly():
    """8.88 %, where the first order says 8.40."""
    assert 100 * renewal_overhead(CPR, MTBF_S) == pytest.approx(8.88, abs=0.01)


@pytest.mark.parametrize(
    "run",
    [
        CPR,
        Run(interval_s=600, save_s=0.05, recover_s=300),
        Run(interval_s=600, save_s=0.05, recover_s=300, durable_s=120),
        Run(interval_s=10 * HOUR, save_s=600, recover_s=3600),
        Run(interval_s=1800, save_s=30, recover_s=0, durable_s=10),
    ],
)
def test_full_recovery_is_the_renewal_form(run):
    within(full_recovery(run, exponential_gaps(random(), MTBF_S, FAILURES)), renewal_overhead(run, MTBF_S))


def test_the_renewal_form_is_the_first_order_where_failures_are_rare():
    run = Run(interval_s=300, save_s=1, recover_s=100)
    mtbf_s = 1000 * HOUR
    assert renewal_overhead(run, mtbf_s) == pytest.approx(share(300, 1, mtbf_s) + 100 / mtbf_s, rel=0.01)


@pytest.mark.parametrize("draw", [exponential_gaps, lambda r, m, n: gamma_gaps(r, m, 0.5, n)])
def test_partial_recovery_is_its_exact_form_whatever_the_gaps(draw):
    run = Run(interval_s=72 * HOUR, save_s=222, recover_s=396)
    within(partial_recovery(run, draw(random(), MTBF_S, FAILURES)), partial_renewal_overhead(run, MTBF_S))


def test_lost_work_is_half_an_interval_and_the_time_to_durable():
    run = Run(interval_s=600, save_s=0.1, recover_s=300, durable_s=60)
    found = lost_work(run, exponential_gaps(random(), MTBF_S, FAILURES))
    assert found.mean == pytest.approx(600 / 2 + 60, abs=SIGMAS * found.error + 2)


@pytest.mark.parametrize(
    ("interval_s", "total_s"), [(4 * HOUR, 1000 * HOUR), (72 * HOUR, 7200 * HOUR), (14.4 * HOUR, 288 * HOUR)]
)
def test_expected_pls_is_its_closed_form(interval_s, total_s):
    found = portions_lost(
        random(), interval_s=interval_s, mtbf_s=MTBF_S, shards=18, total_s=total_s, runs=20_000
    )
    within(found, interval_s / (2 * MTBF_S * 18))


@pytest.mark.parametrize("draw", [gamma_gaps, weibull_gaps])
def test_gaps_have_the_mean_that_is_asked_for_and_are_exponential_at_shape_1(draw):
    gaps = draw(random(), MTBF_S, 0.7, FAILURES)
    assert gaps.mean() == pytest.approx(MTBF_S, rel=0.02)
    assert (gaps > 0).all()
    plain = draw(random(), MTBF_S, 1.0, FAILURES)
    within(full_recovery(CPR, plain), renewal_overhead(CPR, MTBF_S))


def test_failures_that_cluster_cost_less_and_regular_ones_more():
    """At the same rate: many failures of a cluster lose little, since hardly anything was trained since the last.

    Against the exponential, by many errors; so the distribution is no detail.
    """
    long = Run(interval_s=10 * HOUR, save_s=60, recover_s=60)
    clustered = full_recovery(long, gamma_gaps(random(), MTBF_S, 0.4, FAILURES))
    regular = full_recovery(long, gamma_gaps(random(), MTBF_S, 4.0, FAILURES))
    exact = renewal_overhead(long, MTBF_S)
    assert clustered.mean + SIGMAS * clustered.error < exact
    assert regular.mean != pytest.approx(exact, abs=SIGMAS * regular.error)


def test_a_traces_gaps_are_scaled_to_the_mean_that_is_believed():
    seen = np.array([1.0, 2.0, 6.0])
    gaps = trace_gaps(random(), seen, 30.0, 90_000)
    assert set(np.unique(gaps)) == {10.0, 20.0, 60.0}
    assert gaps.mean() == pytest.approx(30.0, rel=0.02)


def test_where_no_checkpoint_is_ever_reached_the_overhead_is_infinite():
    run = Run(interval_s=1e9, save_s=1, recover_s=1)
    assert full_recovery(run, np.array([10.0, 20.0])) == Estimate(mean=math.inf, error=math.inf)
    assert renewal_overhead(run, 100.0) == math.inf
    assert lost_work(run, np.array([10.0, 20.0])).mean == 15.0


def test_one_gap_has_no_error():
    run = Run(interval_s=10, save_s=0, recover_s=5)
    assert full_recovery(run, np.array([35.0])) == Estimate(mean=40 / 30 - 1, error=math.inf)
    assert lost_work(run, np.array([35.0])) == Estimate(mean=5.0, error=math.inf)


def test_the_same_seed_gives_the_same_figures():
    one, other = (full_recovery(CPR, exponential_gaps(random(), MTBF_S, 100)) for _ in range(2))
    assert one == other
