"""The identity recipe: how a pod will know which run it belongs to, written before its UID exists.

At Job CREATE neither the Job's UID nor (with generateName) its name is known, and one template serves every pod to
come. So injection writes a recipe: environment variables that the kubelet fills at pod start, by the downward API from
labels the Job and JobSet controllers put on their pods, or literally from the controller's ownerReference where only
that tells. The kubelet also puts them together, by `$(NAME)`: no code reads a label at run time.

    DELTASHARD_WORKLOAD_KIND / _NAME / _UID   the workload, one for all pods and restarts of it
    DELTASHARD_INDEX                          completion index, StatefulSet ordinal, index among a PyTorchJob's
                                              masters or workers; empty where there is none
    DELTASHARD_REPLICA                        which Job of a JobSet (its global index), which part of a PyTorchJob
                                              (master, worker); empty elsewhere
    DELTASHARD_RUN_ID                         `{name}-{uid}`, or the user's `run-id`
    DELTASHARD_RUN                            `{namespace}/{run id}`: where in the store; namespaces never meet
    DELTASHARD_OWNER                          who owns that run in its log: the same for every restart

A Job created again under an old name has another UID, so it is another run; with `run-id` it goes on with
the older one. A JobSet re-creates its Jobs when it restarts, so its own UID counts, not theirs: by the labels it puts
on them, or, where it is too old to put its UID there, by the Job's ownerReference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One value: literal text, or a field of the pod the kubelet will read."""

    text: str = ""
    field_path: str = ""

    def variable(self, name: str) -> dict[str, Any]:
        if self.field_path:
            return {
                "name": name,
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": self.field_path}},
            }
        return {"name": name, "value": self.text} if self.text else {"name": name}


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityRecipe:
    """Where a pod's workload identity comes from."""

    kind: str
    name: Source | None = None
    uid: Source | None = None
    """None of both: known when the pod is made, and written then."""
    index: Source = Source()
    replica: Source = Source()
    """Which Job of a JobSet, which part of a PyTorchJob."""
    pods: int = 0
    """Numbered pods that the workload wants when it is made; 0: not known, or without numbers."""


def _label(key: str) -> Source:
    return Source(field_path=f"metadata.labels['{key}']")


_JOB_INDEX = Source(field_path=f"metadata.annotations['{JOB_INDEX_ANNOTATION}']")
JOBSET = IdentityRecipe(
    kind="JobSet",
    name=_label(JOBSET_NAME_LABEL),
    uid=_label(JOBSET_UID_LABEL),
    index=_JOB_INDEX,
    replica=_label(JOBSET_REPLICA_LABEL),
)
JOB = IdentityRecipe(kind="Job", name=_label(JOB_NAME_LABEL), uid=_label(JOB_UID_LABEL), index=_JOB_INDEX)
STATEFUL_SET = IdentityRecipe(kind="StatefulSet", index=_label(POD_INDEX_LABEL))
PYTORCH_JOB = IdentityRecipe(
    kind="PyTorchJob", index=_label(KUBEFLOW_INDEX_LABEL), replica=_label(KUBEFLOW_REPLICA_LABEL)
)
"""No label of a pod has its UID: `environment` leaves it, and the name, to the pod's own CREATE."""
_OWNED = {owner_reference.STATEFUL_SET: STATEFUL_SET, owner_reference.PYTORCH_JOB: PYTORCH_JOB}
POD = IdentityRecipe(
    kind="Pod", name=Source(field_path="metadata.name"), uid=Source(field_path="metadata.uid")
)


def of_job(template: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> IdentityRecipe:
    """The recipe for the pods of a Job with this pod template; `job`: the Job itself, which knows its owner."""
    job, labels = job or {}, (template.get("metadata") or {}).get("labels") or {}
    pods = pods_of(job)
    if labels.get(JOBSET_UID_LABEL) and labels.get(JOBSET_NAME_LABEL):
        return replace(JOBSET, pods=pods)
    owner = owner_reference.is_controlled_by(job, owner_reference.JOBSET)
    if owner is None:
        return replace(JOB, pods=pods)
    replica = JOBSET.replica if labels.get(JOBSET_REPLICA_LABEL) else Source(text=replica_of(job))
    name, uid = Source(text=owner.name), Source(text=owner.uid)
    return replace(JOBSET, name=name, uid=uid, replica=replica, pods=pods)


def pods_of(job: Mapping[str, Any]) -> int:
    """Numbered pods of a Job, and of the Jobs that a JobSet makes beside it of one template; 0: it numbers none."""
    spec, labels = job.get("spec") or {}, (job.get("metadata") or {}).get("labels") or {}
    if spec.get("completionMode") != "Indexed":
        return 0
    replicas = str(labels.get(JOBSET_REPLICAS_LABEL, ""))
    return int(spec.get("completions") or 1) * (int(replicas) if replicas.isdecimal() else 1)


def replica_of(job: Mapping[str, Any]) -> str:
    """Which Job of its JobSet a Job is: its global index, else its name without the JobSet's; empty elsewhere."""
    owner = owner_reference.is_controlled_by(job, owner_reference.JOBSET)
    if owner is None:
        return ""
    metadata = job["metadata"]
    number = (metadata.get("labels") or {}).get(JOBSET_REPLICA_LABEL)
    return str(number or metadata.get("name", "").removeprefix(f"{owner.name}-"))


def of_pod(pod: Mapping[str, Any]) -> IdentityRecipe:
    """The recipe for a pod at its own CREATE: what a Job puts on its pods, else its controller, else itself."""
    owner = owner_reference.controller_of(pod)
    if owner is None:
        return POD
    if owner.group_kind == owner_reference.JOB:
        return of_job(pod)
    known = _OWNED.get(owner.group_kind, IdentityRecipe(kind=owner.kind))
    return replace(known, name=Source(text=owner.name), uid=Source(text=owner.uid))


def of_template(kind: str, document: Mapping[str, Any], replicas: int) -> IdentityRecipe:
    """The recipe for the pods of a template in a JobSet or a PyTorchJob that is created."""
    return replace(JOBSET, pods=pods_of(document) * replicas) if kind == "JobSet" else PYTORCH_JOB


def index_of_pod(pod: Mapping[str, Any]) -> str:
    """The number of a pod that is there, as its controller wrote it, in a PyTorchJob after its part; empty: none."""
    metadata = pod["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if owner_reference.is_controlled_by(pod, owner_reference.PYTORCH_JOB) is not None:
        return "-".join(filter(None, (labels.get(KUBEFLOW_REPLICA_LABEL), labels.get(KUBEFLOW_INDEX_LABEL))))
    return str(notes.get(JOB_INDEX_ANNOTATION) or labels.get(POD_INDEX_LABEL) or "")


def workload_uid(kind: str, document: Mapping[str, Any]) -> str:
    """The UID of the workload that a Job or pod at its CREATE is of; empty where it is the workload itself."""
    owner = owner_reference.controller_of(document)
    if kind == "Pod" and (owner is None or owner.group_kind != owner_reference.JOB):
        return owner.uid if owner is not None else ""
    labels = (document.get("metadata") or {}).get("labels") or {}
    if kind == "Job":
        template = ((document.get("spec") or {}).get("template") or {}).get("metadata") or {}
        labels = {**(template.get("labels") or {}), **labels}
    if labels.get(JOBSET_UID_LABEL) and labels.get(JOBSET_NAME_LABEL):
        return str(labels[JOBSET_UID_LABEL])
    if kind == "Job":
        jobset = owner_reference.is_controlled_by(document, owner_reference.JOBSET)
        return jobset.uid if jobset is not None else ""
    return owner.uid if owner is not None else ""


def environment(recipe: IdentityRecipe, run_id: str | None) -> list[dict[str, Any]]:
    """The environment entries of a recipe, each after those it refers to."""
    run = run_id or "$(DELTASHARD_WORKLOAD_NAME)-$(DELTASHARD_WORKLOAD_UID)"
    return [
        Source(field_path="metadata.name").variable("POD_NAME"),
        Source(field_path="metadata.namespace").variable("POD_NAMESPACE"),
        Source(field_path="metadata.uid").variable("POD_UID"),
        Source(field_path="spec.nodeName").variable("NODE_NAME"),
        Source(text=recipe.kind).variable("DELTASHARD_WORKLOAD_KIND"),
        *([] if recipe.name is None else [recipe.name.variable("DELTASHARD_WORKLOAD_NAME")]),
        *([] if recipe.uid is None else [recipe.uid.variable("DELTASHARD_WORKLOAD_UID")]),
        recipe.index.variable("DELTASHARD_INDEX"),
        recipe.replica.variable("DELTASHARD_REPLICA"),
        Source(text=run).variable("DELTASHARD_RUN_ID"),
        Source(text="$(POD_NAMESPACE)/$(DELTASHARD_RUN_ID)").variable("DELTASHARD_RUN"),
        Source(text="$(DELTASHARD_RUN)").variable("DELTASHARD_OWNER"),
    ]
