"""Measured costs of saves: means with standard errors, a tail, and the profile stored in commits. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltashard_checkpoint.errors import UserError

TAIL_SAMPLES = 20
"""Number of newest samples kept for the tail."""
KEY = "deltashard/profile"
"""Key of the profile in a commit's metadata."""
MAX_TEXT = 4096
MAX_NUMBER = 1e12
"""Upper bound of recorded counts and seconds."""


class BadProfile(UserError):
    """A recorded profile cannot be parsed; profiling starts from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A quantity in seconds, sampled once per save (Welford's running moments, and the newest samples)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    newest: tuple[float, ...] = ()

    def with_sample(self, value: float) -> Measure:
        """Return the measure with one more sample; ignores values that are not finite."""
        if not math.isfinite(value):
            return self
        n = self.n + 1
        delta = value - self.mean
        mean = self.mean + delta / n
        return Measure(
            n=n,
            mean=mean,
            squares=self.squares + delta * (value - mean),
            newest=(*self.newest, value)[-TAIL_SAMPLES:],
        )

    def within(self, most: int) -> Measure:
        """Return the measure with a weight of at most `most` samples, so that the mean follows changes.

        From then on each new sample has weight 1 / `most` and older ones fade. Such a mean is as exact as that of twice
        as many samples, so `error`, which counts `most`, is conservative.
        """
        if self.n <= most:
            return self
        return replace(self, n=most, squares=self.squares * (most - 1) / (self.n - 1))

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite for fewer than two samples."""
        return math.sqrt(self.squares / (self.n - 1) / self.n) if self.n > 1 else math.inf

    @property
    def p95(self) -> float:
        """95th percentile of the newest samples; 0 without samples."""
        if not self.newest:
            return 0.0
        return sorted(self.newest)[math.ceil(0.95 * len(self.newest)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of a run with one image, node type and world size."""

    key: str = ""
    """Identifies image, node type and world size; profiles with another key are ignored."""
    step_s: float = 0.0
    """Duration of an ordinary step; 0: not measured."""
    save: Measure = field(default_factory=Measure)
    """Trainer seconds per save: its stall (of the slowest rank) and the slowdown while it is in flight."""
    stall: Measure = field(default_factory=Measure)
    durable: Measure = field(default_factory=Measure)
    """From trigger to durable commit."""
    restore: Measure = field(default_factory=Measure)
    """From open to the first step."""
    reschedule: Measure = field(default_factory=Measure)
    """From the end of one trainer to the Attach of the next."""

    def with_cost_reset(self) -> Profile:
        """Reset the cost history, because the interval or the cost of a save has changed."""
        return replace(self, save=Measure(newest=self.save.newest[-1:]))

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> Profile:
    """Parse the profile in a commit's metadata, which is untrusted; raises `BadProfile`."""
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])  # longer text was truncated and is not JSON
        measures = {
            name: Measure(
                n=_count(each["n"]),
                mean=number(each["mean"]),
                squares=not_negative(each["squares"], most=MAX_NUMBER**2),
                newest=tuple(map(number, each["newest"]))[-TAIL_SAMPLES:],
            )
            for name in ("save", "stall", "durable", "restore", "reschedule")
            for each in (found[name],)
        }
        return Profile(key=str(found["key"]), step_s=not_negative(found["step_s"]), **measures)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise BadProfile("the recorded profile cannot be read", where=KEY) from None


def number(value: object, most: float = MAX_NUMBER) -> float:
    """Return a number of a recorded document; raises `ValueError` for other values and for magnitudes above `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= most:  # nor is NaN
        raise ValueError(value)
    return float(value)


def not_negative(value: object, most: float = MAX_NUMBER) -> float:
    """Like `number`, for values >= 0."""
    if (found := number(value, most)) < 0:
        raise ValueError(value)
    return found


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return value
