"""The simulator against exact forms: every difference is within what its own error allows."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.deciding.interval import share, young

_FILE = Path(__file__).parents[3] / "bench" / "papers" / "simulation.py"
_SPEC = importlib.util.spec_from_file_location("papers_simulation", _FILE)
simulation = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = simulation  # its dataclasses look there
_SPEC.loader.exec_module(simulation)

HOUR = 3600.0
MTBF_S = 20 * HOUR
CPR = simulation.Run(interval_s=young(3.7 * 60, MTBF_S), save_s=3.7 * 60, recover_s=6.6 * 60)
FAILURES = 200_000
SIGMAS = 4.0
"""A seed is given, so what holds once holds always."""


def within(found, exact: float) -> None:
    assert found.error > 0
    assert abs(found.mean - exact) <= SIGMAS * found.error
    assert found.error <= 0.02 * abs(exact)  # else the first says nothing


def random() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.mark.parametrize(
    "run",
    [
        CPR,
        simulation.Run(interval_s=600, save_s=0.05, recover_s=300),
        simulation.Run(interval_s=10 * HOUR, save_s=600, recover_s=3600),
        simulation.Run(interval_s=1800, save_s=30, recover_s=0),
    ],
)
def test_full_recovery_is_the_renewal_form(run):
    within(
        simulation.full_recovery(run, simulation.exponential_gaps(random(), MTBF_S, FAILURES)),
        simulation.renewal_overhead(run, MTBF_S),
    )


def test_the_renewal_form_is_the_first_order_where_failures_are_rare():
    run = simulation.Run(interval_s=300, save_s=1, recover_s=100)
    mtbf_s = 1000 * HOUR
    assert simulation.renewal_overhead(run, mtbf_s) == pytest.approx(
        share(300, 1, mtbf_s) + 100 / mtbf_s, rel=0.01
    )


@pytest.mark.parametrize(
    "draw", [simulation.exponential_gaps, lambda r, m, n: simulation.gamma_gaps(r, m, 0.5, n)]
)
def test_partial_recovery_is_its_exact_form_whatever_the_gaps(draw):
    run = simulation.Run(interval_s=72 * HOUR, save_s=222, recover_s=396)
    within(
        simulation.partial_recovery(run, draw(random(), MTBF_S, FAILURES)),
        simulation.partial_renewal_overhead(run, MTBF_S),
    )


@pytest.mark.parametrize(
    ("interval_s", "total_s"), [(4 * HOUR, 1000 * HOUR), (72 * HOUR, 7200 * HOUR), (14.4 * HOUR, 288 * HOUR)]
)
def test_expected_pls_is_its_closed_form(interval_s, total_s):
    found = simulation.portions_lost(
        random(), interval_s=interval_s, mtbf_s=MTBF_S, shards=18, total_s=total_s, runs=20_000
    )
    within(found, interval_s / (2 * MTBF_S * 18))


@pytest.mark.parametrize("draw", [simulation.gamma_gaps, simulation.weibull_gaps])
def test_gaps_have_the_mean_that_is_asked_for_and_are_exponential_at_shape_1(draw):
    gaps = draw(random(), MTBF_S, 0.7, FAILURES)
    assert gaps.mean() == pytest.approx(MTBF_S, rel=0.02)
    assert (gaps > 0).all()
    plain = draw(random(), MTBF_S, 1.0, FAILURES)
    within(simulation.full_recovery(CPR, plain), simulation.renewal_overhead(CPR, MTBF_S))


def test_where_no_checkpoint_is_ever_reached_the_overhead_is_infinite():
    run = simulation.Run(interval_s=1e9, save_s=1, recover_s=1)
    assert simulation.full_recovery(run, np.array([10.0, 20.0])) == simulation.Estimate(
        mean=math.inf, error=math.inf
    )
    assert simulation.renewal_overhead(run, 100.0) == math.inf
