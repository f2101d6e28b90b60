"""What the controller sees of users' objects: jobs, pods and nodes of the API, read into small values. Pure.

Whose an object is, its controller's ownerReference says: a Job's pod is of that Job, or of the JobSet that owns the
Job (which only the Job tells; `watch` puts the two together); one without a controller stands for itself. Labels
do not count, since a tenant may write what he likes there.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltashard_checkpoint.vocabulary import ONE_RUN, RUN_PER_POD

from deltashard_operator.kube import owner_reference, run_identity
from deltashard_operator.kube.cluster_name import (
    CHECKPOINT_TIME,
    ENCODING,
    GOAL,
    INTERVAL,
    POLICY,
    PRECISION,
    RUN_ID,
    RUNS,
    SIDECAR,
    is_mesh_proxy,
)
from deltashard_operator.kube.owner_reference import Owner

Document = Mapping[str, Any]
DEFAULT_POLICY = "default"
METRICS_SETTING = "DELTASHARD_METRICS_PORT"
ABSENT_S = 600.0
"""A workload that cannot be watched itself (StatefulSet, JobSet) is over after so long without a pod or Job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What training belongs to: one for all its pods and restarts."""

    namespace: str
    kind: str
    name: str
    uid: str
    api_version: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, UID)."""
        return self.namespace, self.uid

    @property
    def group_kind(self) -> owner_reference.GroupKind:
        return owner_reference.group_kind(self.api_version, self.kind)

    @property
    def native(self) -> str:
        """Job or Pod for Kubernetes' own, which are watched themselves; empty for any other, whatever it is called."""
        known = self.group_kind in {owner_reference.JOB, owner_reference.POD}
        return self.kind if known or (not self.api_version and self.kind in {"Job", "Pod"}) else ""

    @property
    def path(self) -> str:
        """URL path of a native one."""
        root, plural = ("/api/v1", "pods") if self.native == "Pod" else ("/apis/batch/v1", "jobs")
        return f"{root}/namespaces/{self.namespace}/{plural}/{self.name}"

    @property
    def display_name(self) -> str:
        """Name for people: kind, with its group where that is not Kubernetes' own, and name."""
        group, _ = self.group_kind
        return f"{self.kind}{f'.{group}' if '.' in group else ''} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Annotations that the controller acts on."""

    policy: str = DEFAULT_POLICY
    run_id: str = ""
    """Empty: the run is named after the workload."""
    runs: str = ""
    """`per-pod` where each numbered pod trains a run of its own."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Annotations that come before the policy's word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What is kept of a Job."""

    uid: str
    name: str
    workload: Workload
    requested: RequestedSettings
    suspended: bool = False
    outcome: str = ""
    """Completed or Failed, once it ended."""
    ended_at_s: float = 0.0
    replica: str = ""
    """Which Job of a JobSet."""
    replaces_lost: bool = True
    """False: podReplacementPolicy is Failed, so a pod that cannot finish its deletion is not replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerExit:
    """How a training container ended, last."""

    container: str
    reason: str
    exit_code: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What is kept of a Pod."""

    uid: str
    name: str
    workload: Workload
    requested: RequestedSettings
    job_uid: str = ""
    node: str = ""
    index: str = ""
    phase: str = "Pending"
    disruption: str = ""
    """Reason of the condition DisruptionTarget."""
    disruption_message: str = ""
    started: bool = False
    """Whether a training container ever ran."""
    terminating_at_s: float = 0.0
    """End of its grace period once it is being deleted; 0: it is not."""
    restarts: int = 0
    """Of its training containers."""
    ending: ContainerExit | None = None
    checkpoint_time: str = ""
    """What its annotation says of the newest checkpoint."""
    report_address: str = ""
    """Where its sidecar can be asked to report, as `address:port`; empty: not known, or its metrics are off."""

    @property
    def finished(self) -> bool:
        return self.phase in {"Succeeded", "Failed"}

    @property
    def alive(self) -> bool:
        return not self.finished and not self.terminating_at_s

    @property
    def ends(self) -> bool:
        """Whether its end has begun, or comes for sure, after a training container ran in it."""
        return self.started and self.phase != "Succeeded" and bool(self.disruption or not self.alive)

    @property
    def shown_phase(self) -> str:
        """Phase as kubectl shows it, near enough."""
        return "Terminating" if self.terminating_at_s and self.phase == "Running" else self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is kept of a Node."""

    name: str
    ready: bool
    ending: bool = False
    """Cordoned, or tainted by what will remove it: evictions are to come."""
    since_s: float = 0.0
    """Since when it is ready, or is not; 0: not known."""


def seconds_of(text: object) -> float:
    """Unix time of the API's timestamp; 0 for none."""
    try:
        return dt.datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def timestamp(at_s: float) -> str:
    """The API's form of a time, in whole seconds."""
    return dt.datetime.fromtimestamp(int(at_s), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def requested_settings(*maps: Mapping[str, str] | None) -> RequestedSettings:
    """What these annotation maps say; the first to say a thing counts. Admission has checked them."""
    found = {key: value for each in reversed(maps) for key, value in (each or {}).items()}
    return RequestedSettings(
        policy=found.get(POLICY) or DEFAULT_POLICY,
        run_id=found.get(RUN_ID, ""),
        runs=found[RUNS] if found.get(RUNS) in {ONE_RUN, RUN_PER_POD} else "",
        overrides=tuple((key, found[key]) for key in (INTERVAL, GOAL, ENCODING, PRECISION) if key in found),
    )


def has_ended(document: Document) -> bool:
    """Whether a Job or a pod, as the API has it, has ended."""
    if document.get("kind") == "Pod":
        return (document.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return bool(job_of(document).outcome)


def is_alive(workload: Workload, document: Document | None) -> bool:
    """Whether the object that the API has under its name is this very workload, and has not ended."""
    return document is not None and document["metadata"]["uid"] == workload.uid and not has_ended(document)


def job_of(document: Document) -> JobView:
    """View of a Job; one that a JobSet made is of the JobSet's run."""
    metadata, spec = document["metadata"], document.get("spec") or {}
    template = (spec.get("template") or {}).get("metadata") or {}
    outcome, ended_at_s = "", 0.0
    for each in (document.get("status") or {}).get("conditions") or ():
        if each.get("status") == "True" and each.get("type") in {"Complete", "Failed"}:
            outcome = "Completed" if each["type"] == "Complete" else "Failed"
            ended_at_s = seconds_of(each.get("lastTransitionTime"))
    jobset = owner_reference.is_controlled_by(document, owner_reference.JOBSET)
    return JobView(
        uid=metadata["uid"],
        name=metadata["name"],
        workload=_workload(metadata, jobset, "Job", "batch/v1"),
        requested=requested_settings(metadata.get("annotations"), template.get("annotations")),
        suspended=bool(spec.get("suspend")),
        outcome=outcome,
        ended_at_s=ended_at_s,
        replica=run_identity.replica_of(document),
        replaces_lost=spec.get("podReplacementPolicy", "TerminatingOrFailed") != "Failed",
    )


def _workload(metadata: Document, owner: Owner | None, kind: str, api_version: str) -> Workload:
    """The owner, or the object of this kind itself."""
    owner = owner or Owner(api_version, kind, metadata["name"], metadata["uid"])
    return Workload(namespace=metadata["namespace"], **owner._asdict())


def pod_of(document: Document) -> PodView:
    metadata, spec = document["metadata"], document.get("spec") or {}
    status = document.get("status") or {}
    disruption = _condition(status, "DisruptionTarget")
    disruption = disruption if disruption.get("status") == "True" else {}
    containers = [
        each
        for each in status.get("containerStatuses") or ()
        if each.get("name") != SIDECAR and not is_mesh_proxy(each.get("name"))
    ]
    # A Job may be a JobSet's in turn.
    workload = _workload(metadata, owner_reference.controller_of(document), "Pod", "v1")
    return PodView(
        uid=metadata["uid"],
        name=metadata["name"],
        workload=workload,
        requested=requested_settings(metadata.get("annotations")),
        job_uid=workload.uid if workload.native == "Job" else "",
        node=spec.get("nodeName") or "",
        index=run_identity.index_of_pod(document),
        phase=status.get("phase") or "Pending",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
        started=status.get("phase") in {"Running", "Succeeded"} or any(map(_has_run, containers)),
        terminating_at_s=seconds_of(metadata.get("deletionTimestamp")),
        restarts=sum(int(each.get("restartCount") or 0) for each in containers),
        ending=_last_exit(containers),
        checkpoint_time=(metadata.get("annotations") or {}).get(CHECKPOINT_TIME, ""),
        report_address=_report_address(spec, status.get("podIP") or ""),
    )


def _condition(status: Document, type_: str) -> Document:
    return next((each for each in status.get("conditions") or () if each.get("type") == type_), {})


def _report_address(spec: Document, address: str) -> str:
    """The pod's address with the port of its sidecar's metrics."""
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    settings = (each for one in containers if one.get("name") == SIDECAR for each in one.get("env") or ())
    port = next((str(each.get("value")) for each in settings if each.get("name") == METRICS_SETTING), "")
    if not address or not port.isdecimal():
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def with_job(pod: PodView, job: JobView) -> PodView:
    """View of a Job's pod with the Job's workload: the JobSet that owns the Job, where one does."""
    index = "-".join(filter(None, (job.replica, pod.index)))
    return replace(pod, workload=job.workload, index=index)


def _has_run(container: Document) -> bool:
    state = container.get("state") or {}
    return bool(state.get("running") or state.get("terminated") or container.get("restartCount"))


def _last_exit(containers: list[Document]) -> ContainerExit | None:
    """The newest end of a training container; of those that ended at once, one that failed."""
    found = [
        ContainerExit(
            container=each.get("name") or "",
            reason=ended.get("reason") or "Error",
            exit_code=int(ended.get("exitCode") or 0),
            at_s=seconds_of(ended.get("finishedAt")),
        )
        for each in containers
        for key in ("state", "lastState")
        if (ended := (each.get(key) or {}).get("terminated"))
    ]
    return max(found, key=lambda each: (each.at_s, each.exit_code != 0), default=None)


def node_of(document: Document, disruption_taints: Container[str] = ()) -> NodeView:
    """A node; one with such a taint is about to end."""
    readiness, spec = _condition(document.get("status") or {}, "Ready"), document.get("spec") or {}
    tainted = any(each.get("key") in disruption_taints for each in spec.get("taints") or ())
    return NodeView(
        name=document["metadata"]["name"],
        ready=readiness.get("status") == "True",
        ending=tainted or bool(spec.get("unschedulable")),
        since_s=seconds_of(readiness.get("lastTransitionTime")),
    )
