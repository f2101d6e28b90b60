"""Workload kinds: where the one line goes, which object is injected at which moment, and how its pods are reached.

Injection happens at **Job CREATE** (so a pod that is re-created later has its sidecar although the webhook is down,
and queueing systems count it) and at **pod CREATE** for the pods of everything else. What other controllers own
(JobSets, CronJobs, StatefulSets, PyTorchJobs, TrainJobs) is never touched: it is reached through the Jobs and pods
they create.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator.admission.injection import labelled
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import owner_reference, run_identity
from deltashard_operator.kube.cluster_name import QUEUE_LABEL, RUN_ID
from deltashard_operator.kube.run_identity import IdentityRecipe

Document = dict[str, Any]
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
MIRROR = "kubernetes.io/config.mirror"
"""Annotation on the API's copy of a kubelet's static pod, which nobody can change."""
GRACE = "terminationGracePeriodSeconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How users annotate one kind of workload."""

    kind: str
    annotate_at: tuple[str, ...]
    """Where `metadata.annotations` of the manifest holds the one line; the first is the one to recommend."""
    injected_as: str
    """The kind whose CREATE brings the sidecar in: Job or Pod."""


KINDS = (
    Kind(kind="Job", annotate_at=("metadata", "spec.template.metadata"), injected_as="Job"),
    Kind(
        kind="CronJob",
        annotate_at=("spec.jobTemplate.metadata", "spec.jobTemplate.spec.template.metadata"),
        injected_as="Job",
    ),
    Kind(
        kind="JobSet",
        annotate_at=(
            "spec.replicatedJobs[].template.metadata",
            "spec.replicatedJobs[].template.spec.template.metadata",
        ),
        injected_as="Job",
    ),
    Kind(
        kind="TrainingRuntime",  # a TrainJob's pods come from its runtime's JobSet template
        annotate_at=("spec.template.spec.replicatedJobs[].template.metadata",),
        injected_as="Job",
    ),
    Kind(
        kind="PyTorchJob",  # of Kubeflow's training operator v1
        annotate_at=("spec.pytorchReplicaSpecs.*.template.metadata",),
        injected_as="Pod",
    ),
    Kind(kind="StatefulSet", annotate_at=("spec.template.metadata",), injected_as="Pod"),
    Kind(kind="Pod", annotate_at=("metadata",), injected_as="Pod"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An object at its CREATE, taken apart for injection."""

    kind: str
    """Job or Pod."""
    document: Mapping[str, Any]
    annotations: tuple[Mapping[str, str], ...]
    """Every map that may hold ours."""
    template: Document
    """The pod template; a pod is its own."""
    recipe: IdentityRecipe
    grace_path: tuple[str, ...]
    """Keys under which the object states its grace period."""

    def put(self, template: Document, run_id: str | None) -> Document:
        """The object with this template in the place of its own, and the labels by which it is found."""
        document = self.document
        if self.kind == "Pod":
            return {**document, **template}
        spec = {**document["spec"], "template": template}
        metadata = labelled(document.get("metadata") or {})
        if run_id is not None:  # by which `run_holder` finds who has a run, without a controller
            metadata["labels"][RUN_ID] = run_id
        return {**document, "metadata": metadata, "spec": spec}


def target(group: str, kind: str, document: Mapping[str, Any]) -> Target | None:
    """The parts of an object, or None when its kind is not injected itself."""
    metadata = document.get("metadata") or {}
    own = metadata.get("annotations") or {}
    if (group, kind) == ("", "Pod") and MIRROR not in own:
        template = {key: document[key] for key in ("metadata", "spec") if key in document}
        return Target(
            kind=kind,
            document=document,
            annotations=(own,),
            template=template,
            recipe=run_identity.of_pod(document),
            grace_path=("spec", GRACE),
        )
    if (group, kind) == ("batch", "Job"):
        template = dict((document.get("spec") or {}).get("template") or {})
        return Target(
            kind=kind,
            document=document,
            annotations=(own, (template.get("metadata") or {}).get("annotations") or {}),
            template=template,
            recipe=run_identity.of_job(template, document),
            grace_path=("spec", "template", "spec", GRACE),
        )
    return None


def check(target: Target) -> None:
    """Raise `Refusal` (Unsupported) for a pod of a kind whose pods are nobody's continuation."""
    owner = owner_reference.controller_of(target.document) if target.kind == "Pod" else None
    if owner is not None and owner.group_kind in owner_reference.UNFIT:
        raise Refusal(
            "Unsupported",
            "its pods replace one another as equals, so each would begin a run of its own",
            where=f"{owner.kind} {owner.name}",
            remedy=f"use {', '.join(each.kind for each in KINDS[:-1])} or a bare {KINDS[-1].kind}",
        )


def unknown_owner(target: Target) -> str:
    """Kind and group of a pod's controller where that is none we know; empty elsewhere."""
    owner = owner_reference.controller_of(target.document) if target.kind == "Pod" else None
    if owner is None or owner.group_kind in owner_reference.KNOWN:
        return ""
    return f"{owner.kind} of {owner.api_version}"


def is_queued(target: Target) -> bool:
    """Whether Kueue admits the workload, by the resources that it requests."""
    return any(
        QUEUE_LABEL in ((each.get("metadata") or {}).get("labels") or {})
        for each in (target.document, target.template)
    )


def states_grace(target: Target) -> bool:
    """Whether the user's own manifest is known to state the grace period.

    The API's default cannot be told from a written 30 in the object. But an applied manifest leaves its trace:
    kubectl's annotation, or the fields that a server-side apply owns. What was applied may not change, or applying it
    again fails.
    """
    metadata, path = target.document.get("metadata") or {}, target.grace_path
    try:
        applied = json.loads((metadata.get("annotations") or {}).get(LAST_APPLIED, "null"))
    except ValueError:
        applied = None
    if _reaches(applied, path):
        return True
    owned = tuple(f"f:{name}" for name in path)
    return any(
        entry.get("operation") == "Apply" and _reaches(entry.get("fieldsV1"), owned)
        for entry in metadata.get("managedFields") or []
    )


def _reaches(document: object, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(document, Mapping) or name not in document:
            return False
        document = document[name]
    return True
