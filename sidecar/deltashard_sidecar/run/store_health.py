"""Whether the store answers, from the calls that are made on it anyway (`stores.retry.StoreObserver`): no probe.

An answer that is about an object (there, not there, taken) means the store is well. A refusal that waiting will not
mend by itself (bucket missing, quota full, keys denied, a clock that is off) counts at once, an unreachable store once
several tries in a row failed over some seconds. Each cause is one incident, with the refusal's own sentence.

How it stands is kept for each kind of call (write, read, list, delete), because rights and quotas are given for each: a
trouble of that sort ends with the next success of its own kind. What is wrong with the whole store ends with any
success, and what keeps requests from it (no keys, no connection) with any answer.
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
"""Operation -> the kind of call it is; others are a kind by themselves."""
PER_KIND_CAUSES = frozenset({Cause.DENIED, Cause.FULL, Cause.REFUSED})
"""Causes that say nothing about other kinds of calls."""
UNANSWERED = frozenset({Cause.MISSING, Cause.UNAVAILABLE})
"""Causes for which no request reached the store."""
_CAUSES = frozenset(
    [Cause.MISSING, Cause.DENIED, Cause.BUCKET_MISSING, Cause.FULL, Cause.CLOCK, Cause.UNAVAILABLE]
)


def cause_of(error: Exception | None) -> Cause | None:
    """Why the store did not serve; None when the fault, if any, is not the store's. Pure."""
    if isinstance(error, DeltashardError) and error.cause in _CAUSES:
        return Cause(error.cause)
    return Cause.REFUSED if isinstance(error, UserError) else None


class StoreHealth(StoreObserver):
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
        self._causes: dict[str, Cause] = {}
        """Why the newest call of a kind was not served, where it was not. Replaced, never changed in place."""
        self._failures = 0
        self._failing_since_s = 0.0

    @property
    def store_ok(self) -> bool:
        """Whether the store serves every kind of call, as far as that is its own business."""
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
