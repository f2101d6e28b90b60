"""examples/kubernetes before a real API server."""

from __future__ import annotations

from typing import Any

from deltashard_operator.kube import cluster_name

from tests.support.operator.example import (
    MANIFESTS,
    UID,
    WORKLOADS,
    documents,
    injected,
)
from tests.support.server.apiserver import ApiServer, Rest

BUILTIN = {"v1", "apps/v1", "batch/v1", "deltashard.io/v1alpha1"}


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """A pod as the Job's controller would create it; a pod is itself."""
    if document["kind"] == "Pod":
        return document
    template = document["spec"]["template"]
    labels = {
        **(template["metadata"].get("labels") or {}),
        cluster_name.JOB_UID_LABEL: UID,
        cluster_name.JOB_NAME_LABEL: document["metadata"]["name"],
    }
    metadata = {**template["metadata"], "labels": labels, "name": f"{document['metadata']['name']}-abcde"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


PLURALS = {"CheckpointPolicy": "checkpointpolicies"}


def _post(rest: Rest, document: dict[str, Any], namespace: str) -> None:
    version = document["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = PLURALS.get(document["kind"], document["kind"].lower() + "s")
    path = f"{root}/namespaces/{namespace}/{plural}?fieldValidation=Strict"
    reply = rest("POST", path, document, dry_run=True)
    assert reply.status == 201, reply.document
    assert not reply.warnings, reply.warnings


def test_a_real_api_server_takes_them(apiserver: ApiServer) -> None:
    """Every built-in kind and the policy, as written and as injected, in a namespace under PodSecurity restricted.

    No field unknown, no warning; the pods of all workloads fit the standard too, with their sidecar.
    """
    with apiserver.http() as rest:
        rest.namespace(
            "examples", {f"pod-security.kubernetes.io/{how}": "restricted" for how in ("enforce", "warn")}
        )
        for path in MANIFESTS:
            for document in documents(path):
                if document["apiVersion"] in BUILTIN:
                    _post(rest, document, "examples")
        for path in WORKLOADS:
            document = injected(path)
            document["metadata"].pop("ownerReferences", None)  # of an object that nobody made
            _post(rest, document, "examples")
            _post(rest, pod_of(document), "examples")
