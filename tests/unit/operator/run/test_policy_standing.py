"""What a policy's status says, by the word of the sidecars that use it."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.fleet.report import PodState
from deltashard_operator.run import policy_standing
from deltashard_operator.run.watched_run import Heard, Run

from tests.unit.operator.run.observed import NOW_S, TRAIN, pod


def run(*states: PodState, finished: str = "", failing: str = "") -> Run:
    """A run with a sidecar for each state."""
    return Run(
        workload=TRAIN,
        pods={f"p-{n}": pod(uid=f"p-{n}") for n, _ in enumerate(states)},
        heard={
            f"p-{n}": Heard(
                process="s", sequence=1, at_s=NOW_S, beat_s=300, pod=each, name="train-x", url="s3://bucket"
            )
            for n, each in enumerate(states)
        },
        finished=finished,
        failing=failing,
    )


def beat(**more: Any) -> PodState:
    return PodState(**({"store_ok": True, "credentials_ok": True, "store_proven": True} | more))


def status(*runs: Run, before: dict[str, Any] | None = None, now_s: float = NOW_S) -> dict[str, Any]:
    return policy_standing.status(
        policy_standing.of_runs(runs, now_s), before or {}, generation=3, now_s=now_s
    )


def conditions(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in found.get("conditions", ())}


def test_a_policy_that_works() -> None:
    found = status(run(beat()), run(beat(store_proven=False)), run(beat(), finished="Completed"))
    assert (found["runs"], found["sidecars"], found["observedGeneration"]) == (2, 2, 3)
    assert conditions(found) == {
        "Ready": ("True", "InUse"),
        "CredentialsPresent": ("True", "Present"),
        "StoreReachable": ("True", "Answers"),
        "CreateOnly": ("True", "Proven"),
    }


@pytest.mark.parametrize(
    ("said", "failing", "expected", "why"),
    [
        (
            {"credentials_ok": False, "store_ok": False, "store_proven": False},
            "",
            {"Ready": ("False", "CredentialsPresent"), "CredentialsPresent": ("False", "Absent")},
            "create the Secret",
        ),
        (
            {"store_ok": False, "store_proven": False},
            "the bucket does not exist",
            {
                "Ready": ("False", "StoreReachable"),
                "CredentialsPresent": ("True", "Present"),
                "StoreReachable": ("False", "Refused"),
            },
            "the bucket does not exist",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_pod_that_says_so(
    said: dict[str, bool], failing: str, expected: dict[str, tuple[str, str]], why: str
) -> None:
    found = status(run(beat(**said), failing=failing and f"pod train-x: {failing}"))
    assert conditions(found) == expected
    ready = next(each for each in found["conditions"] if each["type"] == "Ready")
    assert "train-x" in ready["message"]
    assert why in ready["message"]


def test_what_is_mended_is_ready_again_without_another_proof() -> None:
    before = status(run(beat()))
    broken = status(run(beat(credentials_ok=False, store_ok=False, store_proven=False)), before=before)
    assert conditions(broken)["Ready"] == ("False", "CredentialsPresent")
    assert conditions(status(run(beat(store_proven=False)), before=broken))["Ready"] == ("True", "InUse")
    assert conditions(status(run(beat(store_proven=False))))["Ready"] == ("Unknown", "NotProven")


def test_sidecars_of_another_store_say_nothing_of_this_one() -> None:
    """The policy's store was changed; pods that were there before keep theirs."""
    standing = policy_standing.of_runs([run(beat())], NOW_S, "s3://another")
    assert (standing.runs, standing.sidecars) == (1, 0)
    assert policy_standing.of_runs([run(beat())], NOW_S, "s3://bucket").sidecars == 1


def test_what_was_proven_stays_when_nobody_is_heard_any_more() -> None:
    before = status(run(beat()))
    found = status(run(beat(), finished="Completed"), before=before, now_s=NOW_S + 500)
    assert (found["runs"], found["conditions"]) == (0, before["conditions"])
    assert status() == {"runs": 0, "sidecars": 0, "observedGeneration": 3}


def test_a_time_moves_with_the_status_alone() -> None:
    before = status(run(beat()))
    later = status(run(beat(store_ok=False), failing="no"), before=before, now_s=NOW_S + 60)
    moved = {
        each["type"]
        for each, old in zip(later["conditions"], before["conditions"], strict=True)
        if each["lastTransitionTime"] != old["lastTransitionTime"]
    }
    assert moved == {"Ready", "StoreReachable"}
    again = status(run(beat(store_ok=False), failing="still"), before=later, now_s=NOW_S + 90)
    assert [each["lastTransitionTime"] for each in again["conditions"]] == [
        each["lastTransitionTime"] for each in later["conditions"]
    ]
