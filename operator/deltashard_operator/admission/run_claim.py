"""The runs that a workload claims: its run id, or, where each of its pods is to train a run of its own, these. Pure.

Such a pod's run is `{run}-{index}`, in a JobSet or a PyTorchJob `{run}-{replica}-{index}`. These names are where
checkpoints lie, so they are what they are; but they are also names that another workload may ask for by `run-id`.
Pod 1 of `exp` and a workload with the run id `exp-1` are one run in the store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator.kube import owner_reference, run_identity
from deltashard_operator.kube.cluster_name import RUNS

_SUFFIX = re.compile(r"-(0|[1-9][0-9]*)\Z", re.ASCII)
_PART = re.compile(r"-(?:master|worker)(-(?:0|[1-9][0-9]*))\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """How a workload's pods are numbered."""

    count: int | None = None
    """How many numbers there are, from 0 on; None: any number may come."""
    replica: str | None = None
    """Which Job of a JobSet, which part of a PyTorchJob; empty: any."""

    def holds(self, base: str, run: str) -> bool:
        """Whether one of the pods of a workload with the run id `base` trains `run`."""
        head, _, number = run.rpartition("-")
        if not _SUFFIX.search(f"-{number}") or (self.count is not None and int(number) >= self.count):
            return False
        if self.replica is None:
            return head == base
        if self.replica:
            return head == f"{base}-{self.replica}"
        return head.startswith(f"{base}-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaim:
    """A run that may be there already: one that a workload asks for by `run-id`, or that of the workload itself."""

    namespace: str
    run_id: str = ""
    """Empty: the workload's own, without a `run-id`."""
    workload_uid: str = ""
    """UID of the workload that asks, where it exists already (a JobSet, a StatefulSet)."""
    numbering: Numbering | None = None
    """How its pods are numbered, where each trains a run of its own; None: they are of one."""

    source: bool = False
    """Whether it is only read, for another run to begin with: who holds it does not matter, its store does."""

    def shared(self, run_id: str, numbering: Numbering | None) -> str | None:
        """The run that a pod of this workload and one of another (its run id, its numbering) would both train."""
        if numbering is not None and numbering.holds(run_id, self.run_id):
            return self.run_id
        if self.numbering is not None and self.numbering.holds(self.run_id, run_id):
            return run_id
        return None


def numbering_of_job(job: Mapping[str, Any]) -> Numbering | None:
    """Numbering of a Job's pods; None where they are of one run, or without completionMode Indexed."""
    spec = job.get("spec") or {}
    template = spec.get("template") or {}
    if spec.get("completionMode") != "Indexed" or not _has_run_per_pod(job, template):
        return None
    return Numbering(count=int(spec.get("completions") or 1), replica=run_identity.replica_of(job) or None)


def _has_run_per_pod(*objects: Mapping[str, Any]) -> bool:
    notes = ((each.get("metadata") or {}).get("annotations") or {} for each in objects)
    return any(each.get(RUNS) == RUN_PER_POD for each in notes)


def numbering_of_kind(kind: owner_reference.GroupKind) -> Numbering | None:
    """Numbering of the pods of a workload that is known by its kind alone, where each trains a run of its own."""
    replicated = Numbering(replica="")
    return {
        owner_reference.STATEFUL_SET: Numbering(),
        owner_reference.JOBSET: replicated,
        owner_reference.PYTORCH_JOB: replicated,
    }.get(kind)


def numbering_of_object(kind: str, document: Mapping[str, Any]) -> Numbering | None:
    """Numbering that a Job or a pod at its CREATE belongs to."""
    if kind == "Job":
        return numbering_of_job(document)
    owner = owner_reference.controller_of(document)
    if owner is None or owner.group_kind == owner_reference.JOB or not _has_run_per_pod(document):
        return None
    return numbering_of_kind(owner.group_kind)


def bases(run: str) -> tuple[str, ...]:
    """Run ids of which this run may be a pod's: without one number, without two, without a PyTorchJob's part."""
    shorter: list[str] = []
    part = _PART.search(run)
    if part is not None:
        return run[: part.start(1)], run[: part.start()]
    while len(shorter) < 2 and (match := _SUFFIX.search(run)):
        run = run[: match.start()]
        shorter.append(run)
    return tuple(shorter)
