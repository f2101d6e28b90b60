"""Waiting for a condition: the one loop of the tests.

Tests wait for a condition, never for a time: a limit only separates "slow" from "never". Limits are for an idle
machine (`machine.limit_s`); `within_s` is exact, for conditions that must stay false.
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
    """The condition did not become true in time."""


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "condition",
    *,
    timeout_s: float = TIMEOUT_S,
    within_s: float | None = None,
    every_s: float = 0.01,
) -> T:
    """Return the first true value of `condition()`; raise `EventuallyTimeout` that names `what` is missing."""
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
    """Yield the pause after each check; the check after the limit is the last."""
    limit = limit_s(timeout_s) if within_s is None else within_s
    ends_s = time.monotonic() + limit
    while True:
        last = time.monotonic() > ends_s
        yield every_s
        if last:
            raise EventuallyTimeout(f"{what() if callable(what) else what}: not within {limit:.1f} s")
