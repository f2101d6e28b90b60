"""A cluster without kubelets: etcd, API server, Job controller, kwok for the nodes, and the chart rendered by Helm.

The chart is complete except for its pods: service accounts and their permissions, custom resources, the webhook's
configuration, empty Secrets. The pods are processes (`operator_process`), each with the token of its service account, so that
a missing permission fails here, too. Two things differ from a real cluster: the webhook's Service becomes a name
for loopback, and its calls have a longer timeout. The API server calls it and checks the certificate for the Service's
name.

The API server logs the requests of both accounts, including reads, before it answers them (`audit`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.load.simulation.process import LoggedProcess
from tests.support import helm
from tests.support.eventually import eventually
from tests.support.operator import webhook_process
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import free_port
from tests.support.tool import require_tool

SYSTEM = "deltashard-system"
CONTROLLER, WEBHOOK = "deltashard-controller", "deltashard-webhook"
"""Names of the Deployments, the service accounts and the webhook's configuration."""
STORE = "s3://checkpoints/load"
TIMEOUT_S = 120.0
_SKIPPED_KINDS = {
    "Deployment",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "PodMonitor",
    "ServiceMonitor",
    "PrometheusRule",
}
_CONTROLLERS = (
    "job-controller",
    "serviceaccount-controller",
    "garbage-collector-controller",
    "pod-garbage-collector-controller",
)


def account(name: str) -> str:
    return f"system:serviceaccount:{SYSTEM}:{name}"


def audit_flags(folder: Path) -> list[str]:
    """Return the flags by which the API server logs requests of the two accounts in `folder`/audit.jsonl."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata", "users": [account(CONTROLLER), account(WEBHOOK)]}, {"level": "None"}],
    }
    (folder / "audit-policy.json").write_text(json.dumps(policy))
    return [
        f"--audit-policy-file={folder}/audit-policy.json",
        f"--audit-log-path={folder}/audit.jsonl",
        "--audit-log-maxsize=4000",  # MiB: one file
        "--audit-log-mode=blocking-strict",  # an event is in the file before its request is answered
    ]


def render_chart(interval_s: float, nudge_port: int) -> Iterator[dict[str, Any]]:
    """Return the chart's objects without pods, hooks and monitors, with these settings in the default policy."""
    every, sidecar = {"every": f"{interval_s:.0f}s"}, {"metricsPort": nudge_port}
    values = {"defaultPolicy": {"store": {"url": STORE}, "interval": every, "sidecar": sidecar}}
    for document in helm.render(values, namespace=SYSTEM).documents:
        if document["kind"] not in _SKIPPED_KINDS and not helm.is_hook(document):
            yield document


class ControlPlane:
    """The cluster, from `start` to `stop`."""

    def __init__(self, folder: Path, *, nodes: int, interval_s: float = 300.0) -> None:
        """Configure a cluster whose default policy saves every `interval_s` seconds."""
        self.folder = folder
        self._interval_s = interval_s
        self.nodes = [f"node-{number}" for number in range(nodes)]
        self.apiserver = ApiServer(folder, *audit_flags(folder))
        self.audit_log = folder / "audit.jsonl"
        self.webhook_port = free_port()
        self.nudge_port = free_port()
        """The metrics port of every sidecar, which receives the nudges."""
        self.job_controller = LoggedProcess(
            "kube-controller-manager",
            [
                require_tool("kubernetes") / "kube-controller-manager", f"--kubeconfig={folder}/kubeconfig",
                "--bind-address=127.0.0.1", f"--secure-port={free_port()}", f"--cert-dir={folder}/manager",
                "--leader-elect=false", f"--controllers={','.join(_CONTROLLERS)}",
                "--kube-api-qps=200", "--kube-api-burst=400",
            ],
            folder=folder,
        )  # fmt: skip
        self.kwok = LoggedProcess(
            "kwok",
            [
                require_tool("kwok"), f"--kubeconfig={folder}/kubeconfig", "--manage-all-nodes",
                f"--config={Path(__file__).parent}/stages.yaml", "--node-lease-duration-seconds=0", "-v=WARN",
            ],
            folder=folder,
        )  # fmt: skip

    def start(self) -> None:
        """Start all processes; returns when Jobs can be created and pods run."""
        self.apiserver.start()
        self.rest = self.apiserver.http()
        try:
            self.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
            self._install()
            self.job_controller.start()
            self.kwok.start()
            for name in self.nodes:
                self.make({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
            eventually(self._nodes_ready, what="nodes of kwok", timeout_s=TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.kwok.stop()
        self.job_controller.stop()
        self.rest.__exit__()
        self.apiserver.stop()

    def make(self, document: dict[str, Any], namespace: str = "default") -> dict[str, Any]:
        reply = self.rest.create(document, namespace)
        assert reply.status == 201, reply.document
        return reply.document

    def namespace(self, name: str) -> None:
        self.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        eventually(lambda: self.rest("GET", path).status == 200, what=path, timeout_s=TIMEOUT_S)

    def mount(self, kind: str, name: str, folder: Path) -> bool:
        """Write the data of a Secret or ConfigMap into files, as a kubelet does; return False if it has none."""
        folder.mkdir(exist_ok=True)
        path = f"/api/v1/namespaces/{SYSTEM}/{kind}/{name}"
        data = self.rest("GET", path).document.get("data") or {}
        for key, value in data.items():
            content = base64.b64decode(value) if kind == "secrets" else value.encode()
            (folder / key).write_bytes(content)
        return bool(data)

    def metrics(self) -> str:
        return self.rest.text("/metrics")

    def _install(self) -> None:
        definitions = []
        documents = list(render_chart(self._interval_s, self.nudge_port))
        for document in documents:
            if document["kind"] == "Service" and document["metadata"]["name"] == WEBHOOK:
                document["spec"] = {"type": "ExternalName", "externalName": "localhost"}
            if document["kind"] == "MutatingWebhookConfiguration":
                for hook in document["webhooks"]:
                    hook["clientConfig"]["service"]["port"] = self.webhook_port
                    hook["timeoutSeconds"] = webhook_process.ADMISSION_TIMEOUT_S
            if document["kind"] == "CustomResourceDefinition":
                definitions.append(document["metadata"]["name"])
            self.make(document, SYSTEM)
        kinds = {document["kind"] for document in documents}
        assert {"MutatingWebhookConfiguration", "ClusterRole", "CustomResourceDefinition"} <= kinds
        for name in definitions:
            eventually(lambda name=name: self._is_established(name), what=name, timeout_s=TIMEOUT_S)

    def _is_established(self, name: str) -> bool:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        conditions = self.rest("GET", path).document.get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    def _nodes_ready(self) -> bool:
        self.kwok.check()
        self.job_controller.check()
        found = self.rest("GET", "/api/v1/nodes").document["items"]
        return sum(node["status"].get("phase") == "Running" for node in found) == len(self.nodes)


def objects(rest: Rest, path: str) -> Iterator[dict[str, Any]]:
    more = ""
    while True:
        page = rest("GET", f"{path}{'&' if '?' in path else '?'}limit=500{more}")
        assert page.status == 200, page.document
        yield from page.document["items"]
        token = page.document["metadata"].get("continue")
        if not token:
            return
        more = f"&continue={token}"
