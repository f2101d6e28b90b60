"""The check of the audit log finds what it is there to find: without that, its silence would say nothing."""

from __future__ import annotations

import dataclasses

import pytest

from tests.load.simulation import audit, control_plane
from tests.load.simulation.control_plane import CONTROLLER, SYSTEM

ITS_OWN = audit.Request(
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
def test_a_name_or_a_namespace_more_is_a_finding(changes: dict[str, str], found: list[str]) -> None:
    """Its own Secrets by name, in its own namespace, by update: nothing beside."""
    findings = audit.findings([dataclasses.replace(ITS_OWN, **changes)])
    assert [each.partition(":")[0] for each in findings] == found
