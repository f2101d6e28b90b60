"""The check of the audit log finds what it is there to find: without that, its silence would say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from tests.load.simulation import audit, control_plane
from tests.load.simulation.control_plane import CONTROLLER, SYSTEM, Plane
from tests.support.eventually import eventually
from tests.support.server.apiserver import Rest

ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "too-much"},
    "rules": [{"apiGroups": ["batch", ""], "resources": ["jobs", "pods"], "verbs": ["patch", "delete"]}],
}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "too-much"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "too-much"},
    "subjects": [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": SYSTEM}],
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A cluster of this file's own: what is written here must not be in the load test's log."""
    plane = Plane(tmp_path_factory.mktemp("audited"), nodes=1)
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture
def controller(plane: Plane) -> Iterator[client.ApiClient]:
    """A client with the controller's rights."""
    configuration = client.Configuration()
    config.load_kube_config(str(plane.kubeconfig(CONTROLLER)), client_configuration=configuration)
    with client.ApiClient(configuration) as api:
        yield api


def _found(plane: Plane) -> list[str]:
    return audit.findings(audit.requests(plane.audit_log, control_plane.account(CONTROLLER)))


def _eventually(rest: Rest, act: Callable[[], Any]) -> None:
    """Rights take a moment to be in force."""

    def done() -> bool:
        try:
            act()
        except client.ApiException as error:
            if error.status != 403:
                raise
            return False
        return True

    eventually(done, "rights in force", timeout_s=control_plane.PATIENCE_S)


def test_what_the_controller_must_not_write_is_found(plane: Plane, controller: client.ApiClient) -> None:
    """Reads and allowed writes are silent; a write to a user's object is found, granted or not."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "theirs"},
        "spec": {
            "suspend": True,
            "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "t", "image": "i"}]}},
        },
    }
    plane.make(job)
    batch = client.BatchV1Api(controller)
    assert batch.read_namespaced_job("theirs", "default").metadata.name == "theirs"
    review = client.V1TokenReview(
        api_version="authentication.k8s.io/v1",
        kind="TokenReview",
        spec=client.V1TokenReviewSpec(token="nonsense"),
    )
    client.AuthenticationV1Api(controller).create_token_review(review)
    assert _found(plane) == []
    counted = audit.counts(audit.requests(plane.audit_log, control_plane.account(CONTROLLER)))
    assert counted == {"get batch/jobs": 1, "create authentication.k8s.io/tokenreviews": 1}

    annotated = {"metadata": {"annotations": {"deltashard.io/seen": "yes"}}}
    with pytest.raises(client.ApiException, match="403"):
        batch.patch_namespaced_job("theirs", "default", annotated)
    refused, tried = "patch batch/jobs default/theirs: 403", "(1 times)"
    assert _found(plane) == [f"not allowed: {refused} {tried}", f"refused: {refused} {tried}"]

    plane.make(ROLE)
    plane.make(BINDING)
    _eventually(plane.rest, lambda: batch.patch_namespaced_job("theirs", "default", annotated))
    assert f"not allowed: patch batch/jobs default/theirs: 200 {tried}" in _found(plane)
    batch.delete_namespaced_job("theirs", "default")
    assert f"not allowed: delete batch/jobs default/theirs: 200 {tried}" in _found(plane)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
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


@pytest.mark.parametrize(
    ("verb", "name", "well"),
    [
        ("create", "deltashard-reclaim-0b4f3c1e0000", True),
        ("create", "train", False),
        ("delete", "deltashard-reclaim-0b4f3c1e0000", False),
    ],
)
def test_of_jobs_it_makes_those_that_remove_bytes_alone(verb: str, name: str, well: bool) -> None:
    asked = audit.Request(
        user=control_plane.account(CONTROLLER), verb=verb, group="batch", resource="jobs", namespace="team", name=name,
        status=201,
    )  # fmt: skip
    assert (audit.findings([asked]) == []) is well


def test_a_log_without_the_user_says_nothing(tmp_path: Path) -> None:
    """Requests of others are none of the controller's."""
    line = '{"stage":"ResponseComplete","verb":"patch","requestURI":"/x","user":%s}\n'
    (tmp_path / "audit.jsonl").write_text(line % '{"username":"someone"}' + line % "{}")
    assert list(audit.requests(tmp_path / "audit.jsonl", control_plane.account(CONTROLLER))) == []
