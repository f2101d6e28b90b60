"""Deadlines that a caller sets around an attempt, and that socket waits underneath obey.

`RetryingStore` guarantees an overall deadline per call. A back-end's timeouts bound one silence, not a call: a server
that sends a byte per second would keep it forever. So the deadline is passed down in a context variable.

For reads, `idle_timeout` also bounds the silence of the store, because a new request fixes a hung connection sooner.

A caller that may lose interest (an aborted part) uses `abandon_when(predicate)`. Once the predicate is true, no time
remains: no call is retried, and transfers stop at the next slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

IDLE_TIMEOUT_S = 20.0
"""Longest silence of a store before an attempt is abandoned."""
_deadline_at_s: ContextVar[float | None] = ContextVar("deltashard_store_deadline", default=None)
_idle_timeout_s: ContextVar[float | None] = ContextVar("deltashard_store_silence", default=None)
_predicate: ContextVar[Callable[[], bool] | None] = ContextVar("deltashard_store_abandoned", default=None)


@contextmanager
def abandon_when(predicate: Callable[[], bool]) -> Iterator[None]:
    """Within: no time remains once `predicate()`, or an outer one, is true; it is called often and must not block."""
    outer = _predicate.get()
    token = _predicate.set(predicate if outer is None else lambda: predicate() or outer())
    try:
        yield
    finally:
        _predicate.reset(token)


def is_abandoned() -> bool:
    """Return whether the predicate of an enclosing `abandon_when` is true."""
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
    """Return the seconds left, never negative, 0 if `is_abandoned`; `default` without a deadline."""
    if is_abandoned():
        return 0.0
    at = _deadline_at_s.get()
    return default if at is None else max(0.0, at - time.monotonic())


@contextmanager
def idle_timeout(seconds: float) -> Iterator[None]:
    """Within: a read is abandoned after this silence of the store (`idle_timeout_s`)."""
    token = _idle_timeout_s.set(seconds)
    try:
        yield
    finally:
        _idle_timeout_s.reset(token)


def idle_timeout_s(longest_s: float) -> float:
    """Return how long to wait for a silent store: at most `longest_s`, and within the deadline."""
    allowed_s = _idle_timeout_s.get()
    return min(longest_s, remaining_s(), longest_s if allowed_s is None else allowed_s)
