"""A real `deltashard-controller` on a real API server: tests write Jobs and pods as their controllers and kubelets do."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from deltashard_operator.kube import cluster_name
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire

from tests.support.eventually import eventually
from tests.support.operator.fleet_service import ApiPod, ReportResponse, post_report
from tests.support.operator.operator_process import OperatorProcess
from tests.support.server.apiserver import Rest, put
from tests.support.server.minio_server import free_port

CONTROLLER_TIMEOUT_S = 240.0
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
Document = dict[str, Any]


def now(seconds: float = 0.0) -> str:
    """Return the API's timestamp of so many seconds from now."""
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ControllerProcess(OperatorProcess):
    """The process `deltashard-controller`."""

    keep_finished_days: float = 7.0
    status_interval_s: float = 1.0
    annotate_pods: bool = False
    namespace: str = "deltashard-system"
    """Namespace of its Lease; created at the start."""
    identity: str = ""
    kubeconfig: Path | None = None
    """A kubeconfig with another path to the API server than the direct one."""
    fleet_port: int = 0

    def start(self, *, ready: bool = True) -> None:
        self.fleet_port = self.fleet_port or free_port()
        put(self.directory, self.authority.issue())
        with self.apiserver.http() as http:
            http.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        self.run(
            "-m",
            "deltashard_operator.controller_main",
            fleet_port=self.fleet_port,
            certificates="external",
            kubeconfig=self.kubeconfig or self.apiserver.kubeconfig,
            keep_finished_days=self.keep_finished_days,
            status_interval_s=self.status_interval_s,
            annotate_pods=str(self.annotate_pods).lower(),
            namespace=self.namespace,
            identity=self.identity,
            lease_s=3600.0,  # a busy machine is not a partition
        )
        if ready:
            eventually(self.leads, lambda: f"the controller: {self.log[-2000:]}")

    def leads(self) -> bool:
        """Return whether the controller holds the Lease and has listed every object."""
        return self.metric("deltashard_controller_leading") == 1 and self.get("healthz")[0] == 200


@dataclass
class NamespaceObjects:
    """Objects of one namespace, made as their owners would make them."""

    http: Rest
    namespace: str

    @classmethod
    def make(cls, http: Rest) -> Self:
        namespace = f"t-{uuid.uuid4().hex[:8]}"
        http.namespace(namespace)
        return cls(http, namespace)

    def path(self, kind: str, name: str = "") -> str:
        root = {
            "jobs": "/apis/batch/v1",
            "checkpointruns": "/apis/deltashard.io/v1alpha1",
            "checkpointpolicies": "/apis/deltashard.io/v1alpha1",
            "checkpointrequests": "/apis/deltashard.io/v1alpha1",
        }.get(kind, "/api/v1")
        return f"{root}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def job(self, name: str = "train", annotations: dict[str, str] | None = None) -> Document:
        notes = {cluster_name.POLICY: "default"} | (annotations or {})
        labels = {cluster_name.MANAGED_BY: cluster_name.MANAGED_BY_VALUE}
        template = {
            "metadata": {"labels": labels, "annotations": notes | {cluster_name.INJECTED: "1"}},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train"}]},
        }
        document = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "annotations": notes, "labels": labels},
            "spec": {"backoffLimit": 20, "template": template},
        }
        reply = self.http.create(document, self.namespace)
        assert reply.status == 201, reply.document
        return reply.document

    def running_pod(self, owner: Document, *, node: str = "node-a") -> Document:
        """Create a pod of a Job, bound to a node, that runs."""
        found = {key: owner["metadata"][key] for key in ("name", "uid")}
        metadata: Document = {
            "name": f"train-{uuid.uuid4().hex[:6]}",
            "labels": {
                cluster_name.MANAGED_BY: cluster_name.MANAGED_BY_VALUE,
                cluster_name.JOB_NAME_LABEL: found["name"],
                cluster_name.JOB_UID_LABEL: found["uid"],
            },
            "annotations": {cluster_name.POLICY: "default", cluster_name.INJECTED: "1"},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "controller": True, **found}],
        }
        containers = [{"name": "trainer", "image": "train"}]
        spec = {"restartPolicy": "Never", "nodeName": node, "containers": containers}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        reply = self.http.create(pod, self.namespace)
        assert reply.status == 201, reply.document
        self.kubelet(reply.document, phase="Running")
        return reply.document

    def kubelet(
        self,
        pod: Document,
        *,
        phase: str,
        restarts: int = 0,
        exit_code: int | None = None,
        reason: str = "",
        disruption: str = "",
    ) -> None:
        """Patch the pod's status as a kubelet would."""
        container: Document = {"name": "trainer", "image": "train", "imageID": "", "state": {}}
        container |= {"ready": phase == "Running", "restartCount": restarts}
        ended = {
            "exitCode": exit_code,
            "reason": reason or "Error",
            "finishedAt": now(),
            "startedAt": now(-60),
        }
        if phase == "Running":
            container["state"] = {"running": {"startedAt": now()}}
            if exit_code is not None:
                container["lastState"] = {"terminated": ended}
        elif exit_code is not None:
            container["state"] = {"terminated": ended}
        status: Document = {"phase": phase, "containerStatuses": [container]}
        if disruption:
            condition = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": now()}
            status["conditions"] = [condition | {"reason": disruption}]
        name = pod["metadata"]["name"]
        reply = self.http("PATCH", self.path("pods", name) + "/status", {"status": status}, content=STRATEGIC)
        assert reply.status == 200, reply.document

    def delete(self, kind: str, name: str) -> None:
        body = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        reply = self.http("DELETE", self.path(kind, name), body)
        assert reply.status in {200, 202}, reply.document

    def end(self, job: Document) -> None:
        """Mark the Job complete, as its controller does."""
        conditions = [
            {"type": each, "status": "True", "lastTransitionTime": now(), "reason": "x", "message": "x"}
            for each in ("SuccessCriteriaMet", "Complete")
        ]
        status: Document = {"conditions": conditions, "startTime": now(-60), "active": 0, "ready": 0}
        status |= {"completionTime": now(), "succeeded": 1, "uncountedTerminatedPods": {}}
        path = self.path("jobs", job["metadata"]["name"]) + "/status"
        reply = self.http("PATCH", path, {"status": status}, content=MERGE)
        assert reply.status == 200, reply.document

    def runs(self) -> list[Document]:
        # An API server that just started does not serve its custom resources for a moment.
        return self.http("GET", self.path("checkpointruns")).document.get("items", [])

    def run(self, owner: Document) -> Document:
        """Return the CheckpointRun of a workload, {} while it does not exist."""
        uid = owner["metadata"]["uid"]
        return next((each for each in self.runs() if each["spec"]["workload"]["uid"] == uid), {})

    def status(self, owner: Document) -> Document:
        return self.run(owner).get("status") or {}

    def wait_for_status(self, owner: Document, **wanted: Any) -> Document:
        """Wait until the status holds these values; return it."""

        def holds() -> bool:
            found = self.status(owner)
            return all(found.get(key) == value for key, value in wanted.items())

        try:
            eventually(holds, f"{wanted}")
        except BaseException as error:
            raise AssertionError(f"wanted {wanted}, found {self.status(owner)}") from error
        return self.status(owner)

    def condition(self, owner: Document, type_: str) -> Document:
        return next((c for c in self.status(owner).get("conditions", []) if c["type"] == type_), {})

    def events(self, reason: str) -> list[Document]:
        items = self.http("GET", self.path("events")).document["items"]
        return [each for each in items if each["reason"] == reason]

    def node(self, name: str) -> None:
        self.http.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        status = {"conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": "x"}]}
        reply = self.http("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content=MERGE)
        assert reply.status == 200, reply.document


def states(
    run: str = "", *, phase: str = "TRAINING", step: int = 0, attempt: int = 1, **more: Any
) -> dict[str, Any]:
    """Return the state of a pod and of its run; `seq` and `committed` make the newest commit, `every_s` a policy."""
    seq, committed, every_s = more.pop("seq", 0), more.pop("committed", 0), more.pop("every_s", 300.0)
    pod: Document = {
        "run": run,
        "phase": wire.Phase.Value(f"PHASE_{phase}"),
        "ranks": [wire.Rank(rank=0, world_size=1, step=step)] if phase != "WAITING" else [],
        "attempt": attempt,
        "store_ok": True,
        "credentials_ok": True,
    }
    whole: Document = {
        "attempts_opened": attempt,
        "policy": trainer_wire.Policy(every_s=every_s, encoding="q8", differential="intermittent"),
    }
    if seq:
        whole["newest"] = trainer_wire.Commit(seq=seq, attempt=attempt, step=committed, durable_s=0.5)
    for name, value in more.items():
        (pod if name in wire.PodState.DESCRIPTOR.fields_by_name else whole)[name] = value
    return {"pod": wire.PodState(**pod), "run": wire.RunState(**whole)}


class ReportingSidecar:
    """A sidecar that reports on request, with a token as a kubelet would project it."""

    def __init__(
        self,
        controller: ControllerProcess,
        cluster: NamespaceObjects,
        pod: Document,
        owner: Document,
        **identity: Any,
    ) -> None:
        self._pod = ApiPod(
            namespace=cluster.namespace, name=pod["metadata"]["name"], uid=pod["metadata"]["uid"]
        )
        self._identity = {
            "workload_kind": owner.get("kind", "Pod"),
            "workload_name": owner["metadata"]["name"],
            "workload_uid": owner["metadata"]["uid"],
            "started_at_s": time.time(),
        } | identity
        self._run = f"{cluster.namespace}/{owner['metadata']['name']}-{owner['metadata']['uid']}"
        self._controller, self._token = controller, self._pod.token(cluster.http)
        self._process, self._sequence = uuid.uuid4().hex[:8], 0

    def post(
        self,
        incidents: Sequence[wire.Incident] = (),
        save_results: Sequence[wire.SaveResult] = (),
        **fields: Any,
    ) -> ReportResponse:
        """Report once; `fields` are those of `states`; `run` defaults to the workload's run."""
        fields.setdefault("run", self._run)
        self._sequence += 1
        report = self._pod.report(
            identity=self._identity,
            process=self._process,
            sequence=self._sequence,
            now_s=time.time(),
            incidents=incidents,
            save_results=save_results,
            **states(**fields),
        )
        url = f"https://localhost:{self._controller.fleet_port}"
        return post_report(url, self._controller.authority.pem, self._token, report)

    def report(self, **fields: Any) -> wire.ReportReply:
        """Repeat the report until the controller accepts it: its list of pods may not contain the pod yet."""
        replies: list[wire.ReportReply] = []

        def accepted() -> bool:
            found = self.post(**fields)
            assert found.status in {200, 404, 421, 429, 503}, found
            replies.extend([found.reply] if found.status == 200 else [])
            return bool(replies)

        eventually(accepted, "the report is accepted", timeout_s=CONTROLLER_TIMEOUT_S, every_s=0.2)
        return replies[0]
