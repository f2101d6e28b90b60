"""Measures are the moments of their samples; a recorded profile is read back or refused."""

import json
import statistics
from functools import reduce

import pytest
from deltashard_checkpoint.deciding.cost import (
    MAX_TEXT,
    TAIL_SAMPLES,
    BadProfile,
    Measure,
    Profile,
    parse_metadata,
)
from hypothesis import given
from hypothesis import strategies as st

finite = st.floats(-1e6, 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["n", "mean", "squares", "newest", "x"]), inner, max_size=4)
    ),
    max_leaves=10,
)


def measure(values: list[float]) -> Measure:
    return reduce(Measure.with_sample, values, Measure())


measures = st.lists(finite, max_size=40).map(measure)
KINDS = ("save", "stall", "durable", "restore", "reschedule")
profiles = st.builds(
    Profile, key=st.text(max_size=200), step_s=st.floats(0, 1e4), **dict.fromkeys(KINDS, measures)
)


@given(st.lists(finite, min_size=2, max_size=60))
def test_moments(values):
    found = measure(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.error**2 * len(values) == pytest.approx(statistics.variance(values), rel=1e-6, abs=1e-4)
    assert found.newest == tuple(values[-TAIL_SAMPLES:])
    assert found.p95 in values


def test_non_finite_samples_are_ignored_and_few_samples_have_no_error():
    once = measure([1.0])
    assert once.with_sample(float("nan")) is once.with_sample(float("inf")) is once
    assert once.error == Measure().error == float("inf")
    assert Measure().p95 == 0.0
    assert measure([float(n) for n in range(1, 21)]).p95 == 19.0


@given(profiles)
def test_profile_round_trips(profile):
    assert parse_metadata(profile.text()) == profile


def test_longest_profile_is_within_its_size_limit():
    worst = measure([-1.2345678901234567e-300 * n for n in range(1, 50)])
    profile = Profile(key="k" * 512, step_s=0.1, **dict.fromkeys(KINDS, worst))
    assert len(profile.text()) <= MAX_TEXT


@given(
    st.text()
    | json_values.map(json.dumps)
    | profiles.flatmap(lambda p: st.integers(0, 80).map(lambda n: p.text()[:n]))
)
def test_garbage_raises_bad_profile_only(text):
    with pytest.raises(BadProfile):
        parse_metadata(text)


def test_history_reset_keeps_the_newest_sample():
    again = Profile(save=measure([1.0, 2.0, 3.0]), stall=measure([0.5])).with_cost_reset()
    assert (again.save.n, again.save.newest, again.stall) == (0, (3.0,), measure([0.5]))
