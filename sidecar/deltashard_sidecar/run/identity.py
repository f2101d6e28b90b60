"""Which run a pod trains. Pure.

The pod's environment names the workload's run. Where the workload's pods are numbered (an Indexed Job, a JobSet, a
StatefulSet) each may be a run of its own, or all may be ranks of one: only the trainer knows, and says so at Attach by
its world size.

    world size 1, numbered pod     `{run}-{index}`, in a JobSet `{run}-{replica}-{index}`: no two pods share a key
    anything else                  `{run}`: one pod, or the ranks of one run

The owner that is written to the run's log takes the same suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_sidecar.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A run, and who owns it."""

    run: str
    owner: str


def identity(settings: Settings, world_size: int | None) -> Identity | None:
    """Run and owner of a pod whose trainer has this world size; None while that (`world_size` None) matters."""
    numbers = "-".join(filter(None, (settings.replica, settings.index))) if settings.index else ""
    if numbers and world_size is None:
        return None
    suffix = f"-{numbers}" if numbers and world_size == 1 else ""
    return Identity(
        run=settings.run + suffix, owner=settings.owner + suffix if settings.owner else settings.owner
    )
