"""What people should hear of: kept until the controller says that it has it, at most `LIMIT`, the oldest go first.

A controller that is away, or comes back empty, misses nothing that fits. Adding never waits: the lock is held for a
list operation.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.telemetry.metric import Metrics

LIMIT = 64
MAX_TEXT = 1000
"""Characters of a message; a longer one is clipped."""


class Incidents:
    """Incidents of this process. Thread-safe."""

    def __init__(self, metrics: Metrics, *, awaited: bool = True) -> None:
        """`awaited`: there is a controller that wants to hear of them; only then is one that goes unheard counted."""
        self._metrics = metrics
        self._awaited = awaited
        self._lock = threading.Lock()
        self._kept: deque[fleet.Incident] = deque()
        self._newest = 0

    def add(
        self,
        kind: fleet.IncidentKind,
        *,
        cause: str,
        message: str,
        step: int = 0,
        lost_steps: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Keep one more; `cause` is a `Cause`, or the source of a restore."""
        with self._lock:
            self._newest += 1
            self._kept.append(
                fleet.Incident(
                    id=self._newest,
                    kind=kind,
                    at_s=time.time(),
                    cause=cause,
                    message=message[:MAX_TEXT],
                    step=step,
                    lost_steps=lost_steps,
                    seconds=seconds,
                )
            )
            dropped = len(self._kept) > LIMIT
            if dropped:
                self._kept.popleft()
        if dropped and self._awaited:
            self._metrics.incidents_dropped.inc()

    def acknowledge(self, newest: int) -> None:
        with self._lock:
            while self._kept and self._kept[0].id <= newest:
                self._kept.popleft()

    def kept(self) -> list[fleet.Incident]:
        """Those not acknowledged, oldest first."""
        with self._lock:
            return list(self._kept)
