"""Objects with pod templates, injected and applied again through a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from deltashard_operator.kube import cluster_name

from tests.support.operator.definition import define
from tests.support.operator.webhook_process import WebhookProcess, opted, registered
from tests.support.server.apiserver import Rest


@pytest.mark.parametrize(
    ("kind", "version", "hold"),
    [
        (
            "JobSet",
            "jobset.x-k8s.io/v1alpha2",
            lambda pod: {"replicatedJobs": [{"name": "w", "template": {"spec": {"template": pod}}}]},
        ),
        ("PyTorchJob", "kubeflow.org/v1", lambda pod: {"pytorchReplicaSpecs": {"Worker": {"template": pod}}}),
    ],
)
def test_templates_keep_sidecar_when_reapplied(
    http: Rest, shared_webhook: WebhookProcess, kind: str, version: str, hold: Callable[[Any], Any]
) -> None:
    """Match conditions select the templates. Client-side apply sends lists as the user wrote them."""
    group, _, name = version.partition("/")
    plural = f"{kind.lower()}s"
    define(http, group, name, kind)
    pod = {
        "metadata": {"annotations": opted()},
        "spec": {"containers": [{"name": "trainer", "image": "t"}], "volumes": [{"name": "mine"}]},
    }
    spec = hold(pod)
    document = {"apiVersion": version, "kind": kind, "metadata": {"name": "ads"}, "spec": spec}
    path = f"/apis/{version}/namespaces/default/{plural}"
    with registered(http, shared_webhook.client_config()):
        made = http("POST", path, document)
        assert made.status == 201, made
        assert cluster_name.SIDECAR in json.dumps(made.document["spec"])
        again = http("PATCH", f"{path}/ads", {"spec": spec}, content="application/merge-patch+json")
        assert again.status == 200, again
        assert again.document["spec"] == made.document["spec"]
        suspended = {"spec": {"suspend": True}}
        change = http("PATCH", f"{path}/ads", suspended, content="application/merge-patch+json")
        assert change.document["spec"] == made.document["spec"] | {"suspend": True}
        assert http("DELETE", f"{path}/ads").status == 200
