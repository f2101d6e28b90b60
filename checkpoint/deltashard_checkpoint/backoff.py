"""Bounded waiting: one deadline over a whole operation, and jittered back-off between its tries.

Clock, sleep and randomness are injected, so that tests neither wait nor depend on luck.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where time and chance come from."""

    wall_s: Callable[[], float] = time.time
    """For people only."""
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[], float] = random.Random().random  # noqa: S311 - not the program's generator, which decides bits


@dataclass(slots=True, kw_only=True)
class Patience:
    """The waiting of one operation: `pause` between tries, until `deadline_s` after its making."""

    clocks: Clocks
    deadline_s: float
    first_s: float = 0.05
    longest_s: float = 5.0
    _begun_s: float = field(init=False)
    _tries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._begun_s = self.clocks.monotonic_s()

    @property
    def spent_s(self) -> float:
        """Seconds since this patience began."""
        return self.clocks.monotonic_s() - self._begun_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline_s - self.spent_s)

    def rest(self, delay_s: float) -> None:
        """Wait so long, or until the deadline; it is no try."""
        self.clocks.sleep(min(self.left_s, delay_s))

    def pause(self) -> bool:
        """Back off; False, at once, when the deadline is over."""
        left_s = self.left_s
        if left_s <= 0:
            return False
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(self._tries, 30))
        self._tries += 1
        # Half of every delay is chance: ranks that wait for the same thing must not ask in step.
        self.clocks.sleep(min(left_s, delay_s * (0.5 + 0.5 * self.clocks.uniform())))
        return True
