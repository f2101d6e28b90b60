"""A deadline that a caller lays around an attempt, and that whoever waits on a socket underneath obeys.

`RetryingStore` promises an overall deadline per call. A back-end's own timeouts bound one silence, not one call: a
server that sends a byte a second would keep it for ever. So the promise travels down in a context variable.

A read is also told how long the store may be silent within it (`idle_timeout`): asking again mends a hung connection sooner
than waiting does.

A caller that may lose interest (an aborted part) lays `abandon_when(predicate)` around its calls: from the moment that is true
no time remains, so nothing is retried and whoever moves bytes stops at the next slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

IDLE_TIMEOUT_S = 20.0
"""Longest silence of a store: after it an attempt is given up."""
_deadline_at_s: ContextVar[float | None] = ContextVar("deltashard_store_deadline", default=None)
_idle_timeout_s: ContextVar[float | None] = ContextVar("deltashard_store_silence", default=None)
_predicate: ContextVar[Callable[[], bool] | None] = ContextVar("deltashard_store_abandoned", default=None)


@contextmanager
def abandon_when(predicate: Callable[[], bool]) -> Iterator[None]:
    """Within: no time remains once `predicate()`, or an outer one; it is asked often and must not wait."""
    outer = _predicate.get()
    token = _predicate.set(predicate if outer is None else lambda: predicate() or outer())
    try:
        yield
    finally:
        _predicate.reset(token)


def is_abandoned() -> bool:
    """Whether the caller who laid `abandon_when` around this gave up."""
    predicate = _predicate.get()
    return predicate is not None and predicate()


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
    """Seconds left, never negative, 0 when `is_abandoned`; `default` where no deadline was laid."""
    if is_abandoned():
        return 0.0
    at = _deadline_at_s.get()
    return default if at is None else max(0.0, at - time.monotonic())


@contextmanager
def idle_timeout(seconds: float) -> Iterator[None]:
    """Within: a store that is silent for so long is given up (`idle_timeout_s`)."""
    token = _idle_timeout_s.set(seconds)
    try:
        yield
    finally:
        _idle_timeout_s.reset(token)


def idle_timeout_s(longest_s: float) -> float:
    """How long to listen to a silent store: `longest_s` at most, and never beyond the deadline."""
    allowed_s = _idle_timeout_s.get()
    return min(longest_s, remaining_s(), longest_s if allowed_s is None else allowed_s)
