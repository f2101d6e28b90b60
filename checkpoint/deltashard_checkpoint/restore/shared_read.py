"""What several readers in one process want of a store at about the same time is read once, and kept for a little while.

The ranks of a pod restore together, over one sidecar, and all of them want the same blobs, and the indexes that say
where these are. Objects never change, so bytes that one has read are right for all; whoever uses them checks them
against their hash, as if they came from the store, and says so (`forget`) when they are wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.deadline import remaining_s

Bytes = bytes | bytearray
BUDGET_BYTES = 64 << 20
_LONGEST_WAIT_S = 3600.0


@dataclass(slots=True, eq=False)
class _PendingRead:
    done: threading.Event = field(default_factory=threading.Event)
    data: Bytes | None = None
    """None after `done`: it failed."""


class SharedReads:
    """Bytes by key, of which those that were used last are kept within a budget. Thread-safe."""

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()  # never held while something is read
        self._cached: dict[Hashable, Bytes] = {}
        """The one that was used last is last."""
        self._cached_bytes = 0
        self._pending: dict[Hashable, _PendingRead] = {}
        self._used_s = 0.0

    def read(self, key: Hashable, fetch: Callable[[], Bytes]) -> Bytes:
        """What `fetch` gives, or gave to somebody else; nobody may change it.

        Who comes while another reads waits for that, by its own deadline (`StoreUnavailable`); whose wait was for
        nothing asks itself. Raises what its own `fetch` raises.
        """
        while True:
            with self._lock:
                self._used_s = time.monotonic()
                if (data := self._cached.pop(key, None)) is not None:
                    self._cached[key] = data
                    return data
                other = self._pending.get(key)
                if other is None:
                    mine = self._pending[key] = _PendingRead()
                    break
            if not other.done.wait(remaining_s(_LONGEST_WAIT_S)):
                raise StoreUnavailable("another reader waits for the same bytes in vain", where=str(key))
            if other.data is not None:
                return other.data
        try:
            mine.data = fetch()
            self._keep(key, mine.data)
            return mine.data
        finally:
            with self._lock:
                del self._pending[key]
            mine.done.set()

    def forget(self, key: Hashable) -> None:
        """These bytes were wrong: the next reader asks anew."""
        with self._lock:
            if (data := self._cached.pop(key, None)) is not None:
                self._cached_bytes -= len(data)

    def release_idle(self, *, idle_s: float) -> None:
        """Free all memory when nobody has read anything for so long."""
        with self._lock:
            if time.monotonic() - self._used_s >= idle_s:
                self._cached.clear()
                self._cached_bytes = 0

    def _keep(self, key: Hashable, data: Bytes) -> None:
        with self._lock:
            self._cached[key] = data
            self._cached_bytes += len(data)
            while self._cached_bytes > self._budget_bytes:
                self._cached_bytes -= len(self._cached.pop(next(iter(self._cached))))
