"""Views of jobs, pods and nodes: the parts of API objects that the controller uses. Pure.

An object belongs to the workload named by its controller ownerReference: a Job's pod to the Job, or to the JobSet that
owns the Job (known only from the Job; `watch` joins the two). An object without a controller is its own workload.
Labels are ignored because tenants can set them freely.
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
"""A workload that is not watched itself (StatefulSet, JobSet) is finished after this time without a pod or Job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Workload that a run belongs to, across all its pods and restarts."""

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
        """`Job` or `Pod` for the built-in kinds, which are watched directly; empty for every other kind."""
        known = self.group_kind in {owner_reference.JOB, owner_reference.POD}
        return self.kind if known or (not self.api_version and self.kind in {"Job", "Pod"}) else ""

    @property
    def path(self) -> str:
        root, plural = ("/api/v1", "pods") if self.native == "Pod" else ("/apis/batch/v1", "jobs")
        return f"{root}/namespaces/{self.namespace}/{plural}/{self.name}"

    @property
    def display_name(self) -> str:
        """Display name: kind, with its group if not built-in, and name."""
        group, _ = self.group_kind
        return f"{self.kind}{f'.{group}' if '.' in group else ''} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Settings from the annotations that the controller uses."""

    policy: str = DEFAULT_POLICY
    run_id: str = ""
    """If empty, the run is named after the workload."""
    runs: str = ""
    """`per-pod` if each numbered pod trains its own run."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Annotations that take precedence over the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Fields of a Job that the controller uses."""

    uid: str
    name: str
    workload: Workload
    requested: RequestedSettings
    suspended: bool = False
    outcome: str = ""
    """Completed or Failed once the Job has ended, else empty."""
    ended_at_s: float = 0.0
    replica: str = ""
    """Replica of a JobSet."""
    replaces_lost: bool = True
    """False if podReplacementPolicy is Failed: a pod whose deletion cannot finish is not replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerExit:
    """Last exit of a training container."""

    container: str
    reason: str
    exit_code: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """Fields of a Pod that the controller uses."""

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
    terminating_at_s: float = 0.0
    """End of the grace period while the pod is being deleted, else 0."""
    restarts: int = 0
    ending: ContainerExit | None = None
    checkpoint_time: str = ""
    """Value of the annotation with the time of the newest checkpoint."""
    report_address: str = ""
    """`address:port` at which the sidecar accepts a request to report; empty if unknown or without metrics."""

    @property
    def finished(self) -> bool:
        return self.phase in {"Succeeded", "Failed"}

    @property
    def alive(self) -> bool:
        return not self.finished and not self.terminating_at_s

    @property
    def ends(self) -> bool:
        """Whether the pod has ended or is certain to end, after a training container ran in it."""
        return self.started and self.phase != "Succeeded" and bool(self.disruption or not self.alive)

    @property
    def shown_phase(self) -> str:
        """Approximate phase that kubectl shows."""
        return "Terminating" if self.terminating_at_s and self.phase == "Running" else self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Fields of a Node that the controller uses."""

    name: str
    ready: bool
    ending: bool = False
    """Cordoned or tainted for removal, so evictions are expected."""
    since_s: float = 0.0
    """Time of the last change of `ready`; 0 if unknown."""


def seconds_of(text: object) -> float:
    """Parse an API timestamp to Unix time. Returns 0 if it is absent or invalid."""
    try:
        return dt.datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def timestamp(at_s: float) -> str:
    """Format a time as an API timestamp, in whole seconds."""
    return dt.datetime.fromtimestamp(int(at_s), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def requested_settings(*maps: Mapping[str, str] | None) -> RequestedSettings:
    """Read the settings from annotation maps; the first map that has a key wins. Admission has validated the values."""
    found = {key: value for each in reversed(maps) for key, value in (each or {}).items()}
    return RequestedSettings(
        policy=found.get(POLICY) or DEFAULT_POLICY,
        run_id=found.get(RUN_ID, ""),
        runs=found[RUNS] if found.get(RUNS) in {ONE_RUN, RUN_PER_POD} else "",
        overrides=tuple((key, found[key]) for key in (INTERVAL, GOAL, ENCODING, PRECISION) if key in found),
    )


def has_ended(document: Document) -> bool:
    if document.get("kind") == "Pod":
        return (document.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return bool(job_of(document).outcome)


def is_alive(workload: Workload, document: Document | None) -> bool:
    """Return whether the API object is this workload (same UID) and has not ended."""
    return document is not None and document["metadata"]["uid"] == workload.uid and not has_ended(document)


def job_of(document: Document) -> JobView:
    """Read a Job. A Job created by a JobSet belongs to the JobSet's run."""
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
    """Return the owner's workload, or else the object itself as one of this kind."""
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
    # The Job may in turn be owned by a JobSet (see `with_job`).
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
    """Return the pod's address with the metrics port of its sidecar, or an empty string."""
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    settings = (each for one in containers if one.get("name") == SIDECAR for each in one.get("env") or ())
    port = next((str(each.get("value")) for each in settings if each.get("name") == METRICS_SETTING), "")
    if not address or not port.isdecimal():
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def with_job(pod: PodView, job: JobView) -> PodView:
    """Return the view of a Job's pod with the Job's workload, which is the owning JobSet if there is one."""
    index = "-".join(filter(None, (job.replica, pod.index)))
    return replace(pod, workload=job.workload, index=index)


def _has_run(container: Document) -> bool:
    state = container.get("state") or {}
    return bool(state.get("running") or state.get("terminated") or container.get("restartCount"))


def _last_exit(containers: list[Document]) -> ContainerExit | None:
    """Return the newest exit of a training container, preferring a failure among simultaneous exits."""
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
    """Read a node. A node with one of these taints is about to end."""
    readiness, spec = _condition(document.get("status") or {}, "Ready"), document.get("spec") or {}
    tainted = any(each.get("key") in disruption_taints for each in spec.get("taints") or ())
    return NodeView(
        name=document["metadata"]["name"],
        ready=readiness.get("status") == "True",
        ending=tainted or bool(spec.get("unschedulable")),
        since_s=seconds_of(readiness.get("lastTransitionTime")),
    )
