"""A training Job with its sidecar, written by hand as the webhook would have injected it, and what is asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.cluster.apis import Api, Object
from tests.cluster.images import SIDECAR, TRAINER
from tests.cluster.processes import ClusterError, wait_until

GROUP = 65532
"""Group of arena and socket: the sidecar's own, and a supplementary one of the pod."""
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _mount(name: str, path: str) -> Object:
    return {"name": name, "mountPath": path}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One Job, in its namespace."""

    api: Api
    namespace: str
    name: str
    url: str
    witness: str
    steps: int
    every_s: float = 1.0
    pace_s: float = 0.02
    grace_s: int = 30

    @property
    def run(self) -> str:
        """Name of the run on the store."""
        return f"{self.namespace}.{self.name}"

    def manifest(self) -> Object:
        """The Job as it would be applied."""
        env = {
            "DELTASHARD_URL": self.url,
            "DELTASHARD_RUN": self.run,
            "DELTASHARD_DIR": "/run/deltashard",
            "DELTASHARD_CACHE_DIR": "/var/cache/deltashard",
            "DELTASHARD_ARENA_BYTES": "64MiB",
            "DELTASHARD_CACHE_BYTES": "230MiB",
            "DELTASHARD_EVERY_S": str(self.every_s),
            "DELTASHARD_ENCODING": "fp32",
            "AWS_SHARED_CREDENTIALS_FILE": "/etc/deltashard/store/credentials",
        }
        command = ["deltashard-sidecar"]
        sidecar = {
            "name": "deltashard-sidecar",
            "image": SIDECAR,
            "imagePullPolicy": "Never",
            "restartPolicy": "Always",
            "args": ["serve"],
            "env": [
                *({"name": key, "value": value} for key, value in env.items()),
                _field("DELTASHARD_OWNER", "metadata.labels['batch.kubernetes.io/controller-uid']"),
            ],
            "startupProbe": {
                "exec": {"command": [*command, "health"]},
                "periodSeconds": 1,
                "timeoutSeconds": 5,
                "failureThreshold": 60,
            },
            "lifecycle": {"preStop": {"exec": {"command": [*command, "notify", "--reason", "stopping"]}}},
            "resources": {
                "requests": {"cpu": "50m", "memory": "320Mi", "ephemeral-storage": "256Mi"},
                "limits": {"memory": "512Mi"},
            },
            "securityContext": {**_RESTRICTED, "runAsUser": GROUP, "runAsGroup": GROUP},
            "volumeMounts": [
                _mount("deltashard-shm", "/run/deltashard"),
                _mount("deltashard-cache", "/var/cache/deltashard"),
                _mount("deltashard-store", "/etc/deltashard/store"),
            ],
        }
        trainer = {
            "name": "trainer",
            "image": TRAINER,
            "imagePullPolicy": "Never",
            "args": ["/app/train.py"],
            "env": [
                {"name": "DELTASHARD_SOCKET", "value": "/run/deltashard/sidecar.sock"},
                {"name": "STEPS", "value": str(self.steps)},
                {"name": "PACE_S", "value": str(self.pace_s)},
                {"name": "WITNESS", "value": self.witness},
                _field("POD_NAME", "metadata.name"),
                _field("NODE_NAME", "spec.nodeName"),
            ],
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
            "securityContext": {**_RESTRICTED, "runAsUser": 1001, "runAsGroup": 1001},
            "volumeMounts": [_mount("deltashard-shm", "/run/deltashard"), _mount("tmp", "/tmp")],
        }
        lost = [
            {
                "key": f"node.kubernetes.io/{why}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 2,
            }
            for why in ("not-ready", "unreachable")
        ]
        pod = {
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": self.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "dnsPolicy": "Default",
            "securityContext": {
                "supplementalGroups": [GROUP],
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [sidecar],
            "containers": [trainer],
            "tolerations": lost,
            "volumes": [
                {"name": "deltashard-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "80Mi"}},
                {"name": "deltashard-cache", "emptyDir": {"sizeLimit": "256Mi"}},
                {"name": "deltashard-store", "secret": {"secretName": "store", "optional": True}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"backoffLimit": 20, "template": {"spec": pod}},
        }

    @property
    def _path(self) -> str:
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{self.name}"

    def apply(self) -> None:
        """Create it."""
        self.api.create(f"/apis/batch/v1/namespaces/{self.namespace}/jobs", self.manifest())

    def delete(self) -> None:
        """Delete it and its pods, and wait until they are gone."""
        self.api.delete(self._path, propagationPolicy="Background")
        wait_until(lambda: not self.pods(), timeout_s=90, what=f"the pods of {self.name} gone")

    def conditions(self) -> dict[str, str]:
        """The Job's conditions, type to status."""
        found = self.api.get(self._path)["status"].get("conditions", ())
        return {each["type"]: each["status"] for each in found}

    def wait_complete(self, *, timeout_s: float = 90.0) -> None:
        """Wait until the Job is Complete; raises at once when it failed."""

        def complete() -> bool:
            conditions = self.conditions()
            if conditions.get("Failed") == "True":
                raise ClusterError(f"Job {self.name} failed: {self.api.get(self._path)['status']}")
            return conditions.get("Complete") == "True"

        wait_until(complete, timeout_s=timeout_s, what=lambda: f"{self.name} complete: {self.pods()}")

    def pods(self) -> list[Object]:
        """Its pods, the terminating ones included."""
        return self.api.items(
            f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=batch.kubernetes.io/job-name%3D{self.name}"
        )

    def pod(self, name: str) -> Object | None:
        """One pod, None when it is gone."""
        return self.api.find(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def wait_gone(self, pod: str, *, timeout_s: float) -> None:
        """Wait until a pod is gone."""
        wait_until(lambda: self.pod(pod) is None, timeout_s=timeout_s, what=f"pod {pod} gone")

    def log(self, pod: str, container: str, *, previous: bool = False) -> str:
        """A container's log."""
        query = f"container={container}&previous={str(previous).lower()}"
        return self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log?{query}")

    def container(self, pod: str, name: str) -> dict[str, Any]:
        """The status of one container, native sidecars included."""
        found = self.pod(pod)
        if found is None:
            raise ClusterError(f"pod {pod} is gone")
        status = found["status"]
        for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            if each["name"] == name:
                return dict(each)
        raise ClusterError(f"pod {pod} has no container {name} yet")

    def evict(self, pod: str) -> None:
        """Ask for its eviction, as a drain or an autoscaler does."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        self.api.create(f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction", body)

    def delete_pod(self, pod: str) -> None:
        """What `kubectl delete pod` does."""
        self.api.delete(f"/api/v1/namespaces/{self.namespace}/pods/{pod}")
