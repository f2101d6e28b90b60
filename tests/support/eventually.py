"""Waiting for what comes true by itself: the one loop of the tests.

What is waited for is a condition, never a time: a limit only tells "slow" from "never". Limits are for an idle machine
(`machine.limit_s`); `within_s` is exact, for what must not come true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.support.machine import limit_s

T = TypeVar("T")
TIMEOUT_S = 240.0


class EventuallyTimeout(AssertionError, TimeoutError):
    """It did not come true."""


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "condition",
    *,
    timeout_s: float = TIMEOUT_S,
    within_s: float | None = None,
    every_s: float = 0.01,
) -> T:
    """The first value of `condition()` that is true; raises `EventuallyTimeout` that says `what` is missing."""
    for pause_s in _poll_delays(what, timeout_s, within_s, every_s):
        if found := condition():
            return found
        time.sleep(pause_s)
    raise AssertionError("unreachable")


async def eventually_async(condition: Callable[[], T], what: str | Callable[[], str] = "condition") -> T:
    for pause_s in _poll_delays(what, TIMEOUT_S, None, 0.01):
        if found := condition():
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


def _poll_delays(
    what: str | Callable[[], str], timeout_s: float, within_s: float | None, every_s: float
) -> Iterator[float]:
    """How long to pause after each look; the look after the limit is the last."""
    limit = limit_s(timeout_s) if within_s is None else within_s
    ends_s = time.monotonic() + limit
    while True:
        last = time.monotonic() > ends_s
        yield every_s
        if last:
            raise EventuallyTimeout(f"{what() if callable(what) else what}: not within {limit:.1f} s")
