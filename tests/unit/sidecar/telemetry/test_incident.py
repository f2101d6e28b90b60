"""Incidents are kept until they are reported; the store's health creates incidents."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.errors import DeltashardError
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
from deltashard_sidecar.run.store_health import StoreHealth
from deltashard_sidecar.telemetry.incident import LIMIT, Incidents
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def incidents(metrics: Metrics) -> Incidents:
    return Incidents(metrics)


def failed(incidents: Incidents, number: int) -> None:
    incidents.add(fleet.INCIDENT_KIND_SAVE_FAILED, cause=f"error{number}", message=str(number), step=number)


def test_incidents_are_kept_until_reported_and_oldest_are_dropped(
    incidents: Incidents, metrics: Metrics
) -> None:
    """At most LIMIT are kept, dropped incidents are counted, and ids never repeat."""
    for number in range(LIMIT + 3):
        failed(incidents, number)
    assert [i.step for i in incidents.pending()] == list(range(3, LIMIT + 3))
    assert metrics.registry.get_sample_value("deltashard_incidents_dropped_total") == 3
    incidents.acknowledge(incidents.pending()[-2].id)
    assert [i.step for i in incidents.pending()] == [LIMIT + 2]
    incidents.acknowledge(1)
    assert len(incidents.pending()) == 1
    failed(incidents, 99)
    assert incidents.pending()[-1].id == LIMIT + 4
    incidents.add(fleet.INCIDENT_KIND_FENCED, cause="error", message="x" * 100_000)
    assert len(incidents.pending()[-1].message) == 1000, "long messages are truncated"


def test_repeated_incident_is_counted_until_it_is_sent(incidents: Incidents) -> None:
    """An attempt has one restore. A report in flight is not modified."""
    for kind in (fleet.INCIDENT_KIND_RESTORED, fleet.INCIDENT_KIND_FENCED):
        for message in ("a", "b"):
            incidents.add(kind, cause="store", message=message)
    assert [(i.id, i.count, i.message) for i in incidents.pending(sent=True)] == [
        (1, 1, "a"),
        (2, 1, "b"),
        (3, 2, "b"),
    ]
    incidents.add(fleet.INCIDENT_KIND_FENCED, cause="store", message="c")
    incidents.acknowledge(3)
    assert [(i.id, i.count) for i in incidents.pending()] == [(4, 1)]
    incidents.pending(sent=True)
    incidents.acknowledge(0)
    incidents.add(fleet.INCIDENT_KIND_FENCED, cause="store", message="d")
    incidents.pending()[0].at_s -= 601
    incidents.add(fleet.INCIDENT_KIND_FENCED, cause="store", message="e")
    assert [(i.id, i.count) for i in incidents.pending()] == [(4, 2), (5, 1)]


class ClockedHealth(StoreHealth):
    """Store health with a fake clock."""

    now_s = 0.0

    def __init__(self, incidents: Incidents, metrics: Metrics) -> None:
        super().__init__(
            incidents, metrics=metrics, log=configure("error", run="r"), clock=lambda: self.now_s
        )

    def tried(self, error: Exception | None, *, after_s: float = 0.0, operation: str = "put") -> None:
        self.now_s += after_s
        self.attempted(operation, 0.1, error)


def test_store_is_unreachable_only_after_lasting_failures(incidents: Incidents, metrics: Metrics) -> None:
    """Single failed tries are retried. An outage is one incident with the store's message, and ends with a success."""
    health = ClockedHealth(incidents, metrics)
    down = StoreUnavailable("no connection: refused", where="s3://b", remedy="is the store up?")
    for _ in range(5):
        health.tried(down)
    assert health.store_ok
    health.tried(None)
    health.tried(down)
    health.tried(down, after_s=60.0)
    assert health.store_ok, "two failed tries far apart are not an outage"
    health.tried(down)
    assert not health.store_ok
    health.tried(down, after_s=60.0)
    (one,) = incidents.pending()
    assert (one.kind, one.cause, one.message) == (
        fleet.INCIDENT_KIND_STORE_UNAVAILABLE, "unavailable", "no connection: refused [s3://b] -- is the store up?",
    )  # fmt: skip
    health.tried(None)
    assert health.store_ok
    assert metrics.registry.get_sample_value("deltashard_store_retries_total") == 9


@pytest.mark.parametrize(
    ("kind", "cause", "healthy"),
    [
        (CredentialsMissing, "missing", (True, False)),
        (AccessDenied, "denied", (False, True)),
        (BucketMissing, "bucket_missing", (False, True)),
        (StoreFull, "full", (False, True)),
        (ClockSkew, "clock", (False, True)),
    ],
)
@pytest.mark.parametrize("answer", [None, ObjectNotFound("no"), ObjectExists("taken")])
def test_refusal_is_immediate_and_object_errors_are_healthy(
    incidents: Incidents,
    metrics: Metrics,
    kind: type[DeltashardError],
    cause: str,
    healthy: object,
    answer: Exception,
) -> None:
    """Waiting does not help. A changed cause is a new incident. Missing objects are not a problem of the store."""
    health = ClockedHealth(incidents, metrics)
    health.tried(kind("no"))
    health.tried(kind("no"))
    assert (health.store_ok, health.credentials_ok) == healthy
    assert [i.cause for i in incidents.pending()] == [cause]
    health.tried(AccessDenied("other") if cause != "denied" else StoreFull("other"))
    assert len(incidents.pending()) == 2
    health.tried(answer)
    assert (health.store_ok, health.credentials_ok) == (True, True)


def test_denied_operation_stays_a_problem_while_others_succeed(
    incidents: Incidents, metrics: Metrics
) -> None:
    """Permissions are per operation. The problem is one incident and ends with a success of the same operation."""
    health = ClockedHealth(incidents, metrics)
    for _ in range(3):
        health.tried(AccessDenied("no right to delete"), operation="delete")
        for operation in ("put", "put_if_absent", "get", "get_into", "head", "list"):
            health.tried(None, operation=operation)
            assert not health.store_ok
    assert [i.message for i in incidents.pending()] == ["no right to delete"]
    health.tried(ObjectNotFound("already deleted"), operation="delete")
    assert health.store_ok
