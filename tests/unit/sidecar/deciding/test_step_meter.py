"""Steps on a control line: what a quiet one takes, and what a save takes from those beside it, whenever one looks."""

from __future__ import annotations

import pytest
from deltashard_sidecar.deciding.step_meter import FEWEST_WINDOWS, Reading, StepMeter, lost_s
from hypothesis import given
from hypothesis import strategies as st


def metered(readings: list[tuple[int, float]]) -> StepMeter:
    meter = StepMeter()
    for step, at_s in readings:
        meter = meter.read(Reading(step, at_s), quiet=True)
    return meter


@given(st.lists(st.integers(1, 500), min_size=2, max_size=50), st.floats(0.001, 100.0))
def test_the_time_of_a_step_is_exact_however_many_lie_between_two_looks(
    steps: list[int], step_s: float
) -> None:
    """A reading is a step and the time at which just that one ended: no part of a step is counted."""
    at, readings = 0, []
    for each in steps:
        at += each
        readings.append((at, 1e9 + at * step_s))
    meter = metered(readings)
    seen = at - steps[0]
    assert meter.step_s == (pytest.approx(step_s, rel=1e-3) if seen >= 10 else 0.0)
    assert meter.trained_s <= seen * step_s * (1 + 1e-3)


def test_what_is_no_step_counts_for_nothing() -> None:
    """The same step again, a clock set back, a trainer that begins anew, steps beside a save."""
    meter = metered([(n, 0.1 * n) for n in range(100)])
    assert meter.read(Reading(99, 9.9), quiet=True) == meter
    assert meter.read(Reading(100, 5.0), quiet=True).windows == meter.windows
    assert meter.read(Reading(3, 20.0), quiet=True).windows == meter.windows
    beside = meter.read(Reading(100, 10.5), quiet=False)
    assert beside.windows == meter.windows
    assert beside.trained_s == pytest.approx(meter.trained_s + 0.6)


def test_a_pause_is_no_step_until_it_is_usual() -> None:
    """An evaluation of ten minutes is left out; steps that are longer from now on are found."""
    quiet = metered([(n, 0.1 * n) for n in range(100)])
    paused = quiet.read(Reading(100, 610.0), quiet=True)
    assert paused.step_s == quiet.step_s
    assert paused.trained_s == pytest.approx(quiet.trained_s + 600.0), "of a gap ten minutes count"
    meter, at_s = quiet, 9.9
    for n in range(100, 100 + FEWEST_WINDOWS + 12):
        at_s += 20.0
        meter = meter.read(Reading(n, at_s), quiet=True)
    assert meter.step_s == pytest.approx(20.0)


def test_what_a_save_took_is_the_steps_beside_it_less_quiet_ones() -> None:
    """Negative where noise makes it so; nothing where a pause or a set clock lies between."""
    since = Reading(10, 100.0)
    assert lost_s(since, Reading(20, 101.5), step_s=0.1, in_flight_s=1.0) == pytest.approx(0.5)
    assert lost_s(since, Reading(20, 100.9), step_s=0.1, in_flight_s=1.0) == pytest.approx(-0.1)
    assert lost_s(since, Reading(20, 700.0), step_s=0.1, in_flight_s=1.0) is None
    assert lost_s(since, Reading(20, 50.0), step_s=0.1, in_flight_s=1.0) is None
