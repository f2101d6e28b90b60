"""Which run a pod trains, and whether its trainer may train it alone. Pure.

The pod's environment names the workload's run, and all pods of the workload are ranks of that one, however many there
are: a changed world size never names another run. Only where the workload says so (`deltashard.io/runs: per-pod`) each
numbered pod trains a run of its own, `{run}-{index}`, in a JobSet or PyTorchJob `{run}-{replica}-{index}`, so that no
two share a key; its owner takes the same suffix.

A trainer without peers in one of several numbered pods would share its run with the others, and they would fence one
another. Where nobody said which of the two is meant, it is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_sidecar.settings import Settings


class Identity(NamedTuple):
    """A run, and who owns it."""

    run: str
    owner: str


class AmbiguousRun(UserError):
    """A trainer without peers in one of several numbered pods, and nobody said whose run it trains."""


def identity(settings: Settings) -> Identity:
    suffix = f"-{number(settings)}" if settings.index and settings.runs == RUN_PER_POD else ""
    return Identity(run=settings.run + suffix, owner=settings.owner and settings.owner + suffix)


def number(settings: Settings) -> str:
    """The pod's number in its workload: its index, in a JobSet after its Job's, in a PyTorchJob after its part."""
    return "-".join(filter(None, (settings.replica, settings.index)))


def check_run_assignment(settings: Settings, world_size: int) -> None:
    """Raise `AmbiguousRun` for a trainer that would share the workload's run with those of other pods."""
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
        remedy="if each pod trains a run of its own, annotate the workload `deltashard.io/runs: per-pod`. If the pods "
        "are ranks of one run, call torch.distributed.init_process_group() before Checkpointer(), for all of them; "
        "`deltashard.io/runs: one` lets one train it alone",
    )
