"""Identity recipe: how a pod determines its run, written before its UID exists.

At Job CREATE neither the Job's UID nor (with generateName) its name is known, and one template serves all later pods.
Injection therefore adds environment variables that the kubelet resolves at pod start: from labels of the Job and JobSet
controllers by the downward API, or literal values from the controller's ownerReference.

    DELTASHARD_WORKLOAD_KIND / _NAME / _UID   the workload, constant over its pods and restarts
    DELTASHARD_INDEX                          completion index, StatefulSet ordinal, PyTorchJob replica index
    DELTASHARD_REPLICA                        global index of a Job in its JobSet, replica type of a PyTorchJob
    DELTASHARD_RUN_ID                         `{name}-{uid}`, or the user's `run-id`
    DELTASHARD_RUN                            `{namespace}/{run id}`: path in the store, separate for each namespace
    DELTASHARD_OWNER                          owner of the run in its log, constant over restarts

A restarted JobSet recreates its Jobs, so the JobSet's UID is used, not theirs: from the labels that it sets, or from
the Job's ownerReference if its version does not set the UID label.
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
"""Value of an environment entry: literal text, or a field of the pod that the kubelet resolves."""


def _field(path: str) -> Value:
    return {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _label(key: str) -> Value:
    return _field(f"metadata.labels['{key}']")


def _text(value: str) -> Value:
    return {"value": value} if value else {}


@dataclass(frozen=True, slots=True)
class IdentityRecipe:
    """Sources of a pod's workload identity."""

    kind: str
    name: Value | None = None
    uid: Value | None = None
    """None for both: filled in when the pod is created."""
    index: Value = field(default_factory=dict)
    replica: Value = field(default_factory=dict)
    """Job of a JobSet, or replica type of a PyTorchJob."""
    pods: int = 0
    """Number of indexed pods at creation; 0: unknown, or without indexes."""


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
    """Return the recipe for pods of this template. `job`: the Job, from which the owner is read."""
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
    """Return the number of indexed pods of a Job and its sibling Jobs from the same JobSet template, or 0."""
    spec, replicas = job.get("spec") or {}, str(_labels(job).get(JOBSET_REPLICAS_LABEL, ""))
    if spec.get("completionMode") != "Indexed":
        return 0
    return int(spec.get("completions") or 1) * (int(replicas) if replicas.isdecimal() else 1)


def replica_of(job: Document) -> str:
    """Return the Job's global index in its JobSet, else its name suffix; empty for other Jobs."""
    owner = owner_reference.is_controlled_by(job, owner_reference.JOBSET)
    if owner is None:
        return ""
    name = str(job["metadata"].get("name", ""))
    return str(_labels(job).get(JOBSET_REPLICA_LABEL) or name.removeprefix(f"{owner.name}-"))


def of_pod(pod: Document) -> IdentityRecipe:
    """Return the recipe for a pod at its own CREATE: by its Job, by its controller, or for itself."""
    owner = owner_reference.controller_of(pod)
    if owner is None:
        return POD
    if owner.group_kind == owner_reference.JOB:
        return of_job(pod)
    known = _OWNED.get(owner.group_kind, IdentityRecipe(owner.kind))
    return replace(known, name=_text(owner.name), uid=_text(owner.uid))


def of_template(kind: str, document: Document, replicas: int) -> IdentityRecipe:
    return replace(JOBSET, pods=pods_of(document) * replicas) if kind == "JobSet" else PYTORCH_JOB


def index_of_pod(pod: Document) -> str:
    """Return the index of an existing pod, for a PyTorchJob after the replica type; empty if it has none."""
    labels, notes = _labels(pod), pod["metadata"].get("annotations") or {}
    if owner_reference.is_controlled_by(pod, owner_reference.PYTORCH_JOB) is not None:
        return "-".join(filter(None, (labels.get(KUBEFLOW_REPLICA_LABEL), labels.get(KUBEFLOW_INDEX_LABEL))))
    return str(notes.get(JOB_INDEX_ANNOTATION) or labels.get(POD_INDEX_LABEL) or "")


def workload_uid(kind: str, document: Document) -> str:
    """Return the UID of the workload that owns a Job or pod at its CREATE, or an empty string if there is no owner."""
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
    """Return the environment entries of a recipe. Each entry follows the ones that it references."""
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
