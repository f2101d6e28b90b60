"""Steps on a control line: the duration of a quiet step, and what a save costs the steps during it."""

from __future__ import annotations

import pytest
from deltashard_sidecar.deciding.step_meter import MIN_WINDOWS, Reading, StepMeter, lost_s


def metered(readings: list[tuple[int, float]]) -> StepMeter:
    meter = StepMeter()
    for step, at_s in readings:
        meter = meter.read(Reading(step, at_s), quiet=True)
    return meter


def test_non_steps_are_ignored_and_pauses_until_frequent() -> None:
    """A repeated step, a clock set back, a restarted trainer, steps during a save and an evaluation are ignored."""
    meter = metered([(n, 0.1 * n) for n in range(100)])
    assert meter.read(Reading(99, 9.9), quiet=True) == meter
    for reading, quiet in ((Reading(100, 5.0), True), (Reading(3, 20.0), True), (Reading(100, 10.5), False)):
        assert meter.read(reading, quiet=quiet).windows == meter.windows
    paused = meter.read(Reading(100, 610.0), quiet=True)
    assert paused.step_s == meter.step_s
    assert paused.trained_s == pytest.approx(meter.trained_s + 600.0), "at most ten minutes of a gap count"
    for n in range(MIN_WINDOWS + 12):
        meter = meter.read(Reading(100 + n, 9.9 + 20.0 * (n + 1)), quiet=True)
    assert meter.step_s == pytest.approx(20.0)


def test_save_cost_is_step_time_above_the_baseline() -> None:
    """Noise can make the cost negative. A pause or a clock change in between gives no cost."""
    found = [
        lost_s(Reading(10, 100.0), Reading(20, at_s), step_s=0.1, in_flight_s=1.0)
        for at_s in (101.5, 100.9, 700, 50)
    ]
    assert found == [pytest.approx(0.5), pytest.approx(-0.1), None, None]
