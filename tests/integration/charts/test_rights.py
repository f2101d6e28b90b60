"""The chart's roles, with the cluster's own aggregation and authorizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.eventually import eventually
from tests.support.helm import Release
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.controller_manager import ControllerManager
from tests.support.server.minio_server import ROOT

PAGE = (ROOT / "docs" / "kubernetes" / "tenants.md").read_text(encoding="utf-8")
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ROLES = ("view", "edit", "admin")
RESOURCES = {
    "CheckpointPolicies": "checkpointpolicies",
    "CheckpointRuns": "checkpointruns",
    "CheckpointRequests": "checkpointrequests",
    "the status of CheckpointRuns": "checkpointruns/status",
}
NOTHING: dict[str, set[str]] = {resource: set() for resource in RESOURCES.values()}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")


def documented_verbs() -> dict[str, dict[str, set[str]]]:
    _, _, table = PAGE.partition("| resource | `view` | `edit` and `admin`, besides |")
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:6]]
    found: dict[str, dict[str, set[str]]] = {role: {} for role in ROLES}
    for resource, view, edit in rows:
        name = RESOURCES[resource.strip()]
        reads, writes = (set(re.findall(r"`(\w+)`", cell)) for cell in (view, edit))
        found["view"][name] = reads
        found["edit"][name] = found["admin"][name] = reads | writes
    return found


def bind(http: Rest, role: str, namespace: str) -> None:
    group = "rbac.authorization.k8s.io"
    document = {
        "metadata": {"name": role},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": f"the-{role}"}],
    }
    assert http("POST", f"{RBAC}/namespaces/{namespace}/rolebindings", document).status == 201


def may(http: Rest, role: str, verb: str, resource: str, namespace: str) -> bool:
    plural, _, subresource = resource.partition("/")
    what = {"group": "deltashard.io", "resource": plural, "subresource": subresource}
    return http.is_allowed(f"the-{role}", verb=verb, namespace=namespace, **what)


def granted(http: Rest, role: str, namespace: str) -> dict[str, set[str]]:
    """Return every allowed (verb, resource) pair of deltashard's resources."""
    return {
        resource: {verb for verb in VERBS if may(http, role, verb, resource, namespace)}
        for resource in RESOURCES.values()
    }


@pytest.fixture(scope="module")
def bound(apiserver: ApiServer, http: Rest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    """Yield an aggregating cluster with a release and a user of each role in the namespace team-a."""
    with ControllerManager(apiserver, "clusterrole-aggregation-controller"):
        for name in ("team-a", "team-b"):
            http.namespace(name)
        for role in ROLES:
            bind(http, role, "team-a")
            assert granted(http, role, "team-a") == NOTHING, "before"
        Release(apiserver.kubeconfig, tmp_path_factory.mktemp("release")).install()
        eventually(lambda: may(http, "admin", "patch", "checkpointpolicies", "team-a"), what="aggregation")
        eventually(lambda: may(http, "view", "get", "checkpointruns", "team-a"), what="aggregation")
        yield http


@pytest.mark.parametrize("role", ROLES)
def test_namespace_roles_grant_documented_verbs_only(bound: Rest, role: str) -> None:
    """The users have these verbs in their namespace and none in another."""
    eventually(
        lambda: granted(bound, role, "team-a") == documented_verbs()[role], what=f"the rights of {role}"
    )
    assert granted(bound, role, "team-b") == NOTHING
    assert documented_verbs()["edit"]["checkpointpolicies"] == set(VERBS), "the documented table is parsed"
