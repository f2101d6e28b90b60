"""The run of a pod, and whether a single-rank trainer may train it. Pure.

The pod's environment names the workload's run, and all pods of the workload are ranks of that run: a changed world size
never changes the name. Only with `deltashard.io/runs: per-pod` does each numbered pod train a separate run,
`{run}-{index}`, or `{run}-{replica}-{index}` in a JobSet or PyTorchJob, so that run names are unique. The owner takes
the same suffix.

A trainer without peers in one of several numbered pods would share its run with the other pods, and they would fence
each other. Without an annotation that decides between the two, it is rejected.
"""

from __future__ import annotations

from typing import NamedTuple

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_sidecar.settings import Settings


class Identity(NamedTuple):
    """A run and its owner."""

    run: str
    owner: str


class AmbiguousRun(UserError):
    """A trainer without peers is in one of several numbered pods, and the annotation that names its run is missing."""


def identity(settings: Settings) -> Identity:
    suffix = f"-{number(settings)}" if settings.index and settings.runs == RUN_PER_POD else ""
    return Identity(run=settings.run + suffix, owner=settings.owner and settings.owner + suffix)


def number(settings: Settings) -> str:
    """Return the pod's number in its workload: its index, prefixed by the JobSet's Job or the PyTorchJob's role."""
    return "-".join(filter(None, (settings.replica, settings.index)))


def check_run_assignment(settings: Settings, world_size: int) -> None:
    """Raise `AmbiguousRun` for a trainer that would share the workload's run with trainers of other pods."""
    if settings.runs or world_size > 1 or not settings.index:
        return
    if settings.pods == 1 or (not settings.pods and settings.index == "0"):
        return
    several = f"{settings.pods} numbered pods" if settings.pods else "several numbered pods"
    raise AmbiguousRun(
        f"the trainer of pod {settings.pod_name or number(settings)} (number {number(settings)}) trains alone, "
        f"world size 1, and its workload has {several}: each of their trainers would take the run {settings.run!r} "
        "from the others",
        where="attach",
        remedy="if each pod trains a separate run, annotate the workload `deltashard.io/runs: per-pod`. If the pods "
        "are ranks of one run, call torch.distributed.init_process_group() before Checkpointer(), in all of them; "
        "`deltashard.io/runs: one` lets one pod train it alone",
    )
