"""Cache for reads that several readers in one process make at about the same time.

The ranks of a pod restore together over one sidecar, and all of them need the same blobs and their indexes. Objects are
immutable, so bytes read by one rank serve all. Each user checks the bytes against their hash, as if they came from the
store, and calls `forget` on a mismatch.
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
    """None after `done`: the read failed."""


class SharedReads:
    """Least-recently-used cache of bytes by key, within a budget. Thread-safe."""

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()  # never held during a read
        self._cached: dict[Hashable, Bytes] = {}
        """In order of use, the most recent last."""
        self._cached_bytes = 0
        self._pending: dict[Hashable, _PendingRead] = {}
        self._used_s = 0.0

    def read(self, key: Hashable, fetch: Callable[[], Bytes]) -> Bytes:
        """Return the result of `fetch`, or of another reader's for the same key; it must not be modified.

        A caller that arrives during another caller's read waits for it, up to this caller's deadline
        (`StoreUnavailable`), and calls `fetch` if that read failed. Raises the errors of `fetch`.
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
                raise StoreUnavailable("another reader's fetch of the same bytes timed out", where=str(key))
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
        """Drop wrong bytes, so that the next reader fetches them again."""
        with self._lock:
            if (data := self._cached.pop(key, None)) is not None:
                self._cached_bytes -= len(data)

    def release_idle(self, *, idle_s: float) -> None:
        """Free all memory if no read happened for `idle_s` seconds."""
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
