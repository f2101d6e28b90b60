"""How a CheckpointPolicy stands, by the word of the sidecars of the runs that use it: the status of the policy. Pure.

Nobody in the cluster but those sidecars has the store's credentials, so only they can say that the Secret is there,
that the store answers, and that it creates only what is absent (they try that before their first entry in a log). A
condition stays as it is while no sidecar is heard: what was proven of a store is not undone by the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import Run, heard

CREDENTIALS, STORE, CREATE_ONLY, READY = "CredentialsPresent", "StoreReachable", "CreateOnly", "Ready"
TYPES = (READY, CREDENTIALS, STORE, CREATE_ONLY)
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the sidecars of a policy say together."""

    runs: int = 0
    """That are not finished."""
    sidecars: int = 0
    """That are heard."""
    without_credentials: str = ""
    """A pod whose sidecar has none; empty: all have them."""
    without_store: str = ""
    """A pod whose sidecar cannot use the store, and why; empty: all can."""
    proven: bool = False
    """Whether one of them has proven that the store creates only what is absent."""


def of_runs(runs: Iterable[Run], now_s: float, url: str = "") -> Standing:
    """Standing of a policy that these runs use.

    `url`: of its store as sidecars say it; those that were started with another one say nothing of this one. Empty: not
    known.
    """
    live = [run for run in runs if not run.finished]
    found = [(run, each) for run in live for each in heard(run, now_s).values() if url in ("", each.url)]
    without = sorted(each.name for _, each in found if not each.pod.credentials_ok)
    broken = sorted(
        (each.name, run.failing) for run, each in found if each.pod.credentials_ok and not each.pod.store_ok
    )
    return Standing(
        runs=len(live),
        sidecars=len(found),
        without_credentials=without[0] if without else "",
        without_store=(broken[0][1] or f"pod {broken[0][0]}: the store does not answer") if broken else "",
        proven=any(each.pod.store_proven for _, each in found),
    )


def status(standing: Standing, before: Mapping[str, Any], *, generation: int, now_s: float) -> Document:
    """The policy's status: as it was `before`, and what is known better now."""
    known = {each["type"]: each for each in before.get("conditions") or ()}
    proven = standing.proven or known.get(CREATE_ONLY, {}).get("status") == "True"
    said = _said(standing, proven=proven) if standing.sidecars else {}
    conditions = []
    for type_ in TYPES:
        old = known.get(type_)
        if type_ not in said:
            if old is not None:
                conditions.append(old)
            continue
        value, reason, message = said[type_]
        moved = old is None or old["status"] != value
        conditions.append(
            {
                "type": type_,
                "status": value,
                "reason": reason,
                "message": message[:1024],
                "observedGeneration": generation,
                "lastTransitionTime": timestamp(now_s) if old is None or moved else old["lastTransitionTime"],
            }
        )
    found: Document = {"runs": standing.runs, "sidecars": standing.sidecars, "observedGeneration": generation}
    return found | ({"conditions": conditions} if conditions else {})


def _said(standing: Standing, *, proven: bool) -> dict[str, tuple[str, str, str]]:
    """Type -> status, reason, message, of what sidecars can say; `proven`: one has said so, now or before."""
    if standing.without_credentials:
        text = (
            f"pod {standing.without_credentials} finds no credentials: create the Secret, or the service account's "
            "role, that the policy names; no restart is needed"
        )
        return {CREDENTIALS: ("False", "Absent", text), READY: ("False", CREDENTIALS, text)}
    found = {CREDENTIALS: ("True", "Present", "the sidecars have credentials")}
    if proven:
        found[CREATE_ONLY] = (
            "True",
            "Proven",
            "a sidecar has tried that the store creates only what is absent",
        )
    if standing.without_store:
        found[STORE] = "False", "Refused", standing.without_store
        return found | {READY: ("False", STORE, standing.without_store)}
    found[STORE] = "True", "Answers", "the store serves the sidecars"
    if proven:
        return found | {READY: ("True", "InUse", "runs save by it")}
    text = "no sidecar has tried yet whether the store creates only what is absent"
    return found | {READY: ("Unknown", "NotProven", text)}
