"""How long steps take, from what the trainer's control line shows: a step, and when it ended. Pure.

A line is read whenever it suits, so a reading tells the newest step that is over. Between two readings lie whole steps
and nothing else, whatever their number: what is computed of them is off by no part of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

MAX_WINDOWS = 256  # quiet windows that are remembered: what lies next to a save
MIN_STEPS = 10  # steps before their mean is one
PAUSE_FACTOR = 10.0
"""So many times as long as is usual: no step but a pause (an evaluation, an export)."""
MIN_PAUSE_S = 1.0
MIN_WINDOWS = 8
"""Windows before anything is usual; as many odd ones in a row are the new usual."""
MAX_WINDOW_S = 600.0
"""Between two readings, of which more was no training (a suspended laptop, a clock that was set)."""


class Reading(NamedTuple):
    """One look at a control line."""

    step: int
    at_s: float
    """When that step ended, Unix seconds."""


class Window(NamedTuple):
    """What lies between two readings."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeter:
    """Readings of one trainer, in order."""

    last: Reading | None = None
    windows: tuple[Window, ...] = ()
    """Quiet ones, oldest first: no save was in flight."""
    odd: int = 0
    """Windows in a row that were left out as pauses."""
    trained_s: float = 0.0
    """Seconds in which steps ended, saves and pauses included."""

    def read(self, reading: Reading, *, quiet: bool) -> Self:
        if self.last is None or reading.step < self.last.step:
            return replace(self, last=reading)
        window = Window(reading.step - self.last.step, reading.at_s - self.last.at_s)
        if window.steps == 0:
            return self
        after = replace(self, last=reading)
        if window.seconds <= 0:  # the clock was set
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
        """Of a quiet step, the mean; 0: too few were seen."""
        steps = sum(each.steps for each in self.windows)
        return sum(each.seconds for each in self.windows) / steps if steps >= MIN_STEPS else 0.0


def lost_s(since: Reading, until: Reading, *, step_s: float, in_flight_s: float) -> float | None:
    """Seconds by which the steps between two readings took longer than quiet ones; None: not by the save alone.

    From the step that was cut to the first one that ended after the commit. It may be negative, and has to be: noise
    that is cut off at 0 would add up to a cost. A save that was in flight for so long cannot have cost more than that,
    and noise hardly another as much as the steps themselves: then something else held training, or the clock was set.
    """
    quiet_s = (until.step - since.step) * step_s
    lost = until.at_s - since.at_s - quiet_s
    return lost if abs(lost) <= in_flight_s + quiet_s else None
