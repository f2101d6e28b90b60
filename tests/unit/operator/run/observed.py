"""A Job and a pod as the controller sees them, whole unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from deltashard_operator.run.observed_object import Ending, JobView, PodView, Wish, Workload

TRAIN = Workload(namespace="team", kind="Job", name="train", uid="u-1")


NOW_S = 1_000_000.0


def pod(**changes: Any) -> PodView:
    fields: dict[str, Any] = {
        "uid": "p-1",
        "name": "train-x",
        "workload": TRAIN,
        "wish": Wish(),
        "job_uid": "u-1",
        "node": "node-a",
        "phase": "Running",
        "started": True,
    }
    return PodView(**(fields | changes))


def job(**changes: Any) -> JobView:
    return JobView(**({"uid": "u-1", "name": "train", "workload": TRAIN, "wish": Wish()} | changes))


def ended(code: int, reason: str = "Error") -> Ending:
    return Ending(container="trainer", reason=reason, exit_code=code, at_s=NOW_S - 5)
