"""A deadline that a caller lays around an attempt, and that whoever waits on a socket underneath obeys.

`RetryingStore` promises an overall deadline per call. A back-end's own timeouts bound one silence, not one call: a
server that sends a byte a second would keep it for ever. So the promise travels down in a context variable.

A read is also told how long the store may be silent within it (`silence`): asking again mends a hung connection sooner
than waiting does.

A caller that may lose interest (an aborted part) lays `until(given_up)` around its calls: from the moment that is true
no time remains, so nothing is retried and whoever moves bytes stops at the next slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SILENCE_S = 20.0
"""Longest silence of a store: after it an attempt is given up."""
_deadline_at_s: ContextVar[float | None] = ContextVar("deltashard_store_deadline", default=None)
_silence_s: ContextVar[float | None] = ContextVar("deltashard_store_silence", default=None)
_given_up: ContextVar[Callable[[], bool] | None] = ContextVar("deltashard_store_given_up", default=None)


@contextmanager
def until(given_up: Callable[[], bool]) -> Iterator[None]:
    """Within: no time remains once `given_up()`, or an outer one; it is asked often and must not wait."""
    outer = _given_up.get()
    token = _given_up.set(given_up if outer is None else lambda: given_up() or outer())
    try:
        yield
    finally:
        _given_up.reset(token)


def abandoned() -> bool:
    """Whether the caller who laid `until` around this gave up."""
    given_up = _given_up.get()
    return given_up is not None and given_up()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within: `remaining_s()` counts down from `seconds`, or from an outer deadline that ends sooner."""
    at = time.monotonic() + seconds
    outer = _deadline_at_s.get()
    token = _deadline_at_s.set(at if outer is None else min(at, outer))
    try:
        yield
    finally:
        _deadline_at_s.reset(token)


def remaining_s(default: float = float("inf")) -> float:
    """Seconds left, never negative, 0 when `abandoned`; `default` where no deadline was laid."""
    if abandoned():
        return 0.0
    at = _deadline_at_s.get()
    return default if at is None else max(0.0, at - time.monotonic())


@contextmanager
def silence(seconds: float) -> Iterator[None]:
    """Within: a store that is silent for so long is given up (`silence_s`)."""
    token = _silence_s.set(seconds)
    try:
        yield
    finally:
        _silence_s.reset(token)


def silence_s(longest_s: float) -> float:
    """How long to listen to a silent store: `longest_s` at most, and never beyond the deadline."""
    allowed_s = _silence_s.get()
    return min(longest_s, remaining_s(), longest_s if allowed_s is None else allowed_s)
