"""Owners of objects: controller ownerReferences and the known kinds. Pure.

A kind is identified by API group and name: `Job` of batch is not `Job` of batch.volcano.sh. Labels are ignored because
the creator of an object can set any label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

JOB = ("batch", "Job")
POD = ("", "Pod")
JOBSET = ("jobset.x-k8s.io", "JobSet")
STATEFUL_SET = ("apps", "StatefulSet")
PYTORCH_JOB = ("kubeflow.org", "PyTorchJob")
GroupKind = tuple[str, str]
KNOWN: frozenset[GroupKind] = frozenset({JOB, JOBSET, STATEFUL_SET, PYTORCH_JOB})
"""Controllers whose recreated pods are known to continue their run."""
_INTERCHANGEABLE = "its pods are interchangeable, so each would begin a separate run"
_SEPARATE_RUNS = "its pods are not ranks of one training run that recreated pods continue"
UNSUPPORTED: Mapping[GroupKind, str] = {
    ("apps", "ReplicaSet"): _INTERCHANGEABLE,
    ("apps", "DaemonSet"): _INTERCHANGEABLE,
    ("", "ReplicationController"): _INTERCHANGEABLE,
    ("ray.io", "RayCluster"): _SEPARATE_RUNS,
    ("kubeflow.org", "MPIJob"): _SEPARATE_RUNS,
    ("batch.volcano.sh", "Job"): _SEPARATE_RUNS,
    ("sparkoperator.k8s.io", "SparkApplication"): _SEPARATE_RUNS,
}
"""Controllers whose pods are rejected, with the reason: a new pod would start another run or fence the trainer."""


class Owner(NamedTuple):
    """Controller of an object, from its ownerReference."""

    api_version: str
    kind: str
    name: str
    uid: str

    @property
    def group_kind(self) -> GroupKind:
        return group_kind(self.api_version, self.kind)


def group_kind(api_version: str, kind: str) -> GroupKind:
    """Return (API group, kind). The group of `v1` is the core group, ""."""
    group, _, _ = api_version.rpartition("/")
    return group, kind


def controller_of(document: Mapping[str, Any]) -> Owner | None:
    for each in (document.get("metadata") or {}).get("ownerReferences") or ():
        if each.get("controller"):
            return Owner(*(str(each.get(key, "")) for key in ("apiVersion", "kind", "name", "uid")))
    return None


def is_controlled_by(document: Mapping[str, Any], wanted: GroupKind) -> Owner | None:
    owner = controller_of(document)
    return owner if owner is not None and owner.group_kind == wanted else None
