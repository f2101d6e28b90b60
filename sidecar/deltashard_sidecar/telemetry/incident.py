"""Incidents for people, kept until the controller acknowledges them, at most `LIMIT`; the oldest are dropped first.

A controller that is unreachable, or restarts without state, thus still receives them. An unsent incident that recurs
within `MERGE_S` is counted in the kept one. Adding does not block: the lock is held for one list operation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.telemetry.metric import Metrics

LIMIT = 64
MAX_TEXT = 1000
"""Longest message in characters; a longer one is clipped."""
MERGE_S = 600.0


class Incidents:
    """Incidents of this process. Thread-safe."""

    def __init__(self, metrics: Metrics, *, has_controller: bool = True) -> None:
        """`has_controller`: a controller is set; only then are dropped incidents counted."""
        self._metrics = metrics
        self._has_controller = has_controller
        self._lock = threading.Lock()
        self._pending: deque[fleet.Incident] = deque()
        self._newest = 0
        self._sent = 0
        """Newest id in the report in flight: a count increased after sending would be lost with its acknowledgement."""

    def add(self, kind: fleet.IncidentKind, *, cause: str, message: str, **more: Any) -> None:
        """Add an incident, or count a recent one (never a restore). `cause`: a `Cause`, or a restore's source."""
        now_s, message = time.time(), message[:MAX_TEXT]
        with self._lock:
            for each in self._pending:
                same = (each.kind, each.cause) == (kind, cause) and kind != fleet.INCIDENT_KIND_RESTORED
                if same and each.id > self._sent and now_s - each.at_s < MERGE_S:
                    each.count += 1
                    each.message = message
                    return
            self._newest += 1
            made = fleet.Incident(id=self._newest, kind=kind, at_s=now_s, cause=cause, count=1, **more)
            made.message = message
            self._pending.append(made)
            if len(self._pending) > LIMIT:
                self._pending.popleft()
                if self._has_controller:
                    self._metrics.incidents_dropped.inc()

    def pending(self, *, sent: bool = False) -> list[fleet.Incident]:
        """Return the unacknowledged incidents, oldest first; `sent`: for a report in flight until `acknowledge`."""
        with self._lock:
            if sent:
                self._sent = self._newest
            return list(self._pending)

    def acknowledge(self, newest: int) -> None:
        """End the report in flight; incidents up to `newest` are not sent again."""
        with self._lock:
            self._sent = 0
            while self._pending and self._pending[0].id <= newest:
                self._pending.popleft()
