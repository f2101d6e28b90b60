"""Evidence decays evenly, and rates follow from evidence and prior."""

import math

import pytest
from deltashard_checkpoint.deciding.evidence import (
    HALF_LIFE_S,
    MAX_RESTORE_COUNT,
    NONE,
    RESTORE_MEAN_S,
    Evidence,
    Gamma,
    lossy_prior,
    rates,
)
from hypothesis import given
from hypothesis import strategies as st

spans = st.floats(0, 100 * 86400)
evidences = st.builds(
    Evidence, exposure_s=st.floats(0, 1e7), lossy=st.floats(0, 100), restores=st.floats(0, 100)
)


def same(one: Evidence, other: Evidence) -> None:
    assert one.exposure_s == pytest.approx(other.exposure_s, rel=1e-9, abs=1e-6)
    assert one.lossy == pytest.approx(other.lossy, abs=1e-9)
    assert one.restores == pytest.approx(other.restores, abs=1e-9)


@given(evidences, spans, st.floats(0, 1))
def test_splitting_a_span_changes_nothing(seen, span_s, at):
    same(seen.after_training(span_s), seen.after_training(span_s * at).after_training(span_s * (1 - at)))


@given(evidences, evidences, spans)
def test_fading_is_linear(one, other, span_s):
    both = one.plus(other).after_training(span_s)
    same(
        both,
        one.after_training(span_s)
        .plus(other.after_training(span_s))
        .plus(_less(NONE.after_training(span_s))),
    )


def _less(seen: Evidence) -> Evidence:
    return Evidence(exposure_s=-seen.exposure_s, lossy=-seen.lossy, restores=-seen.restores)


def test_evidence_halves_per_half_life_and_exposure_is_bounded():
    seen = NONE.with_incident(lossy=True).with_incident(lossy=False).after_training(HALF_LIFE_S)
    assert (seen.lossy, seen.restores) == (0.5, 1.0)
    assert NONE.after_training(60.0).exposure_s == pytest.approx(60.0, rel=1e-3)
    assert NONE.after_training(1e12).exposure_s == pytest.approx(HALF_LIFE_S / math.log(2))
    assert NONE.after_training(-5.0) == NONE


def direct(gamma: Gamma, seconds: float, n: int) -> float:
    """Return P(incidents = n) in closed form for a Poisson process with a Gamma rate."""
    p = gamma.rate_s / (gamma.rate_s + seconds)
    return math.exp(
        math.lgamma(gamma.shape + n) - math.lgamma(gamma.shape) - math.lgamma(n + 1)
        + gamma.shape * math.log(p) + n * math.log1p(-p)
    )  # fmt: skip


@given(st.floats(0.01, 50), st.floats(10, 1e6), st.floats(1, 1e6), st.floats(0.5, 0.99))
def test_quantile_equals_direct_sum(shape, rate_s, seconds, q):
    gamma = Gamma(shape=shape, rate_s=rate_s)
    if seconds > 30 * rate_s:
        return  # a direct sum of thousands of terms
    n = gamma.quantile(seconds, q)
    below = math.fsum(direct(gamma, seconds, k) for k in range(n))
    assert below < q + 1e-9
    assert below + direct(gamma, seconds, n) >= q - 1e-9


def test_quantile_is_zero_at_zero_and_bounded_at_infinity():
    gamma = Gamma(shape=0.5, rate_s=100.0)
    assert gamma.quantile(0.0) == gamma.quantile(-1.0) == 0
    assert gamma.quantile(1e-300) == 0
    assert gamma.quantile(math.inf) == MAX_RESTORE_COUNT
    assert gamma.quantile(1e12) == MAX_RESTORE_COUNT
    assert Gamma(shape=1e6, rate_s=1e6).quantile(3.0) == 6  # a known rate: Poisson with mean 3


def test_prior_is_one_failure_in_30_days_and_observed_failures_dominate():
    for pods, hours in ((1, 720), (8, 90), (32, 22.5), (128, 5.625)):
        assert lossy_prior(pods).mean_between_s == pytest.approx(hours * 3600)
    found = rates(Evidence(exposure_s=2000 * 3600.0, lossy=200.0, restores=300.0), pods=10)
    assert found.mtbf_s == pytest.approx(10 * 3600, rel=0.1)
    assert found.restores.mean_between_s == pytest.approx(2000 * 3600 / 300, rel=0.02)
    assert rates(NONE, pods=10).restores.mean_between_s == pytest.approx(RESTORE_MEAN_S)
    # The loss of 32 pods at once is one failure: it must not turn 22 h between failures into one hour.
    assert rates(Evidence(exposure_s=90 * 3600.0).with_incident(lossy=True), pods=32).mtbf_s > 15 * 3600
