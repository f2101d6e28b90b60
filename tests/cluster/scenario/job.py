"""Training Jobs as users write them: plain Jobs with the one annotation, a CheckpointPolicy, a Secret; and queries about them.

This module does not mention sidecars: the webhook injects them.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.cluster.kubernetes.api import KubeApi, Object
from tests.cluster.kubernetes.image import TAG, TRAINER
from tests.cluster.kubernetes.node import POOL
from tests.cluster.kubernetes.process import ClusterError, wait_until

SIDECAR = "deltashard-sidecar"
POLICY = "deltashard.io/policy"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}
"""The security context that PodSecurity *restricted* requires of a container."""
SHORT_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2}
    for why in ("not-ready", "unreachable")
]
"""A pod of a lost node is evicted after 2 s instead of 5 min; only for scenarios that lose nodes."""


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def policy(name: str, *, url: str, endpoint: str, secret: str = "store", **spec: Any) -> Object:
    store = {"url": url, "endpoint": endpoint, "secretRef": {"name": secret}}
    document = {
        "store": store,
        "interval": {"every": "1s"},
        "precision": {"encoding": "fp32"},
        "arenaSize": "64Mi",
    }
    document |= {"cacheSize": "256Mi", "gracePeriod": "30s", **spec}
    return {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": name},
        "spec": document,
    }


def credentials(keys: Mapping[str, str]) -> dict[str, str]:
    """Return the data of a Secret with a store's credentials, as an AWS credentials file."""
    text = "[default]\n" + "".join(f"{key.lower()} = {value}\n" for key, value in keys.items())
    return {"credentials": base64.b64encode(text.encode()).decode()}


def training_job(
    name: str,
    *,
    server: str,
    steps: int,
    pace_s: float,
    notes: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
    pool: str = "",
    container: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Object:
    env = {"STEPS": str(steps), "PACE_S": str(pace_s), "EVENT_SERVER": server}
    trainer: Object = {
        "name": "trainer",
        "image": f"{TRAINER}:{TAG}",
        "imagePullPolicy": "Never",
        "args": ["/app/train.py"],
        "env": [
            *({"name": key, "value": value} for key, value in env.items()),
            _field("POD_NAME", "metadata.name"),
            _field("POD_NAMESPACE", "metadata.namespace"),
            _field("NODE_NAME", "spec.nodeName"),
        ],
        "resources": {"requests": {"cpu": "10m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {**RESTRICTED, "runAsUser": 1001, "runAsGroup": 1001},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **(container or {}),
    }
    template: Object = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [trainer],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        **(pod or {}),
    }
    if pool:
        template["nodeSelector"] = {POOL: pool}
        template["tolerations"] = [
            *copy.deepcopy(SHORT_TOLERATIONS),
            {"key": POOL, "value": pool, "effect": "NoSchedule"},
        ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**(labels or {})},
            "annotations": {POLICY: "training", **notes},
        },
        "spec": {"backoffLimit": 20, "template": {"spec": template}, **(spec or {})},
    }


class WorkloadType(NamedTuple):
    """The API path of a kind of workload, and the label of its pods."""

    api: str
    plural: str
    pod_label: str
    """The pod label whose value is the workload's name."""


JOB = WorkloadType("/apis/batch/v1", "jobs", "batch.kubernetes.io/job-name")
PYTORCH_JOB = WorkloadType("/apis/kubeflow.org/v1", "pytorchjobs", "training.kubeflow.org/job-name")
TRAIN_JOB = WorkloadType("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs", "jobset.sigs.k8s.io/jobset-name")
JOBSET = WorkloadType("/apis/jobset.x-k8s.io/v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-name")


@dataclass(slots=True, kw_only=True)
class TrainingJob:
    """One Job (or JobSet, PyTorchJob, TrainJob), in its namespace."""

    api: KubeApi
    namespace: str
    manifest: Object
    kind: WorkloadType = JOB
    uid: str = ""
    """The UID, once the object is applied."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def run_id(self) -> str:
        """The run's name: the annotation `run-id`, else `{name}-{uid}`."""
        named = self.manifest["metadata"].get("annotations", {}).get("deltashard.io/run-id")
        return str(named or f"{self.name}-{self.uid}")

    @property
    def run(self) -> str:
        return f"{self.namespace}/{self.run_id}"

    @property
    def _path(self) -> str:
        return f"{self._folder}/{self.name}"

    @property
    def _folder(self) -> str:
        return f"{self.kind.api}/namespaces/{self.namespace}/{self.kind.plural}"

    def apply(self) -> None:
        made = self.api.create(self._folder, self.manifest)
        self.uid = made["metadata"]["uid"]

    def get(self) -> Object:
        return self.api.get(self._path)

    def patch(self, change: Object) -> None:
        self.api.patch(self._path, change)

    def checkpoint_run(self) -> Object | None:
        """Return the CheckpointRun whose spec names this workload's UID; None when there is none."""
        path = f"/apis/deltashard.io/v1alpha1/namespaces/{self.namespace}/checkpointruns"
        return next(
            (each for each in self.api.items(path) if each["spec"]["workload"]["uid"] == self.uid), None
        )

    def status(self) -> Object:
        return dict((self.checkpoint_run() or {}).get("status") or {})

    def wait_status(self, what: str, matches: Callable[[Object], Any], *, timeout_s: float = 120.0) -> Object:
        found: Object = {}

        def done() -> Any:
            found.clear()
            found.update(self.status())
            return matches(found)

        wait_until(
            done, timeout_s=timeout_s, every_s=0.3, what=lambda: f"{self.name}, {what}: {json.dumps(found)}"
        )
        return found

    def events(self) -> list[Object]:
        found = self.api.items(f"/api/v1/namespaces/{self.namespace}/events")
        return [each for each in found if each["involvedObject"]["name"].startswith(self.name)]

    def wait_event(self, reason: str, *, timeout_s: float = 120.0) -> Object:
        found: list[Object] = []

        def recorded() -> bool:
            found[:] = [each for each in self.events() if each["reason"] == reason][:1]
            return bool(found)

        wait_until(
            recorded, timeout_s=timeout_s, every_s=0.3,
            what=lambda: f"Event {reason} of {self.name}; there are "
            f"{sorted({each['reason'] for each in self.events()})}",
        )  # fmt: skip
        return found[0]

    def wait_condition(self, kind: str, status: str = "True", *, timeout_s: float = 120.0) -> Object:

        def matching(run: Object) -> list[Object]:
            known = run.get("conditions", ())
            return [each for each in known if (each["type"], each["status"]) == (kind, status)]

        return matching(self.wait_status(f"condition {kind} {status}", matching, timeout_s=timeout_s))[0]

    def wait_phase(self, *phases: str, timeout_s: float = 120.0) -> None:
        self.wait_status(f"{phases}", lambda run: run.get("phase") in phases, timeout_s=timeout_s)

    def delete(self) -> None:
        self.api.delete(self._path, propagationPolicy="Background")
        wait_until(lambda: not self.pods(), timeout_s=90, what=f"the pods of {self.name} gone")

    def conditions(self) -> dict[str, str]:
        found = self.get()["status"].get("conditions", ())
        return {each["type"]: each["status"] for each in found}

    def wait_complete(self, *, timeout_s: float = 180.0) -> None:
        """Wait until the Job is Complete; raise at once when it failed."""

        def complete() -> bool:
            conditions = self.conditions()
            if conditions.get("Failed") == "True":
                raise ClusterError(f"Job {self.name} failed: {self.get()['status']}")
            return conditions.get("Complete") == "True"

        wait_until(complete, timeout_s=timeout_s, what=lambda: f"{self.name} complete: {self.pods()}")

    def pods(self) -> list[Object]:
        selector = f"{self.kind.pod_label}%3D{self.name}"
        return self.api.items(f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}")

    def pod(self, name: str) -> Object | None:
        return self.api.find(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def wait_gone(self, pod: str, *, timeout_s: float) -> None:
        wait_until(lambda: self.pod(pod) is None, timeout_s=timeout_s, what=f"pod {pod} gone")

    def log(self, pod: str, container: str, *, previous: bool = False) -> str:
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

    def wait_container(self, pod: str, name: str, **wanted: Any) -> dict[str, Any]:
        """Return a container's status once it runs, with these values: its kubelet may report with a delay."""

        def runs() -> bool:
            found = self.container(pod, name)
            return "running" in found["state"] and all(found[key] == value for key, value in wanted.items())

        wait_until(runs, timeout_s=60, what=lambda: f"{name} running, {wanted}: {self.container(pod, name)}")
        return self.container(pod, name)

    def evict(self, pod: str) -> None:
        """Request the pod's eviction, as a drain or an autoscaler does."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        self.api.create(f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction", body)

    def delete_pod(self, pod: str, *, force: bool = False) -> None:
        """Do what `kubectl delete pod` does; `force` adds `--grace-period=0 --force`."""
        query = {"gracePeriodSeconds": 0} if force else {}
        self.api.delete(f"/api/v1/namespaces/{self.namespace}/pods/{pod}", **query)
