"""How a policy stands, by the runs that use it: the status of the policy. Pure.

Nobody in the cluster but the runs' sidecars has the store's credentials, so only they can say that the store serves
them. Ready stays as it is while no run can say otherwise: what was proven of a store is not undone by a run's end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deltashard_operator.run.condition import READY
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import WatchedRun

PROBLEMS = frozenset({"CredentialsMissing", "StoreUnavailable"})
"""Conditions of a run that its policy is to blame for."""


def status(
    runs: Collection[WatchedRun], before: Mapping[str, Any], *, url: str, generation: int, now_s: float
) -> dict[str, Any]:
    """The policy's status: as it was `before`, and what these runs, which are not finished, know better.

    `url`: of its store; runs that were started with another one say nothing of this one. Empty: not known.
    """
    reporting = [run for run in runs if url in ("", run.store)]
    problems = (
        ("False", each.type, f"run {run.name}: {each.message}")
        for run in reporting
        for each in run.conditions
        if each.type in PROBLEMS and each.status == "True"
    )
    # A sidecar tries that the store creates only what is absent before its first attempt is in the log.
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
