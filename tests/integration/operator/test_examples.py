"""A real API server accepts examples/kubernetes and the golden objects."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from deltashard_operator.kube import cluster_name

from tests.support.operator.example import MANIFESTS, UID, WORKLOADS, documents, injected
from tests.support.operator.golden import CASES, FOLDER
from tests.support.server.apiserver import Rest

BUILTIN = {"v1", "apps/v1", "batch/v1", "deltashard.io/v1alpha1"}


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the pod that the Job's controller would create. A pod is returned unchanged."""
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


def _post(http: Rest, document: dict[str, Any], namespace: str) -> None:
    reply = http.create(document, namespace, dry_run=True, strict=True)
    assert (reply.status, reply.warnings) == (201, []), reply.document


def test_api_server_accepts_examples(http: Rest) -> None:
    """Every built-in kind and the policy are accepted, as written and as injected, under PodSecurity restricted.

    No field is unknown and no warning appears. The pods of all workloads with their sidecar also fit the standard.
    """
    http.namespace(
        "examples", {f"pod-security.kubernetes.io/{how}": "restricted" for how in ("enforce", "warn")}
    )
    for path in MANIFESTS:
        for document in documents(path):
            if document["apiVersion"] in BUILTIN:
                _post(http, document, "examples")
    for path in WORKLOADS:
        document = injected(path)
        document["metadata"].pop("ownerReferences", None)  # of an object that does not exist
        _post(http, document, "examples")
        _post(http, pod_of(document), "examples")


@pytest.mark.parametrize("case", CASES)
def test_every_golden_object_is_valid(case: str, http: Rest) -> None:
    """The API server accepts each recorded admission result."""
    document = yaml.safe_load((FOLDER / f"{case}.out.yaml").read_text())
    reply = http.create(document, dry_run=True)
    assert reply.status == 201, reply
