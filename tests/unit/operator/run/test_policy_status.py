"""The status of a policy summarizes the runs that use it."""

from __future__ import annotations

from typing import Any

from deltashard_operator.run import policy_status
from deltashard_operator.run.watched_run import WatchedRun

from tests.unit.operator.run.observed import NOW_S, apply_report, report, training


def status(
    *runs: WatchedRun, before: dict[str, Any] | None = None, url: str = "", at_s: float = NOW_S
) -> dict[str, Any]:
    return policy_status.status(runs, before or {}, url=url, generation=3, now_s=at_s)


def ready(found: dict[str, Any]) -> tuple[str, str, str]:
    (condition,) = found["conditions"]
    return condition["status"], condition["reason"], condition["lastTransitionTime"]


def test_policy_is_ready_unless_a_run_has_store_errors() -> None:
    well, waiting = training(), training(attempt=0)
    broken = apply_report(well, report(seq=1, store_ok=False))
    without = apply_report(waiting, report(attempt=0, credentials_ok=False))
    assert status() == {"runs": 0, "observedGeneration": 3}
    assert status(waiting) == {"runs": 1, "observedGeneration": 3}, "no run has opened an attempt yet"
    first = status(well, waiting)
    assert (first["runs"], ready(first)[:2]) == (2, ("True", "InUse"))
    assert status(before=first)["conditions"] == first["conditions"], "a proven condition stays"
    second = status(well, broken, before=first, at_s=NOW_S + 60)
    assert ready(second)[:2] == ("False", "StoreUnavailable")
    third = status(without, before=second, at_s=NOW_S + 90)
    assert ready(third) == ("False", "CredentialsMissing", ready(second)[2])
    assert without.name in third["conditions"][0]["message"]
    assert ready(status(waiting, before=third))[0] == "False", "until a run opens an attempt"
    assert ready(status(well, before=third))[0] == "True"


def test_run_in_another_store_does_not_affect_the_policy() -> None:
    before = training(url="s3://before")
    assert status(before, url="s3://now") == {"runs": 1, "observedGeneration": 3}
    assert ready(status(before, training(url="s3://now"), url="s3://now"))[0] == "True"
