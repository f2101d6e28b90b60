"""Bounded waiting: delays that double from failure to failure, and one deadline over a whole operation.

`Backoff` is the arithmetic, the same for every retry; `RetryBudget` waits by it until a deadline. Clock, sleep and
randomness are injected, so that tests neither wait nor depend on luck.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# IMPORTANT: a generator of our own. The global one is the program's: what it draws decides bits of the training.
uniform_random: Callable[[], float] = random.Random().random  # noqa: S311 - jitter
"""A random number of [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between the tries of something that fails: doubling, bounded, and partly random."""

    first_s: float
    """After the first failure."""
    longest_s: float
    jitter: float = 0.5
    """Share of every delay that is random, so that processes that wait for the same thing do not ask in step."""

    def delay_s(self, failures: int, uniform: Callable[[], float] = uniform_random) -> float:
        """The delay after `failures` failures in a row (from 1); `uniform` draws random numbers of [0, 1)."""
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return delay_s * (1.0 - self.jitter * (1.0 - uniform()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where time and chance come from."""

    wall_s: Callable[[], float] = time.time
    """For people only."""
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[], float] = uniform_random


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """The waiting of one operation: `pause` between tries, until `deadline_s` after its making."""

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
        """Wait so long, or until the deadline; it is no try."""
        self.clocks.sleep(min(self.left_s, delay_s))

    def pause(self) -> bool:
        """Back off; False, at once, when the deadline is over."""
        left_s = self.left_s
        if left_s <= 0:
            return False
        self._failures += 1
        self.clocks.sleep(min(left_s, self.backoff.delay_s(self._failures, self.clocks.uniform)))
        return True
