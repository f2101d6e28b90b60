"""The identity recipe: how a pod will know which run it belongs to, written before its UID exists.

At Job CREATE neither the Job's UID nor (with generateName) its name is known, and one template serves every pod to
come. So injection writes environment variables that the kubelet fills at pod start: by the downward API from labels of
the Job and JobSet controllers, or literally from the controller's ownerReference where only that tells.

    DELTASHARD_WORKLOAD_KIND / _NAME / _UID   the workload, one for all pods and restarts of it
    DELTASHARD_INDEX                          completion index, StatefulSet ordinal, index in a part of a PyTorchJob
    DELTASHARD_REPLICA                        which Job of a JobSet (its global index), which part of a PyTorchJob
    DELTASHARD_RUN_ID                         `{name}-{uid}`, or the user's `run-id`
    DELTASHARD_RUN                            `{namespace}/{run id}`: where in the store; namespaces never meet
    DELTASHARD_OWNER                          who owns that run in its log: the same for every restart

A JobSet re-creates its Jobs when it restarts, so its own UID counts, not theirs: by the labels it puts on them, or,
where it is too old to put its UID there, by the Job's ownerReference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.cluster_name import (
    JOB_INDEX_ANNOTATION,
    JOB_NAME_LABEL,
    JOB_UID_LABEL,
    JOBSET_NAME_LABEL,
    JOBSET_REPLICA_LABEL,
    JOBSET_REPLICAS_LABEL,
    JOBSET_UID_LABEL,
    KUBEFLOW_INDEX_LABEL,
    KUBEFLOW_REPLICA_LABEL,
    POD_INDEX_LABEL,
)

Document = Mapping[str, Any]
Value = Mapping[str, Any]
"""What an environment entry has beside its name: literal text, or a field of the pod that the kubelet will read."""


def _field(path: str) -> Value:
    return {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _label(key: str) -> Value:
    return _field(f"metadata.labels['{key}']")


def _text(value: str) -> Value:
    return {"value": value} if value else {}


@dataclass(frozen=True, slots=True)
class IdentityRecipe:
    """Where a pod's workload identity comes from."""

    kind: str
    name: Value | None = None
    uid: Value | None = None
    """None of both: known when the pod is made, and written then."""
    index: Value = field(default_factory=dict)
    replica: Value = field(default_factory=dict)
    """Which Job of a JobSet, which part of a PyTorchJob."""
    pods: int = 0
    """Numbered pods that the workload wants when it is made; 0: not known, or without numbers."""


_JOB_INDEX = _field(f"metadata.annotations['{JOB_INDEX_ANNOTATION}']")
JOBSET = IdentityRecipe(
    "JobSet", _label(JOBSET_NAME_LABEL), _label(JOBSET_UID_LABEL), _JOB_INDEX, _label(JOBSET_REPLICA_LABEL)
)
JOB = IdentityRecipe("Job", _label(JOB_NAME_LABEL), _label(JOB_UID_LABEL), _JOB_INDEX)
STATEFUL_SET = IdentityRecipe("StatefulSet", index=_label(POD_INDEX_LABEL))
PYTORCH_JOB = IdentityRecipe(
    "PyTorchJob", index=_label(KUBEFLOW_INDEX_LABEL), replica=_label(KUBEFLOW_REPLICA_LABEL)
)
POD = IdentityRecipe("Pod", _field("metadata.name"), _field("metadata.uid"))
_OWNED = {owner_reference.STATEFUL_SET: STATEFUL_SET, owner_reference.PYTORCH_JOB: PYTORCH_JOB}


def _labels(document: Document) -> Document:
    return (document.get("metadata") or {}).get("labels") or {}


def _has_jobset(labels: Document) -> bool:
    return bool(labels.get(JOBSET_UID_LABEL) and labels.get(JOBSET_NAME_LABEL))


def of_job(template: Document, job: Document | None = None) -> IdentityRecipe:
    """The recipe for the pods of a Job with this pod template; `job`: the Job itself, which knows its owner."""
    job, labels = job or {}, _labels(template)
    pods = pods_of(job)
    if _has_jobset(labels):
        return replace(JOBSET, pods=pods)
    owner = owner_reference.is_controlled_by(job, owner_reference.JOBSET)
    if owner is None:
        return replace(JOB, pods=pods)
    replica = JOBSET.replica if labels.get(JOBSET_REPLICA_LABEL) else _text(replica_of(job))
    return replace(JOBSET, name=_text(owner.name), uid=_text(owner.uid), replica=replica, pods=pods)


def pods_of(job: Document) -> int:
    """Numbered pods of a Job, and of the Jobs that a JobSet makes beside it of one template; 0: it numbers none."""
    spec, replicas = job.get("spec") or {}, str(_labels(job).get(JOBSET_REPLICAS_LABEL, ""))
    if spec.get("completionMode") != "Indexed":
        return 0
    return int(spec.get("completions") or 1) * (int(replicas) if replicas.isdecimal() else 1)


def replica_of(job: Document) -> str:
    """Which Job of its JobSet a Job is: its global index, else its name without the JobSet's; empty elsewhere."""
    owner = owner_reference.is_controlled_by(job, owner_reference.JOBSET)
    if owner is None:
        return ""
    name = str(job["metadata"].get("name", ""))
    return str(_labels(job).get(JOBSET_REPLICA_LABEL) or name.removeprefix(f"{owner.name}-"))


def of_pod(pod: Document) -> IdentityRecipe:
    """The recipe for a pod at its own CREATE: what a Job puts on its pods, else its controller, else itself."""
    owner = owner_reference.controller_of(pod)
    if owner is None:
        return POD
    if owner.group_kind == owner_reference.JOB:
        return of_job(pod)
    known = _OWNED.get(owner.group_kind, IdentityRecipe(owner.kind))
    return replace(known, name=_text(owner.name), uid=_text(owner.uid))


def of_template(kind: str, document: Document, replicas: int) -> IdentityRecipe:
    """The recipe for the pods of a template in a JobSet or a PyTorchJob that is created."""
    return replace(JOBSET, pods=pods_of(document) * replicas) if kind == "JobSet" else PYTORCH_JOB


def index_of_pod(pod: Document) -> str:
    """The number of a pod that is there, as its controller wrote it, in a PyTorchJob after its part; empty: none."""
    labels, notes = _labels(pod), pod["metadata"].get("annotations") or {}
    if owner_reference.is_controlled_by(pod, owner_reference.PYTORCH_JOB) is not None:
        return "-".join(filter(None, (labels.get(KUBEFLOW_REPLICA_LABEL), labels.get(KUBEFLOW_INDEX_LABEL))))
    return str(notes.get(JOB_INDEX_ANNOTATION) or labels.get(POD_INDEX_LABEL) or "")


def workload_uid(kind: str, document: Document) -> str:
    """The UID of the workload that a Job or pod at its CREATE is of; empty where it is the workload itself."""
    owner, labels = owner_reference.controller_of(document), _labels(document)
    if kind == "Job":
        labels = {**_labels((document.get("spec") or {}).get("template") or {}), **labels}
        owner = owner_reference.is_controlled_by(document, owner_reference.JOBSET)
    elif owner is None or owner.group_kind != owner_reference.JOB:
        labels = {}
    if _has_jobset(labels):
        return str(labels[JOBSET_UID_LABEL])
    return owner.uid if owner is not None else ""


def environment(recipe: IdentityRecipe, run_id: str | None) -> list[dict[str, Any]]:
    """The environment entries of a recipe, each after those it refers to."""
    values: dict[str, Value | None] = {
        "POD_NAME": _field("metadata.name"),
        "POD_NAMESPACE": _field("metadata.namespace"),
        "POD_UID": _field("metadata.uid"),
        "NODE_NAME": _field("spec.nodeName"),
        "DELTASHARD_WORKLOAD_KIND": _text(recipe.kind),
        "DELTASHARD_WORKLOAD_NAME": recipe.name,
        "DELTASHARD_WORKLOAD_UID": recipe.uid,
        "DELTASHARD_INDEX": recipe.index,
        "DELTASHARD_REPLICA": recipe.replica,
        "DELTASHARD_RUN_ID": _text(run_id or "$(DELTASHARD_WORKLOAD_NAME)-$(DELTASHARD_WORKLOAD_UID)"),
        "DELTASHARD_RUN": _text("$(POD_NAMESPACE)/$(DELTASHARD_RUN_ID)"),
        "DELTASHARD_OWNER": _text("$(DELTASHARD_RUN)"),
    }
    return [{"name": name, **value} for name, value in values.items() if value is not None]
