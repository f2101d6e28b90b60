"""The audit check detects violations, so that an empty result is meaningful."""

from __future__ import annotations

import dataclasses

import pytest

from tests.load.simulation import audit, control_plane
from tests.load.simulation.control_plane import CONTROLLER, SYSTEM

ALLOWED_REQUEST = audit.AuditedRequest(
    user=control_plane.account(CONTROLLER),
    verb="update",
    group="",
    resource="secrets",
    namespace=SYSTEM,
    name="deltashard-tls",
    status=200,
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"namespace": "team"}, ["not allowed"]),
        ({"verb": "deletecollection", "name": ""}, ["not allowed"]),
        ({"verb": "watch", "status": 403}, ["refused"]),
        ({"verb": "create", "group": "batch", "resource": "jobs", "name": "train"}, ["not allowed"]),
    ],
)
def test_write_outside_allowed_names_is_a_violation(changes: dict[str, str], found: list[str]) -> None:
    """Allowed Secrets are the controller's own, by name, in its own namespace, by update."""
    violations = audit.violations([dataclasses.replace(ALLOWED_REQUEST, **changes)])
    assert [each.partition(":")[0] for each in violations] == found
