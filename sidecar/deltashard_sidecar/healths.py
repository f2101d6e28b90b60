"""Whether the store answers, from the calls that are made on it anyway: no probe of its own.

Every try of every call comes by here (`stores.retries.StoreObserver`). An answer that is about an object (there, not
there, taken) means the store is well. A refusal that waiting will not mend by itself (bucket missing, quota full, keys
denied, a clock that is off) counts at once; an unreachable store counts once several tries in a row failed over some
seconds, since single ones are retried and forgotten. Each change for the worse, or to another cause, is one incident
with the refusal's own sentence; the next success ends it, but for a full store, which still reads: only a write does.

The pipeline's threads call this: the way of a healthy store takes no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    CredentialsMissing,
    ObjectExists,
    ObjectNotFound,
    StoreFull,
    StoreUnavailable,
)
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.incidents import Incidents
from deltashard_sidecar.logs import Logger, explain
from deltashard_sidecar.metrics import Metrics

UNAVAILABLE_AFTER_S = 3.0
UNAVAILABLE_TRIES = 3
WRITES = frozenset({"put", "put_if_absent"})

_ANSWERS = (ObjectNotFound, ObjectExists)
_CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (CredentialsMissing, "missing"),
    (AccessDenied, "denied"),
    (BucketMissing, "bucket_missing"),
    (StoreFull, "full"),
    (ClockSkew, "clock"),
    (StoreUnavailable, "unavailable"),
    (UserError, "refused"),
)


def cause_of(error: Exception | None) -> str:
    """Why the store did not serve; empty when the fault, if any, is not the store's. Pure."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "")


class StoreHealth:
    """The observer of one store. Thread-safe."""

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
        self._cause = ""
        self._failures = 0
        self._failing_since_s = 0.0

    @property
    def store_ok(self) -> bool:
        """Whether the store served the last call, as far as that is its own business."""
        return self._cause in ("", "missing")

    @property
    def credentials_ok(self) -> bool:
        """Whether there are credentials at all."""
        return self._cause != "missing"

    def attempted(self, operation: str, seconds: float, error: Exception | None) -> None:  # noqa: ARG002 - protocol
        """See `StoreObserver.attempted`."""
        cause = cause_of(error)
        if not cause:
            if (self._cause or self._failures) and (error is None or isinstance(error, _ANSWERS)):
                self._recovered(operation)
            return
        assert error is not None
        if cause == "unavailable":  # every other error is an answer
            self._metrics.retries.inc()
        with self._lock:
            now_s = self._clock()
            if self._failures == 0:
                self._failing_since_s = now_s
            self._failures += 1
            lasting = (
                self._failures >= UNAVAILABLE_TRIES and now_s - self._failing_since_s >= UNAVAILABLE_AFTER_S
            )
            if cause == self._cause or (cause == "unavailable" and not lasting):
                return
            self._cause = cause
        missing = cause == "missing"
        self._log.error("credentials.missing" if missing else "store.failing", cause=cause, **explain(error))
        self._incidents.add(
            fleet.INCIDENT_KIND_CREDENTIALS_MISSING if missing else fleet.INCIDENT_KIND_STORE_UNAVAILABLE,
            cause=cause,
            message=str(error),
        )

    def finished(self, operation: str, seconds: float, size_bytes: int, error: Exception | None) -> None:
        """See `StoreObserver.finished`."""

    def _recovered(self, operation: str) -> None:
        with self._lock:
            self._failures = 0
            if self._cause == "full" and operation not in WRITES:
                return
            was, self._cause = self._cause, ""
        if was:
            self._log.info("store.recovered", after=was)
