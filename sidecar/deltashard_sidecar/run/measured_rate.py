"""How fast this sidecar reads, writes and encodes, from the work that it does anyway.

Calls on the store overlap. Their rate is the bytes of all of them over the time in which any was under way, taken from
their ends: what is added for a call is the time since the later of its begin and the end of the one before. Small calls
say nothing of a rate and are left out. Older work counts half, again and again: a link that became slow is seen.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from deltashard_checkpoint.maintenance.synthetic import ChainRates

LEAST_BYTES = 1 << 20
"""Smaller calls are mostly waiting for an answer."""
HALVED_AFTER_S = 60.0
READS = frozenset({"get", "get_into"})
WRITES = frozenset({"put"})


class _Busy:
    """Work of one kind: bytes and seconds."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.seconds = 0.0
        self.ended_s = -math.inf

    def add(self, size_bytes: int, seconds: float) -> None:
        self.bytes += size_bytes
        self.seconds += seconds
        if self.seconds > HALVED_AFTER_S:
            self.bytes, self.seconds = self.bytes / 2, self.seconds / 2

    def bytes_per_s(self, assumed: float) -> float:
        return self.bytes / self.seconds if self.bytes and self.seconds else assumed


class MeasuredRates:
    """Of one process. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reads, self._writes, self._encoding, self._slower = _Busy(), _Busy(), _Busy(), _Busy()

    def called(self, operation: str, seconds: float, size_bytes: int) -> None:
        kind = self._reads if operation in READS else self._writes if operation in WRITES else None
        if kind is None or size_bytes < LEAST_BYTES:
            return
        with self._lock:
            now_s = self._clock()
            busy_s = now_s - max(now_s - seconds, kind.ended_s)
            kind.ended_s = now_s
            kind.add(size_bytes, busy_s)

    def encoded(self, raw_bytes: int, seconds: float) -> None:
        """Rows of so many bytes were encoded in so much processor time."""
        with self._lock:
            self._encoding.add(raw_bytes, seconds)

    def slowed(self, raw_bytes: int, seconds: float) -> None:
        """Training was slower by `seconds` in all while rows of a cut of so many bytes were copied ahead."""
        if math.isfinite(seconds) and seconds >= 0:
            with self._lock:
                self._slower.add(raw_bytes, seconds)

    def rates(self, *, raw_bytes: int, stall_s: float) -> ChainRates:
        """What is known now, for a cut of all rows that has `raw_bytes` and stops training for `stall_s`."""
        assumed = ChainRates()
        with self._lock:
            encoding, slower = self._encoding, self._slower
            return ChainRates(
                read_bytes_per_s=self._reads.bytes_per_s(assumed.read_bytes_per_s),
                write_bytes_per_s=self._writes.bytes_per_s(assumed.write_bytes_per_s),
                encode_s_per_byte=encoding.seconds / encoding.bytes
                if encoding.bytes
                else assumed.encode_s_per_byte,
                stall_s=stall_s,
                slowdown_s=raw_bytes * slower.seconds / slower.bytes if slower.bytes else 0.0,
            )
