"""What people should hear of: kept until the controller says that it has it, at most `LIMIT`, the oldest go first.

A controller that is away, or comes back empty, misses nothing that fits: what happens again within `MERGE_S`, before it
was told, counts up the incident that is kept. Adding never waits: the lock is held for a list operation.
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
"""Characters of a message; a longer one is clipped."""
MERGE_S = 600.0


class Incidents:
    """Incidents of this process. Thread-safe."""

    def __init__(self, metrics: Metrics, *, has_controller: bool = True) -> None:
        """`has_controller`: there is a controller that wants to hear of them; only then is one that goes unheard counted."""
        self._metrics = metrics
        self._has_controller = has_controller
        self._lock = threading.Lock()
        self._pending: deque[fleet.Incident] = deque()
        self._newest = 0
        self._sent = 0
        """Newest id in the report under way: what is counted up after it was sent would be lost with its answer."""

    def add(self, kind: fleet.IncidentKind, *, cause: str, message: str, **more: Any) -> None:
        """Keep one more; `cause` is a `Cause`, or the source of a restore; `more`: other fields of the message.

        A restore is a fact of its attempt, and is never merged with another's.
        """
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
        """Those not told, oldest first; `sent`: a report with them is under way, until `acknowledge` is called."""
        with self._lock:
            if sent:
                self._sent = self._newest
            return list(self._pending)

    def acknowledge(self, newest: int) -> None:
        """The report under way has ended; incidents up to `newest` need not be sent again."""
        with self._lock:
            self._sent = 0
            while self._pending and self._pending[0].id <= newest:
                self._pending.popleft()
