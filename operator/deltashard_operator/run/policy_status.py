"""Status of a policy, derived from the runs that use it. Pure.

Only the sidecars of the runs have the store's credentials, so only they can verify the store. Ready keeps its value
while no run reports: the end of a run does not invalidate a verified store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deltashard_operator.run.condition import READY
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import WatchedRun

PROBLEMS = frozenset({"CredentialsMissing", "StoreUnavailable"})
"""Conditions of a run that are caused by its policy."""


def status(
    runs: Collection[WatchedRun], before: Mapping[str, Any], *, url: str, generation: int, now_s: float
) -> dict[str, Any]:
    """Return the policy's status: `before`, updated from these unfinished runs.

    `url` is the policy's store; runs that were started with another store are ignored. Empty: unknown.
    """
    reporting = [run for run in runs if url in ("", run.store)]
    problems = (
        ("False", each.type, f"run {run.name}: {each.message}")
        for run in reporting
        for each in run.conditions
        if each.type in PROBLEMS and each.status == "True"
    )
    # A sidecar verifies conditional creates on the store before its first attempt is recorded in the log.
    in_use = ("True", "InUse", "runs save by it") if any(run.progress.attempt for run in reporting) else None
    found: dict[str, Any] = {"runs": len(runs), "observedGeneration": generation}
    known = next((each for each in before.get("conditions") or () if each["type"] == READY), None)
    if (verdict := next(problems, in_use)) is not None:
        stays = known is not None and known["status"] == verdict[0]
        known = {
            "type": READY,
            "status": verdict[0],
            "reason": verdict[1],
            "message": verdict[2][:1024],
            "observedGeneration": generation,
            "lastTransitionTime": known["lastTransitionTime"] if known and stays else timestamp(now_s),
        }
    return found if known is None else {**found, "conditions": [known]}
