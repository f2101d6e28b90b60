"""Step times, measured from readings of the trainer's control line: a step, and when it ended. Pure.

A line is read at arbitrary times, so a reading has the newest step that has ended. Between two readings is a whole
number of steps, so no fraction of a step distorts the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

MAX_WINDOWS = 256  # quiet windows to keep: those nearest to the current save
MIN_STEPS = 10  # fewest steps for a mean
PAUSE_FACTOR = 10.0
"""A window that took this many times the usual time was a pause (an evaluation, an export)."""
MIN_PAUSE_S = 1.0
MIN_WINDOWS = 8
"""Fewest windows for a usual time; this number of consecutive odd windows replaces it."""
MAX_WINDOW_S = 600.0
"""Longest training time between two readings; any excess was no training (a suspended laptop, a clock change)."""


class Reading(NamedTuple):
    """One reading of a control line."""

    step: int
    at_s: float
    """When that step ended, Unix seconds."""


class Window(NamedTuple):
    """Steps and time between two readings."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeter:
    """Step times of one trainer, from its readings in order."""

    last: Reading | None = None
    windows: tuple[Window, ...] = ()
    """Quiet windows, in which no save was in flight, oldest first."""
    odd: int = 0
    trained_s: float = 0.0
    """Seconds of training, including saves and pauses."""

    def read(self, reading: Reading, *, quiet: bool) -> Self:
        if self.last is None or reading.step < self.last.step:
            return replace(self, last=reading)
        window = Window(reading.step - self.last.step, reading.at_s - self.last.at_s)
        if window.steps == 0:
            return self
        after = replace(self, last=reading)
        if window.seconds <= 0:  # the clock was changed
            return after
        after = replace(after, trained_s=after.trained_s + min(window.seconds, MAX_WINDOW_S))
        if not quiet:
            return after
        if not self._is_pause(window):
            return replace(after, windows=(*self.windows, window)[-MAX_WINDOWS:], odd=0)
        if self.odd + 1 < MIN_WINDOWS:
            return replace(after, odd=self.odd + 1)
        return replace(after, windows=(window,), odd=0)

    def _is_pause(self, window: Window) -> bool:
        usual_s = self.step_s if len(self.windows) >= MIN_WINDOWS else 0.0
        return 0 < PAUSE_FACTOR * usual_s * window.steps < window.seconds > MIN_PAUSE_S

    @property
    def step_s(self) -> float:
        """Mean seconds of a quiet step; 0: too few steps were measured."""
        steps = sum(each.steps for each in self.windows)
        return sum(each.seconds for each in self.windows) / steps if steps >= MIN_STEPS else 0.0


def lost_s(since: Reading, until: Reading, *, step_s: float, in_flight_s: float) -> float | None:
    """Return the excess seconds of the steps between two readings over quiet ones; None: not the save's alone.

    The readings are the step of the save, and the first step that ended after its commit. The result may be negative:
    noise clipped at 0 would add up to a cost. A save cannot cost more than its time in flight, and noise hardly exceeds
    the steps themselves. An excess beyond both has another reason: other work blocked training, or the clock changed.
    """
    quiet_s = (until.step - since.step) * step_s
    lost = until.at_s - since.at_s - quiet_s
    return lost if abs(lost) <= in_flight_s + quiet_s else None
