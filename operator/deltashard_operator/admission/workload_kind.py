"""Workload kinds: where users annotate them, which object is injected at which request, and how its pods are found.

Injection happens where the pod template is written: at the CREATE of **Jobs, JobSets and PyTorchJobs**, so that pods
recreated later have the sidecar even while the webhook is down, and queueing systems count it; and at **pod CREATE**
for all other kinds. Templates that are not injected themselves (of a CronJob or TrainJob, or older than the webhook)
are covered by the Jobs and pods created from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from deltashard_operator.admission.injection import labelled
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import owner_reference, run_identity
from deltashard_operator.kube.cluster_name import LEADER_WORKER_SET_LABEL, RUN_ID
from deltashard_operator.kube.run_identity import IdentityRecipe

Document = dict[str, Any]
Path = tuple[str | int, ...]
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
MIRROR = "kubernetes.io/config.mirror"
"""Annotation on the API's mirror of a kubelet's static pod, which is immutable."""
GRACE = "terminationGracePeriodSeconds"
TEMPLATED = frozenset({owner_reference.JOBSET, owner_reference.PYTORCH_JOB})
"""Kinds whose Job and pod templates are injected at their CREATE."""
ADMITTED = TEMPLATED | {owner_reference.JOB, owner_reference.POD}
"""Kinds that are injected at their own CREATE."""


class Kind(NamedTuple):
    """How users annotate one kind of workload."""

    kind: str
    annotate_at: str
    """Path of the manifest's metadata that takes the annotation."""
    injected_as: str
    """Object in it that holds the pod template: Job or Pod."""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys of the Job or pod (template) in this kind. `[]`: each list element, `*`: each map value."""
        words = self.annotate_at.replace("[]", ".[]").removesuffix("metadata").rstrip(".")
        return tuple(words.split(".")) if words else ()


KINDS = (
    Kind("Job", "metadata", "Job"),
    Kind("CronJob", "spec.jobTemplate.metadata", "Job"),
    Kind("JobSet", "spec.replicatedJobs[].template.metadata", "Job"),
    # A TrainJob's pods are created from its runtime's JobSet template.
    Kind("TrainingRuntime", "spec.template.spec.replicatedJobs[].template.metadata", "Job"),
    Kind(
        "PyTorchJob", "spec.pytorchReplicaSpecs.*.template.metadata", "Pod"
    ),  # of Kubeflow's training operator v1
    Kind("StatefulSet", "spec.template.metadata", "Pod"),
    Kind("Pod", "metadata", "Pod"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionTarget:
    """Job or pod at its CREATE, or its template in another object, prepared for injection."""

    kind: str
    root: Mapping[str, Any]
    """The object of the request."""
    path: Path
    """Path of the Job or pod in the object."""
    document: Mapping[str, Any]
    template: Document
    """The pod template; for a pod, the pod itself."""
    recipe: IdentityRecipe

    @property
    def annotations(self) -> tuple[Mapping[str, str], ...]:
        """Annotation maps that may contain the settings."""
        return tuple((each.get("metadata") or {}).get("annotations") or {} for each in self._objects[1:])

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the object and the objects in it."""
        maps = [(each.get("metadata") or {}).get("labels") or {} for each in self._objects]
        return {key: value for each in maps for key, value in each.items()}

    @property
    def _objects(self) -> tuple[Mapping[str, Any], ...]:
        return self.root, self.document, self.template

    @property
    def owner(self) -> owner_reference.Owner | None:
        return owner_reference.controller_of(self.document) if self.kind == "Pod" else None

    @property
    def has_explicit_grace(self) -> bool:
        """Whether the user's manifest is known to set a grace period.

        The API's default is indistinguishable from an explicit 30 in the object, but an applied manifest leaves traces:
        kubectl's annotation, or the fields owned by a server-side apply. An applied value must not be changed, or
        applying the manifest again fails.
        """
        metadata = self.root.get("metadata") or {}
        owned = [each for each in metadata.get("managedFields") or [] if each.get("operation") == "Apply"]
        return GRACE in f"{(metadata.get('annotations') or {}).get(LAST_APPLIED)} {owned}"

    def with_template(self, template: Document, run_id: str) -> Document:
        """Return the Job or pod with this template and the labels by which it is found."""
        document = self.document
        if self.kind == "Pod":
            return {**document, **template}
        metadata = labelled(document.get("metadata") or {})
        if run_id:  # lets `run_holder` find the run's holder without a controller
            metadata["labels"][RUN_ID] = run_id
        return {**document, "metadata": metadata, "spec": {**document["spec"], "template": template}}


def targets(kind: str, document: Mapping[str, Any]) -> tuple[InjectionTarget, ...]:
    """Return the parts to inject in an object of a kind in `ADMITTED`."""
    known = next(each for each in KINDS if each.kind == kind)
    if MIRROR in ((document.get("metadata") or {}).get("annotations") or {}):
        return ()
    return tuple(
        _target(known, document, path, inner)
        for path, inner in _walk(document, known.path)
        if isinstance(inner, Mapping)
    )


def _walk(document: Any, path: tuple[str, ...]) -> Iterator[tuple[Path, Any]]:
    """Yield (keys, value) of everything under a path."""
    if not path:
        yield (), document
        return
    found: Iterable[tuple[str | int, Any]] = ()
    if path[0] == "[]" and isinstance(document, list):
        found = enumerate(document)
    elif isinstance(document, Mapping):
        found = document.items() if path[0] == "*" else [(path[0], document.get(path[0]))]
    for key, value in found:
        for keys, inner in _walk(value, path[1:]):
            yield (key, *keys), inner


def _target(kind: Kind, root: Mapping[str, Any], path: Path, document: Mapping[str, Any]) -> InjectionTarget:
    if kind.injected_as == "Pod":
        template = {key: document[key] for key in ("metadata", "spec") if key in document}
    else:
        template = dict((document.get("spec") or {}).get("template") or {})
    if path:
        replicas = _at(root, path[:-1]).get("replicas")
        count = replicas if isinstance(replicas, int) else 1
        recipe = run_identity.of_template(kind.kind, document, count)
    elif kind.injected_as == "Pod":
        recipe = run_identity.of_pod(document)
    else:
        recipe = run_identity.of_job(template, document)
    return InjectionTarget(
        kind=kind.injected_as, root=root, path=path, document=document, template=template, recipe=recipe
    )


def _at(document: Any, path: Iterable[str | int]) -> Any:
    return reduce(getitem, path, document)


def with_targets(
    root: Mapping[str, Any], parts: Iterable[tuple[InjectionTarget, Mapping[str, Any]]]
) -> Document:
    result = copy.deepcopy(dict(root))
    for target, document in parts:
        if not target.path:
            return dict(document)
        _at(result, target.path[:-1])[target.path[-1]] = document
    return result


def check_supported(target: InjectionTarget) -> None:
    """Raise `Refusal` (Unsupported) for a pod of a kind whose pods do not continue each other's training."""
    owner = target.owner
    if owner is None:
        return
    where, why = f"{owner.kind} {owner.name}", owner_reference.UNSUPPORTED.get(owner.group_kind, "")
    if (group := target.labels.get(LEADER_WORKER_SET_LABEL)) is not None:
        where = f"LeaderWorkerSet {group}"
        why = "leader and workers of a group are pods of different StatefulSets, so each would train a separate run"
    if why:
        known = f"use {', '.join(each.kind for each in KINDS[:-1])} or a bare {KINDS[-1].kind}"
        raise Refusal("Unsupported", why, where=where, remedy=known)
