"""The check of the audit log finds what it is there to find: without that, its silence would say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.load.simulation import audit, control_plane
from tests.load.simulation.control_plane import CONTROLLER, SYSTEM


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"verb": "create", "group": "batch", "resource": "jobs", "name": "deltashard-reclaim-0b4f"}, []),
        (
            {"verb": "create", "group": "batch", "resource": "jobs", "name": "train"},
            ["not allowed: create batch/jobs deltashard-system/train: 200 (1 times)"],
        ),
        (
            {"verb": "patch", "group": "batch", "resource": "jobs", "namespace": "team", "status": 403},
            [
                f"{how}: patch batch/jobs team/deltashard-tls: 403 (1 times)"
                for how in ("not allowed", "refused")
            ],
        ),
        ({"namespace": "team"}, ["not allowed: update secrets team/deltashard-tls: 200 (1 times)"]),
        ({"name": "other"}, ["not allowed: update secrets deltashard-system/other: 200 (1 times)"]),
        (
            {"verb": "deletecollection", "name": ""},
            ["not allowed: deletecollection secrets deltashard-system/: 200 (1 times)"],
        ),
        (
            {"verb": "watch", "status": 403},
            ["refused: watch secrets deltashard-system/deltashard-tls: 403 (1 times)"],
        ),
    ],
)
def test_a_name_or_a_namespace_more_is_a_finding(changes: dict[str, Any], expected: list[str]) -> None:
    """Its own Secrets by name, in its own namespace, by update: nothing beside."""
    fields: dict[str, Any] = {
        "user": control_plane.account(CONTROLLER),
        "verb": "update",
        "group": "",
        "resource": "secrets",
        "namespace": SYSTEM,
        "name": "deltashard-tls",
        "status": 200,
    }
    assert audit.findings([audit.Request(**(fields | changes))]) == expected
