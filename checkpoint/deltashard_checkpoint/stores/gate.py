"""One of several requests for the same bytes, and how it is stopped once another one's answer counts.

A request under a `Gate` writes what it receives through `deliver`. Once the gate is closed nothing more is written: the
memory may then belong to somebody else. Its connection is shut down, so that a thread which waits for a silent server
wakes up, unless it carries another request by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from deltashard_checkpoint.stores.abc import StoreUnavailable

_gate: ContextVar[Gate | None] = ContextVar("deltashard_store_gate", default=None)


class Carrier(Protocol):
    """A connection, which carries one request after the other."""

    def hang_up(self, gate: Gate) -> None:
        """Shut the connection down if what it carries now is a request of `gate`."""


class Gate:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._carrier: Carrier | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is written any more."""
        return self._closed

    def write(self, view: memoryview, at: int, data: bytes | memoryview) -> None:
        """Write, or raise `StoreUnavailable` when the gate is closed."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("another request for the same bytes was faster")
            view[at : at + len(data)] = data

    def carried_by(self, carrier: Carrier | None) -> None:
        """The request of this gate goes out on `carrier` now; None: it has ended."""
        with self._lock:
            self._carrier = carrier

    def close(self) -> None:
        """From here on nothing is written; a connection that waits for an answer is shut down."""
        with self._lock:
            self._closed = True
            carrier = self._carrier
        if carrier is not None:
            carrier.hang_up(self)


@contextmanager
def through(gate: Gate) -> Iterator[None]:
    """Within: requests are of this gate."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def current() -> Gate | None:
    """The gate of this context's requests."""
    return _gate.get()


def deliver(view: memoryview, at: int, data: bytes | memoryview) -> None:
    """Write what was received at `view[at:]`; raises `StoreUnavailable` when it does not count any more."""
    gate = _gate.get()
    if gate is None:
        view[at : at + len(data)] = data
    else:
        gate.write(view, at, data)
