"""Which runs a workload's numbered pods are: `{run}-{index}`, in a JobSet `{run}-{replica}-{index}`. Pure.

These names are where checkpoints lie, so they are what they are; but they are also names that another workload may ask
for by `run-id`. Pod 1 of `exp` and a workload with the run id `exp-1` are one run in the store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator.kube import owner_reference, run_identity

_SUFFIX = re.compile(r"-(0|[1-9][0-9]*)\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """How a workload's pods are numbered."""

    count: int | None = None
    """Of the numbers, which begin at 0; None: any number may come."""
    replica: str | None = None
    """Which Job of a JobSet; empty: any."""

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


def of_job(job: Mapping[str, Any]) -> Numbering | None:
    """How a Job's pods are numbered; None when they are not."""
    spec = job.get("spec") or {}
    if spec.get("completionMode") != "Indexed":
        return None
    return Numbering(count=int(spec.get("completions") or 1), replica=run_identity.replica_of(job) or None)


def of_kind(kind: owner_reference.GroupKind) -> Numbering | None:
    """The same of a workload that is known by its kind alone."""
    return {owner_reference.STATEFUL_SET: Numbering(), owner_reference.JOBSET: Numbering(replica="")}.get(
        kind
    )


def of_object(kind: str, document: Mapping[str, Any]) -> Numbering | None:
    """The same of the Job or pod that is created."""
    if kind == "Job":
        return of_job(document)
    return (
        Numbering()
        if owner_reference.is_controlled_by(document, owner_reference.STATEFUL_SET) is not None
        else None
    )


def bases(run: str) -> tuple[str, ...]:
    """Run ids of which this may be a pod's: without one number, and without two."""
    found: list[str] = []
    while len(found) < 2 and (match := _SUFFIX.search(run)):
        run = run[: match.start()]
        found.append(run)
    return tuple(found)
