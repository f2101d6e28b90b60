"""Annotated Jobs of several pods each on kwok's nodes, and ways to lose their pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from deltashard_operator.kube import cluster_name
from deltashard_operator.run.observed_object import METRICS_SETTING

from tests.load.simulation import control_plane
from tests.load.simulation.control_plane import ControlPlane
from tests.load.simulation.swarm import SwarmMember
from tests.support.eventually import eventually

THREADS = 12
NAME = "train-"
"""Prefix of a Job's name, before its number."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPod:
    """A pod of a run as the API returns it."""

    namespace: str
    name: str
    uid: str
    node: str
    address: str
    job: str
    job_uid: str
    index: str
    phase: str
    terminating: bool

    @classmethod
    def read(cls, document: dict[str, Any]) -> ClusterPod:
        metadata = document["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            node=document["spec"].get("nodeName", ""),
            address=document["status"].get("podIP", ""),
            job=metadata["labels"][cluster_name.JOB_NAME_LABEL],
            job_uid=metadata["labels"][cluster_name.JOB_UID_LABEL],
            index=metadata["annotations"][cluster_name.JOB_INDEX_ANNOTATION],
            phase=document["status"].get("phase", ""),
            terminating="deletionTimestamp" in metadata,
        )

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    @property
    def is_live(self) -> bool:
        return self.phase == "Running" and not self.terminating


def job(name: str, *, pods: int, node: str) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": "registry.example/train:1",
        "command": ["python", "train.py"],
        "env": [{"name": "EPOCHS", "value": "3"}],
        "resources": {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "annotations": {cluster_name.POLICY: "default"}},
        "spec": {
            "completionMode": "Indexed",
            "parallelism": pods,
            "completions": pods,
            "backoffLimit": 1000,
            "template": {"spec": {"restartPolicy": "Never", "nodeName": node, "containers": [container]}},
        },
    }


def in_threads(work: Callable[[T], object], items: Iterable[T], threads: int = THREADS) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass


def make(plane: ControlPlane, namespaces: Sequence[str], sizes: Sequence[int]) -> None:
    """Create a Job for each size (number of pods), spread over namespaces and nodes, and wait until their pods run."""
    for namespace in namespaces:
        plane.namespace(namespace)

    def create(number: int) -> None:
        document = job(f"{NAME}{number}", pods=sizes[number], node=plane.nodes[number % len(plane.nodes)])
        made: dict[str, Any] = {}

        def admitted() -> bool:
            """Retry 500 and 503, which a control plane that is short of CPU returns."""
            reply = plane.rest.create(document, namespaces[number % len(namespaces)])
            made.update(reply.document)
            assert reply.status in {201, 500, 503}, reply.document
            return reply.status == 201

        eventually(admitted, what=f"Job {number}", every_s=0.5, timeout_s=control_plane.TIMEOUT_S)
        inits = made["spec"]["template"]["spec"].get("initContainers") or []
        assert [each["name"] for each in inits] == [cluster_name.SIDECAR], "it was not injected"

    in_threads(create, range(len(sizes)), threads=4)
    _wait_running(plane, sum(sizes))


def make_pods(plane: ControlPlane, namespaces: Sequence[str], sizes: Sequence[int]) -> None:
    """Create tens of thousands of pods like `make`: the Job controller ignores these Jobs, and pods have only labels.

    The API server stores 2 KiB for each pod, and one request creates it. Admission still injects the Jobs.
    """
    for namespace in namespaces:
        plane.namespace(namespace)

    def create(number: int) -> None:
        node = plane.nodes[number % len(plane.nodes)]
        document = job(f"{NAME}{number}", pods=sizes[number], node=node)
        document["spec"]["managedBy"] = "deltashard.io/bench"
        namespace = namespaces[number % len(namespaces)]
        made = plane.make(document, namespace)
        for index in range(sizes[number]):
            plane.make(_pod(made, index), namespace)

    in_threads(create, range(len(sizes)))
    _wait_running(plane, sum(sizes))


def _pod(made: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a pod of an injected Job with the fields that the controller and the simulated sidecars read."""
    metadata, template = made["metadata"], made["spec"]["template"]
    (sidecar,) = template["spec"]["initContainers"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{index}",
            "labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"]
            | {cluster_name.JOB_INDEX_ANNOTATION: str(index)},
            "ownerReferences": [owner | {"controller": True}],
        },
        "spec": {
            "nodeName": template["spec"]["nodeName"],
            "containers": [{"name": "trainer", "image": "train:1"}],
            "initContainers": [
                {key: sidecar[key] for key in ("name", "image", "restartPolicy")}
                | {"env": [each for each in sidecar["env"] if each["name"] == METRICS_SETTING]}
            ],
        },
    }


def _wait_running(plane: ControlPlane, pods: int) -> None:
    def running() -> bool:
        plane.job_controller.check()
        plane.kwok.check()
        return len(live_pods(plane)) == pods

    eventually(
        running,
        what=f"{pods} running pods",
        every_s=0.5 + pods / 2500,
        timeout_s=control_plane.TIMEOUT_S + pods / 10,
    )


def live_pods(plane: ControlPlane) -> list[ClusterPod]:
    path = f"/api/v1/pods?labelSelector={cluster_name.MANAGED_BY}%3D{cluster_name.MANAGED_BY_VALUE}"
    found = (ClusterPod.read(each) for each in control_plane.objects(plane.rest, path))
    return [pod for pod in found if pod.is_live]


def members(
    plane: ControlPlane, pods: Sequence[ClusterPod], sizes: Sequence[int], *, restored: bool = False
) -> list[SwarmMember]:
    """Return the pods' sidecars, each with a token as a kubelet projects it; `sizes` as in `make`."""

    def member(pod: ClusterPod) -> SwarmMember:
        bound = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
        spec = {
            "audiences": [cluster_name.FLEET_AUDIENCE],
            "expirationSeconds": 3600 * 2,
            "boundObjectRef": bound,
        }
        path = f"/api/v1/namespaces/{pod.namespace}/serviceaccounts/default/token"
        reply = plane.rest("POST", path, {"spec": spec})
        assert reply.status == 201, reply.document
        return SwarmMember(
            namespace=pod.namespace,
            pod=pod.name,
            uid=pod.uid,
            node=pod.node,
            address=pod.address,
            workload=pod.job,
            workload_uid=pod.job_uid,
            index=pod.index,
            ranks=sizes[int(pod.job.removeprefix(NAME))],
            token=reply.document["status"]["token"],
            restored=restored,
        )

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(member, pods))


def evict(plane: ControlPlane, pod: ClusterPod) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name}}
    reply = plane.rest("POST", f"{pod.path}/eviction", body)
    assert reply.status == 201, reply.document


def kill(plane: ControlPlane, pod: ClusterPod) -> None:
    """Report the pod's trainer as out of memory, as a kubelet does."""
    container = {"name": "trainer", "image": "registry.example/train:1", "imageID": "", "ready": False}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    _report(plane, pod, "Failed", {**container, "started": False, "restartCount": 0, "state": ended})


def complete(plane: ControlPlane, pod: ClusterPod) -> None:
    _report(plane, pod, "Succeeded")


def _report(plane: ControlPlane, pod: ClusterPod, phase: str, *containers: dict[str, Any]) -> None:
    status = {"phase": phase} | ({"containerStatuses": containers} if containers else {})
    content = "application/strategic-merge-patch+json"
    reply = plane.rest("PATCH", f"{pod.path}/status", {"status": status}, content=content)
    assert reply.status == 200, reply.document
