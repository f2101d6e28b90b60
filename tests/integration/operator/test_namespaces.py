"""Injected pods in namespaces with rules of their own: PodSecurity restricted, LimitRange, ResourceQuota. All real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample
from tests.support.operator.golden import CASES, FOLDER
from tests.support.server.apiserver import ApiServer, Rest

RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


@pytest.fixture
def rest(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as rest:
        yield rest


def pod(name: str, **container: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "train", **container}
    metadata = {"name": name, "annotations": {cluster_name.POLICY: "default"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [trainer]}}


def injected(document: dict[str, Any], policy: dict[str, Any] | None = None) -> dict[str, Any]:
    response = sample.answer(document, policy)
    assert response["allowed"], response
    return sample.applied(document, response)


def own(tmp: pytest.TempPathFactory, rest: Rest, labels: dict[str, str] | None = None) -> str:
    """A namespace of this test's own."""
    name = tmp.mktemp("namespace").name.lower()
    rest.namespace(name, labels)
    return name


def test_a_restricted_pod_stays_restricted(rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """PodSecurity admits it after injection as before, and a policy that leaves the user to the cluster, too."""
    namespace = own(tmp_path_factory, rest, RESTRICTED)
    golden = yaml.safe_load((FOLDER / "psa-restricted.in.yaml").read_text())
    document = {"apiVersion": "v1", "kind": "Pod", "spec": golden["spec"]["template"]["spec"]}
    document["metadata"] = {"name": "restricted", "annotations": {cluster_name.POLICY: "default"}}
    assert rest.create(document, namespace, dry_run=True).status == 201
    for policy in ({}, {"sidecar": {"runAsUser": None}}):
        reply = rest.create(injected(document, policy), namespace, dry_run=True)
        assert reply.status == 201, reply
    assert rest.create(pod("unfit"), namespace, dry_run=True).status == 403, "the namespace does refuse"


def test_a_limit_range_neither_sizes_nor_breaks_the_sidecar(
    rest: Rest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its defaults fill what nobody stated: the user's containers, and of the sidecar nothing but a storage limit."""
    namespace = own(tmp_path_factory, rest)
    defaults = {"cpu": "10m", "memory": "16Mi"}
    limits = {"type": "Container", "default": defaults, "defaultRequest": defaults}
    document = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "small"},
        "spec": {"limits": [limits]},
    }
    assert rest.create(document, namespace).status == 201
    found = injected(pod("a"))
    reply = rest.create(found, namespace, dry_run=True)
    assert reply.status == 201, reply
    assert reply.document["spec"]["containers"][0]["resources"]["limits"] == defaults, "the range is in force"
    assert sample.sidecar_of(reply.document)["resources"] == sample.sidecar_of(found)["resources"]


def test_a_default_for_storage_needs_a_limit_in_the_policy(
    rest: Rest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A default limit below the cache would make the pod invalid; a policy that states the limit is not touched."""
    namespace = own(tmp_path_factory, rest)
    limits = {"type": "Container", "default": {"ephemeral-storage": "1Gi"}}
    document = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "disk"},
        "spec": {"limits": [limits]},
    }
    assert rest.create(document, namespace).status == 201
    assert rest.create(injected(pod("a")), namespace, dry_run=True).status == 422
    policy = {"sidecar": {"resources": {"limits": {"ephemeral-storage": "11Gi"}}}}
    assert rest.create(injected(pod("a"), policy), namespace, dry_run=True).status == 201


def test_a_quota_sees_every_request_and_limit(rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A namespace whose quota demands requests and limits of every container takes the sidecar."""
    namespace = own(tmp_path_factory, rest)
    hard = {"requests.cpu": "10", "requests.memory": "10Gi", "limits.cpu": "10", "limits.memory": "10Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}}
    assert rest.create(quota, namespace).status == 201
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/q/status"
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}  # the controller manager's part
    assert rest("PATCH", path, status, content="application/merge-patch+json").status == 200
    amounts = {"cpu": "1", "memory": "1Gi"}
    resources = {"requests": amounts, "limits": amounts}
    assert rest.create(pod("bare"), namespace, dry_run=True).status == 403, "the quota is in force"
    reply = rest.create(injected(pod("a", resources=resources)), namespace, dry_run=True)
    assert reply.status == 201, reply


def test_guaranteed_stays_guaranteed(rest: Rest) -> None:
    """By the API server's own word: it computes the class of a pod it creates."""
    amounts = {"cpu": "1", "memory": "1Gi"}
    for resources, quality in (({"limits": amounts}, "Guaranteed"), ({"requests": amounts}, "Burstable")):
        reply = rest.create(injected(pod("q", resources=resources)), dry_run=True)
        assert reply.document["status"]["qosClass"] == quality


@pytest.mark.parametrize("case", CASES)
def test_every_golden_object_is_valid(case: str, rest: Rest) -> None:
    """What is on record as the result of an admission is an object the API server takes."""
    document = yaml.safe_load((FOLDER / f"{case}.out.yaml").read_text())
    reply = rest.create(document, dry_run=True)
    assert reply.status == 201, reply
