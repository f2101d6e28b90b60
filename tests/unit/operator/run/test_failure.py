"""Losses: causes by table, one loss for each end, and crash loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.run import failure, observed_object, watched_run
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.ledger import Ledger

from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, pod

TERMINATING: dict[str, Any] = {"terminating_at_s": NOW_S}
FAILED: dict[str, Any] = {"phase": "Failed"}
GONE: dict[str, Any] = {"gone": True}
NODE: dict[str, Any] = {"node_ready": False}
CAUSES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("running", {}, {}, ""),
    ("succeeded", {"phase": "Succeeded", "ending": ended(0, "Completed")}, {}, ""),
    ("never started", TERMINATING | {"phase": "Pending", "started": False}, {}, ""),
    ("an eviction", TERMINATING | {"disruption": "EvictionByEvictionAPI"}, {}, "Evicted"),
    ("a preemption", TERMINATING | {"disruption": "PreemptionByScheduler"}, {}, "Preempted"),
    ("a taint", TERMINATING | {"disruption": "DeletionByTaintManager"}, {}, "Evicted"),
    ("a taint of a lost node", TERMINATING | {"disruption": "DeletionByTaintManager"}, NODE, "NodeLost"),
    ("pod of a deleted node", {"disruption": "DeletionByPodGC"}, GONE, "NodeLost"),
    ("pressure", FAILED | {"disruption": "TerminationByKubelet"}, {}, "Evicted"),
    ("out of memory", FAILED | {"ending": ended(137, "OOMKilled")}, {}, "OOMKilled"),
    ("a crash", FAILED | {"ending": ended(1)}, {}, "Error"),
    ("a failure without a reason", FAILED, {}, "Error"),
    ("a deletion by hand", TERMINATING, {}, "Deleted"),
    ("a suspension", TERMINATING, {"suspended": True}, "Suspended"),
    ("a deletion by force", {}, GONE, "Deleted"),
    ("deleted with its node", {}, GONE | NODE, "NodeLost"),
]


@pytest.mark.parametrize(("seen", "more", "cause"), [c[1:] for c in CAUSES], ids=[c[0] for c in CAUSES])
def test_failure_cause_is_read_from_the_pod(seen: dict[str, Any], more: dict[str, Any], cause: str) -> None:
    arguments = {"gone": False, "node_ready": True, "suspended": False, "now_s": NOW_S} | more
    loss = failure.loss_of_pod(pod(**seen), **arguments)
    assert (loss.cause if loss is not None else "") == cause
    assert pod(**seen).ends == (bool(cause) and not (arguments["gone"] and not seen))
    if loss is not None:
        assert (loss.pod, loss.node, bool(loss.message)) == ("train-x", "node-a", True)


@pytest.mark.parametrize(
    ("causes", "later_s", "expected"),
    [
        (("Error", "TrainerLost"), 5, ["Error"]),
        (("TrainerLost", "Error"), 5, ["Error"]),
        (("TrainerLost", "Error"), -5, ["Error"]),  # the API's clock may be behind
        (("Error", "TrainerLost"), 90, ["Error", "TrainerLost"]),
        (("Error", "Evicted"), 5, ["Error", "Evicted"]),
    ],
)
def test_trainer_exit_and_pod_loss_count_once(
    causes: tuple[str, str], later_s: float, expected: list[str]
) -> None:
    losses = tuple(Loss(at_s=NOW_S, cause="Error", pod=f"p-{n}") for n in range(40))
    for n, cause in enumerate(causes):
        losses = failure.with_loss(losses, Loss(at_s=NOW_S + n * later_s, cause=cause, pod="p"))
    assert [each.cause for each in losses if each.pod == "p"] == expected
    assert len(losses) <= failure.MAX_LOSSES


@pytest.mark.parametrize(
    ("crashes", "times"),
    [
        # (seconds, cause, ending, newest commit)
        ([(0, "Error", "a", 5), (40, "Error", "a", 5), (80, "Error", "a", 5)], 3),
        ([(0, "Error", "a", 5), (40, "Error", "a", 6)], 1),
        ([(0, "Error", "a", 5), (40, "Error", "b", 5)], 1),
        ([(0, "Error", "a", 5), (40, "NodeLost", "", 5), (80, "Error", "a", 5)], 1),
        ([(0, "Error", "a", 5), (5, "Error", "b", 5), (9, "Error", "a", 5)], 1),  # a group, at once
        ([(0, "Error", "a", 5), (5, "Error", "b", 5), (40, "Error", "a", 5), (41, "TrainerLost", "", 5)], 2),
    ],
)
def test_repeated_failure_without_a_commit_is_a_crash_loop(
    crashes: list[tuple[int, str, str, int]], times: int
) -> None:
    """An image that cannot import its module opens no attempt and is a crash loop, too."""
    found = Ledger()
    for at_s, cause, ending, seq in crashes:
        found = found.with_loss("", Loss(at_s=NOW_S + at_s, cause=cause, message=ending), f"{at_s}", seq)
    crash = found.crashes[""]
    assert crash.times == times
    assert failure.is_loop(crash, 5) == (times >= failure.CRASH_LOOP_COUNT)
    assert not failure.is_loop(crash, 6), "a commit ends it"


def document(*containers: dict[str, Any]) -> observed_object.PodView:
    return observed_object.pod_of(
        {
            "metadata": {"namespace": "team", "name": "train-x", "uid": "p-1"},
            "spec": {"nodeName": "node-a"},
            "status": {"phase": "Running", "containerStatuses": list(containers)},
        }
    )


def test_container_restarts_count_once_and_sidecar_restarts_do_not() -> None:
    ending = {"terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}}
    trainer = {"name": "trainer", "restartCount": 1, "state": {"running": {}}, "lastState": ending}
    run = watched_run.WatchedRun(workload=TRAIN)
    for seen in (
        document(trainer),
        document(trainer),
        document(trainer, trainer | {"name": "deltashard-sidecar", "restartCount": 9}),
    ):
        run = watched_run.with_pod(run, replace(seen, workload=TRAIN), node_ready=True, now_s=NOW_S)
    assert [each.cause for each in run.losses] == ["Error"]
