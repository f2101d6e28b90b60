"""deltashard in the cluster, as an administrator installs it: the chart, by Helm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.image import OPERATOR, ROOT, SIDECAR, TAG
from tests.cluster.kubernetes.process import run, wait_until
from tests.support.machine import limit_s
from tests.support.tool import require_tool

if TYPE_CHECKING:
    from tests.cluster.kubernetes.cluster import LocalCluster

NAMESPACE = "deltashard-system"
RELEASE = "deltashard"
CHART = ROOT / "charts" / "deltashard"
WEBHOOK, CONTROLLER = "deltashard-webhook", "deltashard-controller"


class ClusterRelease:
    """The release, in its namespace."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def helm(self, *arguments: str | Path, timeout_s: float = 240.0) -> str:
        return run(
            require_tool("helm"), f"--kubeconfig={self._cluster.kubeconfig}", f"--namespace={NAMESPACE}", *arguments,
            timeout_s=timeout_s,
        )  # fmt: skip

    def install(
        self, *, tag: str = TAG, chart: Path = CHART, values: Mapping[str, Any] | None = None
    ) -> None:
        """Install this chart over any state; return when a Job would be injected and old pods are gone.

        The installation restores deleted objects. A webhook that ends still serves for a while, with its old
        configuration.
        """
        self.helm("upgrade", "--install", RELEASE, chart, "--create-namespace", *_values(tag, values))
        self.wait_ready()
        wait_until(
            lambda: not any("deletionTimestamp" in pod["metadata"] for pod in self.pods()),
            timeout_s=120,
            what="the old pods gone",
            every_s=0.3,
        )

    def uninstall(self) -> None:
        # Helm stops before it is killed: a killed Helm leaves a release that cannot be installed again.
        self.helm("uninstall", RELEASE, "--wait", "--ignore-not-found", f"--timeout={limit_s(200):.0f}s")

    def wait_ready(self) -> None:
        """Wait until both Deployments have all their replicas, of the newest template."""
        for name in (WEBHOOK, CONTROLLER):
            wait_until(lambda name=name: self.is_ready(name), timeout_s=180, what=self.logs, every_s=0.3)

    def is_ready(self, name: str) -> bool:
        found = self.deployment(name)
        wanted, status = found["spec"]["replicas"], found["status"]
        return bool(
            status.get("observedGeneration", 0) >= found["metadata"]["generation"]
            and status.get("replicas", 0) == wanted
            and status.get("updatedReplicas", 0) == wanted
            and status.get("readyReplicas", 0) == wanted
        )

    def deployment(self, name: str) -> Object:
        return self._cluster.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}")

    def pods(self) -> list[Object]:
        """Return the pods of both Deployments, without the pod that `helm test` leaves."""
        found = self._cluster.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
        return [pod for pod in found if pod["metadata"]["name"].startswith((f"{WEBHOOK}-", f"{CONTROLLER}-"))]

    def webhooks(self) -> list[Object]:
        return [pod for pod in self.pods() if pod["metadata"]["name"].startswith(f"{WEBHOOK}-")]

    def logs(self) -> str:
        states = [
            {each["name"]: each["state"] for each in pod["status"].get("containerStatuses", ())}
            for pod in self.pods()
        ]
        return f"{RELEASE} ready: {json.dumps(states)}"


def _values(tag: str, more: Mapping[str, Any] | None) -> list[str]:
    requests = {"cpu": "50m", "memory": "128Mi"}
    values = {
        "image": {"repository": OPERATOR, "tag": tag, "pullPolicy": "Never"},
        "sidecarImage": {"repository": SIDECAR, "tag": tag, "pullPolicy": "Never"},
        "defaultPolicy": {"sidecar": {"resources": {"requests": requests}}},
        "reclaim": {"enabled": True},
        **(more or {}),
    }
    return [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
