"""`deltashard-webhook` as a process, its configuration in the cluster, and objects that it admits."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deltashard_operator.kube import cluster_name, webhook_configuration

from tests.support.eventually import eventually
from tests.support.helm import render
from tests.support.operator import sample
from tests.support.operator.operator_process import OperatorProcess
from tests.support.server.apiserver import CertificateAuthority, Reply, Rest, put
from tests.support.server.minio_server import free_port

ADMISSION_TIMEOUT_S = 30
"""Time limit of an admission on a busy machine: the maximum of an API server."""
PROGRAM = f"""
import sys
from deltashard_operator.kube import webhook_configuration
webhook_configuration.TIMEOUT_S = {ADMISSION_TIMEOUT_S}
from deltashard_operator import main
sys.exit(main.main())
"""
"""`deltashard-webhook` with that time limit."""


@dataclass
class WebhookProcess(OperatorProcess):
    """The process `deltashard-webhook`."""

    drain_s: float = 0.5
    policy: dict[str, Any] = field(default_factory=lambda: {**sample.DEFAULTS, "interval": {"max": "1h"}})
    port: int = 0

    def start(self, *, certificate: bool = True) -> None:
        """Start and wait until the process is ready; without a certificate, until it is alive."""
        self.port = self.port or free_port()
        if certificate:
            put(self.directory, self.authority.issue())
        self.run("-c", PROGRAM, port=self.port, drain_s=self.drain_s)
        page = "healthz" if certificate else "livez"
        eventually(lambda: self.get(page)[0] == 200, timeout_s=120, what="the webhook")

    def client_config(self, *authorities: CertificateAuthority) -> dict[str, Any]:
        bundle = b"".join(each.pem for each in authorities or (self.authority,))
        return {
            "url": f"https://127.0.0.1:{self.port}{webhook_configuration.PATH}",
            "caBundle": base64.b64encode(bundle).decode(),
        }


HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def job(name: str, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train"}], **spec}
    metadata: dict[str, Any] = {"name": name}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"template": {"spec": pod}},
    }


def pod(name: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    found = job(name, annotations)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": found["metadata"],
        "spec": found["spec"]["template"]["spec"],
    }


def opted(**more: str) -> dict[str, str]:
    return {cluster_name.POLICY: "default"} | {
        cluster_name.PREFIX + key.replace("_", "-"): v for key, v in more.items()
    }


def has_sidecar(reply: Reply) -> bool:
    spec = reply.document.get("spec", {})
    inits = spec.get("template", {"spec": spec})["spec"].get("initContainers") or []
    return any(c["name"] == cluster_name.SIDECAR for c in inits)


def configuration(client_config: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's configuration of the webhook, with this timeout."""
    document = render().find("MutatingWebhookConfiguration")
    for hook in document["webhooks"]:
        hook |= {"timeoutSeconds": ADMISSION_TIMEOUT_S, "clientConfig": client_config}
    return document


@contextmanager
def registered(rest: Rest, client_config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Register the webhook in the cluster and wait until it applies; yield a function that changes its target."""

    def probe() -> Reply:
        return rest.create(job("probe", opted()), dry_run=True)

    document = configuration(client_config)
    path = f"{HOOKS}/{webhook_configuration.CONFIGURATION}"
    assert rest("POST", HOOKS, document).status == 201

    def change(client_config: dict[str, Any]) -> None:
        document = configuration(client_config)
        document["metadata"]["resourceVersion"] = rest("GET", path).document["metadata"]["resourceVersion"]
        assert rest("PUT", path, document).status == 200

    try:
        eventually(lambda: probe().status != 201 or has_sidecar(probe()), what="the configuration in force")
        yield change
    finally:
        assert rest("DELETE", path).status == 200
        eventually(lambda: probe().status == 201 and not has_sidecar(probe()), what="the configuration's end")
