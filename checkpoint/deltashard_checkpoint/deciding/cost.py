"""What saves cost a run, as measured: means with their errors, a tail, and the profile that rides in commits. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltashard_checkpoint.errors import UserError

TAIL_SAMPLES = 20
"""Newest samples kept for the tail."""
KEY = "deltashard/profile"
"""Name of the profile in a commit's metadata."""
MAX_TEXT = 4096
MAX_NUMBER = 1e12
"""No recorded count or number of seconds is larger."""


class BadProfile(UserError):
    """A recorded profile that cannot be read; profiling begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A quantity in seconds, sampled once a save (Welford's running moments, and the newest samples)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    newest: tuple[float, ...] = ()

    def with_sample(self, value: float) -> Measure:
        """After one more sample; what is not finite is none."""
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
        """Weighing no more than so many samples, so that the mean follows what changes.

        From there on each new sample counts 1 / `most` and the others fade. Their mean is then as exact as that of
        twice as many, so that `error`, which counts `most`, errs to the careful side.
        """
        if self.n <= most:
            return self
        return replace(self, n=most, squares=self.squares * (most - 1) / (self.n - 1))

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two samples."""
        return math.sqrt(self.squares / (self.n - 1) / self.n) if self.n > 1 else math.inf

    @property
    def p95(self) -> float:
        """Of the newest samples; 0 without any."""
        if not self.newest:
            return 0.0
        return sorted(self.newest)[math.ceil(0.95 * len(self.newest)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is measured of a run under one image, node type and world size."""

    key: str = ""
    """Names image, node type and world size; a profile of another key counts for nothing."""
    step_s: float = 0.0
    """Of an ordinary step; 0: not measured."""
    save: Measure = field(default_factory=Measure)
    """Trainer seconds that a save costs: its stall (of the slowest rank) and the slowdown while it is in flight."""
    stall: Measure = field(default_factory=Measure)
    durable: Measure = field(default_factory=Measure)
    """From trigger to durable."""
    restore: Measure = field(default_factory=Measure)
    """From open to the first step."""
    reschedule: Measure = field(default_factory=Measure)
    """From the end of one trainer to the Attach of the next."""

    def with_cost_reset(self) -> Profile:
        """History of the cost begins anew: the interval, or what saves cost, has changed."""
        return replace(self, save=Measure(newest=self.save.newest[-1:]))

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> Profile:
    """The profile in a commit's metadata; raises `BadProfile`: whoever can write the bucket wrote it."""
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])  # what is longer was cut, and is no JSON
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
    """A number of a recorded document; raises `ValueError` for anything else, and for one beyond `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= most:  # nor is NaN
        raise ValueError(value)
    return float(value)


def not_negative(value: object, most: float = MAX_NUMBER) -> float:
    """The same, 0 or more."""
    if (found := number(value, most)) < 0:
        raise ValueError(value)
    return found


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return value
