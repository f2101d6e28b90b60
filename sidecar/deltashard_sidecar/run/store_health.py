"""Health of the store, observed on regular requests (`stores.retry.StoreObserver`), without a probe.

A response about an object (exists, missing, already exists) means that the store is healthy. An error that waiting does
not fix (bucket missing, quota full, access denied, clock skew) counts at once. An unreachable store counts after
several failed tries within some seconds. Each cause is one incident, with the error's message.

Causes are kept per kind of request (write, read, list, delete), because permissions and quotas are per kind: such a
cause ends with the next success of its kind. A cause that affects the whole store ends with any success, and a cause
that keeps requests from reaching it (no keys, no connection) with any response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound
from deltashard_checkpoint.stores.retry import StoreObserver
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.telemetry.incident import Incidents
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

UNAVAILABLE_AFTER_S = 3.0
UNAVAILABLE_TRIES = 3
KINDS = {"put": "write", "put_if_absent": "write", "get": "read", "get_into": "read", "head": "read"}
"""Operation -> kind of request; any other operation is a separate kind."""
PER_KIND_CAUSES = frozenset({Cause.DENIED, Cause.FULL, Cause.REFUSED})
"""Causes that do not affect other kinds of requests."""
UNANSWERED = frozenset({Cause.MISSING, Cause.UNAVAILABLE})
"""Causes for which no request reached the store."""
_CAUSES = frozenset(
    [Cause.MISSING, Cause.DENIED, Cause.BUCKET_MISSING, Cause.FULL, Cause.CLOCK, Cause.UNAVAILABLE]
)


def cause_of(error: Exception | None) -> Cause | None:
    """Return why the store failed to serve a request; None if there was no error, or not the store's. Pure."""
    if isinstance(error, DeltashardError) and error.cause in _CAUSES:
        return Cause(error.cause)
    return Cause.REFUSED if isinstance(error, UserError) else None


class StoreHealth(StoreObserver):
    """Observer of one store. Thread-safe."""

    def __init__(
        self,
        incidents: Incidents,
        *,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incidents = incidents
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._causes: dict[str, Cause] = {}
        """Kind of request -> cause of the newest failure, if it failed. Replaced, never changed in place."""
        self._failures = 0
        self._failing_since_s = 0.0

    @property
    def store_ok(self) -> bool:
        """Whether the store serves all kinds of requests; missing credentials are not a fault of the store."""
        return set(self._causes.values()) <= {Cause.MISSING}

    @property
    def credentials_ok(self) -> bool:
        return Cause.MISSING not in self._causes.values()

    def attempted(self, operation: str, seconds: float, error: Exception | None) -> None:  # noqa: ARG002 - the observer's
        cause, kind = cause_of(error), KINDS.get(operation, operation)
        if error is None or cause is None:
            answered = error is None or isinstance(error, ObjectNotFound | ObjectExists)
            if answered and (self._causes or self._failures):
                self._recovered(kind)
            return
        if cause is Cause.UNAVAILABLE:  # every other error is an answer
            self._metrics.retries.inc()
        with self._lock:
            now_s = self._clock()
            if self._failures == 0:
                self._failing_since_s = now_s
            self._failures += 1
            lasts = now_s - self._failing_since_s >= UNAVAILABLE_AFTER_S
            if cause is Cause.UNAVAILABLE and not (lasts and self._failures >= UNAVAILABLE_TRIES):
                return
            others = {
                key: each
                for key, each in self._causes.items()
                if key != kind and (cause in UNANSWERED or each not in UNANSWERED)
            }
            reported = cause in self._causes.values()
            self._causes = {**others, kind: cause}
        if not reported:
            missing = cause is Cause.MISSING
            event = "credentials.missing" if missing else "store.failing"
            self._log.error(event, cause=cause, **explain(error))
            self._incidents.add(
                fleet.INCIDENT_KIND_CREDENTIALS_MISSING if missing else fleet.INCIDENT_KIND_STORE_UNAVAILABLE,
                cause=cause,
                message=str(error),
            )

    def _recovered(self, kind: str) -> None:
        with self._lock:
            self._failures = 0
            was = self._causes
            self._causes = {key: each for key, each in was.items() if key != kind and each in PER_KIND_CAUSES}
            over = set(was.values()) - set(self._causes.values())
        for each in sorted(over):
            self._log.info("store.recovered", after=each)
