"""Status text of runs with little information."""

from __future__ import annotations

from typing import Any

from deltashard_cli.kubectl import status_text

NOW_S = 1_000_000.0
AGO = "1970-01-12T13:36:40Z"
"""600 s before the current time."""


def run(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "r"}, "spec": {"policy": "p", "runId": "r"}, "status": status}


def test_summary_of_a_run_that_has_not_started() -> None:
    for each in (run(), {"metadata": {"name": "r"}, "spec": {"policy": "p"}}):
        assert list(status_text.decision_lines(each)) == [
            "Saves: not reported yet, set by the policy p or an annotation."
        ]
        assert list(status_text.problem_lines(each, NOW_S)) == ["No problems."]
        assert list(status_text.loss_lines(each, NOW_S)) == ["No losses."]


def test_false_ready_condition_is_a_problem() -> None:
    ready = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "Unheard",
        "message": "",
        "lastTransitionTime": AGO,
    }
    resolved = {
        "type": "Stale",
        "status": "False",
        "reason": "Over",
        "message": "x",
        "lastTransitionTime": AGO,
    }
    assert list(status_text.problem_lines(run(conditions=[ready, resolved]), NOW_S)) == [
        "Not ready for 10 min: Unheard"
    ]


def test_failures_are_newest_first_and_bounded() -> None:
    losses = [{"time": AGO, "cause": "Evicted", "pod": f"p-{n}"} for n in range(9)]
    lines = list(status_text.loss_lines(run(losses=losses, restores=9, lostSteps=1), NOW_S))
    assert lines[0] == "10 min ago: Evicted, pod p-8"
    assert lines[5:] == [
        "and 4 older ones in the CheckpointRun",
        "Total: 9 restores, 1 step repeated.",
    ]
