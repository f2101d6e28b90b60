"""Who owns an object: its controller's ownerReference, and which kinds are the ones we know. Pure.

A kind is its API group and its name: `Job` of batch is not `Job` of batch.volcano.sh. Labels say nothing of owners:
whoever makes an object may write them.
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
"""(API group, kind)."""
KNOWN: frozenset[GroupKind] = frozenset({JOB, JOBSET, STATEFUL_SET, PYTORCH_JOB})
"""Controllers whose pods, made anew, are known to go on with their run."""
_INTERCHANGEABLE = "its pods replace one another as equals, so each would begin a run of its own"
_SEPARATE_RUNS = "its pods are no ranks of one training that go on with one run when they are made anew"
UNSUPPORTED: Mapping[GroupKind, str] = {
    ("apps", "ReplicaSet"): _INTERCHANGEABLE,
    ("apps", "DaemonSet"): _INTERCHANGEABLE,
    ("", "ReplicationController"): _INTERCHANGEABLE,
    ("ray.io", "RayCluster"): _SEPARATE_RUNS,
    ("kubeflow.org", "MPIJob"): _SEPARATE_RUNS,
    ("batch.volcano.sh", "Job"): _SEPARATE_RUNS,
    ("sparkoperator.k8s.io", "SparkApplication"): _SEPARATE_RUNS,
}
"""Controllers whose pods are refused, and why: the next pod would be another run, or fence the one that trains."""


class Owner(NamedTuple):
    """A controller, as an ownerReference names it."""

    api_version: str
    kind: str
    name: str
    uid: str

    @property
    def group_kind(self) -> GroupKind:
        """(API group, kind)."""
        return group_kind(self.api_version, self.kind)


def group_kind(api_version: str, kind: str) -> GroupKind:
    """(API group, kind); `v1` is of the core group, whose name is empty."""
    group, _, _ = api_version.rpartition("/")
    return group, kind


def controller_of(document: Mapping[str, Any]) -> Owner | None:
    """Who controls an object; None for one that stands for itself."""
    for each in (document.get("metadata") or {}).get("ownerReferences") or ():
        if each.get("controller"):
            return Owner(*(str(each.get(key, "")) for key in ("apiVersion", "kind", "name", "uid")))
    return None


def is_controlled_by(document: Mapping[str, Any], wanted: GroupKind) -> Owner | None:
    owner = controller_of(document)
    return owner if owner is not None and owner.group_kind == wanted else None
