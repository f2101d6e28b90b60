"""Exponential back-off with jitter, and a retry budget: one deadline for all attempts of an operation.

Clock, sleep and random source are injected, so tests are deterministic and do not wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# IMPORTANT: a separate generator. Draws from the global one would change the training's random numbers.
uniform_random: Callable[[], float] = random.Random().random  # noqa: S311 - jitter
"""Returns a uniform random number in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between attempts: exponential, bounded and jittered."""

    first_s: float
    """Delay after the first failure, in seconds."""
    longest_s: float
    jitter: float = 0.5
    """Random share of each delay, so that processes waiting for the same resource do not retry in lockstep."""

    def delay_s(self, failures: int, uniform: Callable[[], float] = uniform_random) -> float:
        """Return the delay in seconds after `failures` (>= 1) consecutive failures; `uniform` draws from [0, 1)."""
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return delay_s * (1.0 - self.jitter * (1.0 - uniform()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The sources of time and randomness."""

    wall_s: Callable[[], float] = time.time
    """Wall-clock time: display only, never used in a decision."""
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[], float] = uniform_random


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """The retry budget of one operation: `pause` backs off between attempts until `deadline_s` has elapsed."""

    clocks: Clocks
    deadline_s: float
    backoff: Backoff = Backoff(first_s=0.05, longest_s=5.0)
    _started_s: float = field(init=False)
    _failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._started_s = self.clocks.monotonic_s()

    @property
    def spent_s(self) -> float:
        return self.clocks.monotonic_s() - self._started_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline_s - self.spent_s)

    def sleep(self, delay_s: float) -> None:
        """Sleep for `delay_s`, at most until the deadline. Does not count as a failure."""
        self.clocks.sleep(min(self.left_s, delay_s))

    def pause(self) -> bool:
        """Back off once. Returns False immediately if the deadline has passed."""
        left_s = self.left_s
        if left_s <= 0:
            return False
        self._failures += 1
        self.clocks.sleep(min(left_s, self.backoff.delay_s(self._failures, self.clocks.uniform)))
        return True
