"""Losses and the failures they make: causes by table, and counts that no order of telling changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.run import failure, observed_object, watched_run
from deltashard_operator.run.failure import SETTLE_S, Interruption, Loss, Tally
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, pod

HOUR_S = 3600.0
GOING: dict[str, Any] = {"terminating_at_s": NOW_S}
FAILED: dict[str, Any] = {"phase": "Failed"}
GONE: dict[str, Any] = {"gone": True}
NODE: dict[str, Any] = {"node_ready": False}
CAUSES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("it runs", {}, {}, ""),
    ("it succeeded", {"phase": "Succeeded", "ending": ended(0, "Completed")}, {}, ""),
    ("it never began", GOING | {"phase": "Pending", "started": False}, {}, ""),
    ("an eviction", GOING | {"disruption": "EvictionByEvictionAPI"}, {}, "Evicted"),
    ("a preemption", GOING | {"disruption": "PreemptionByScheduler"}, {}, "Preempted"),
    ("a taint", GOING | {"disruption": "DeletionByTaintManager"}, {}, "Evicted"),
    ("a taint of a lost node", GOING | {"disruption": "DeletionByTaintManager"}, NODE, "NodeLost"),
    ("garbage of a gone node", {"disruption": "DeletionByPodGC"}, GONE, "NodeLost"),
    ("pressure", FAILED | {"disruption": "TerminationByKubelet"}, {}, "Evicted"),
    ("out of memory", FAILED | {"ending": ended(137, "OOMKilled")}, {}, "OOMKilled"),
    ("a crash", FAILED | {"ending": ended(1)}, {}, "Error"),
    ("a failure without a word", FAILED, {}, "Error"),
    ("a deletion by hand", GOING, {}, "Deleted"),
    ("a suspension", GOING, {"suspended": True}, "Suspended"),
    ("a deletion by force", {}, GONE, "Deleted"),
    ("it vanished with its node", {}, GONE | NODE, "NodeLost"),
]


@pytest.mark.parametrize(("seen", "more", "cause"), [c[1:] for c in CAUSES], ids=[c[0] for c in CAUSES])
def test_the_cause_of_a_loss_is_read_from_the_pod(
    seen: dict[str, Any], more: dict[str, Any], cause: str
) -> None:
    arguments = {"gone": False, "node_ready": True, "suspended": False, "now_s": NOW_S} | more
    loss = failure.loss_of_pod(pod(**seen), **arguments)
    assert (loss.cause if loss is not None else "") == cause
    assert pod(**seen).ends == (bool(cause) and not (arguments["gone"] and not seen))
    if loss is not None:
        assert (loss.pod, loss.node, bool(loss.message)) == ("train-x", "node-a", True)


def lost(
    tally: Tally, cause: str, at_s: float = NOW_S, uid: str = "p", *, seq: int = 0, **more: Any
) -> Tally:
    return failure.with_loss(tally, Loss(at_s=at_s, cause=cause, pod_uid=uid, **more), seq=seq)


def opened(tally: Tally, openings: int, at_s: float = NOW_S) -> tuple[Tally, tuple[Interruption, ...]]:
    """The tally some time after openings were first told of, and what is over by them."""
    tally, first = failure.with_openings(tally, openings, at_s)
    tally, second = failure.with_openings(tally, openings, at_s + SETTLE_S)
    return tally, (*first, *second)


BEGUN, _ = opened(Tally(), 1)


@pytest.mark.parametrize(
    ("story", "openings", "expected", "failures"),
    [
        # Of a group of three: (cause, pod, node). In the order in which the API tells it.
        (["Deleted a x", "Error b y", "TrainerLost c"], 2, [("Deleted", "", 1)], 0),
        (["Suspended a x", "Suspended b y", "TrainerLost c"], 2, [("Suspended", "", 1)], 0),
        (["Error b y", "Evicted a x", "Error c z"], 2, [("Evicted", "x", 1)], 1),
        (["TrainerLost b", "Error c z", "NodeLost a x"], 2, [("NodeLost", "x", 1)], 1),
        (["Error b y", "Deleted a x"], 2, [("Error", "y", 1)], 1),
        (["Deleted a x", "Evicted b y"], 2, [("Evicted", "y", 1)], 1),
        (["TrainerLost b", "OOMKilled c z"], 2, [("OOMKilled", "z", 1)], 1),
        (["TrainerLost a", "Error a x"], 3, [("Error", "x", 1), ("Unseen", "", 1)], 2),
        ([], 4, [("Unseen", "", 3)], 3),
        (["Error a x"], 5, [("Error", "x", 1), ("Unseen", "", 3)], 4),
        (["Evicted a x", "Evicted a x", "Evicted a x"], 3, [("Evicted", "x", 2)], 2),
    ],
)
def test_openings_tell_how_often_training_stopped_and_losses_why(
    story: list[str], openings: int, expected: list[Interruption], failures: int
) -> None:
    tally = BEGUN
    for cause, uid, *node in map(str.split, story):
        tally = lost(tally, cause, uid=uid, node=node[0] if node else "")
    tally, found = opened(tally, openings)
    assert (list(found), tally.failures) == (expected, failures)


def test_losses_beyond_what_was_opened_stay_for_the_next_opening() -> None:
    """The third crash comes before the second opening is settled."""
    tally = BEGUN
    for n in range(3):
        tally = lost(tally, "Evicted", NOW_S + 5 * n, message=str(n))
    tally, _ = opened(tally, 3, NOW_S + 8)
    assert [each.message for each in tally.open_losses] == ["2"]
    assert opened(tally, 4)[1] == (("Evicted", "", 1),)


@pytest.mark.parametrize("told", [("Error", "TrainerLost"), ("TrainerLost", "Error")])
def test_a_trainer_that_went_is_no_second_loss_of_its_pod(told: tuple[str, str]) -> None:
    tally = lost(lost(BEGUN, told[0]), told[1])
    assert ([each.cause for each in tally.losses], tally.open) == (["Error"], 1)


def test_pods_that_were_replaced_and_lost_again_are_two_interruptions() -> None:
    """No opening was told between; a group that takes its time to end leaves nothing for the next opening."""
    tally = lost(lost(BEGUN, "Evicted", uid="a", node="x"), "Evicted", NOW_S + 300, "b")
    assert opened(tally, 3, NOW_S + 400)[1] == (("Evicted", "x", 2),)
    tally, over = opened(tally, 2, NOW_S + 400)
    assert (over, tally.open) == ((("Evicted", "x", 1),), 0)


def test_a_deletion_just_after_a_recovery_is_of_the_next_opening() -> None:
    tally, _ = failure.with_openings(lost(BEGUN, "Evicted", uid="a"), 2, NOW_S + 10)
    tally, first = failure.with_openings(lost(tally, "Deleted", NOW_S + 15, "b"), 2, NOW_S + 10 + SETTLE_S)
    tally, second = opened(tally, 3, NOW_S + 60)
    assert (first, second, tally.failures) == ((("Evicted", "", 1),), (("Deleted", "", 1),), 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["seen", "unseen", "late", "twice", "asked"]), st.integers(1, 3)),
        max_size=12,
    )
)
def test_failures_are_the_interruptions_that_nobody_asked_for(story: list[tuple[str, int]]) -> None:
    """Whatever is told, late, by several pods, or not at all: every attempt but the first is one interruption."""
    tally, at_s, attempt, expected = BEGUN, NOW_S, 1, 0
    for how, pods in story:
        at_s, attempt, expected = at_s + HOUR_S, attempt + 1, expected + (how != "asked")
        if how == "late":
            tally, _ = failure.with_openings(tally, attempt, at_s - 1)
        for n in range({"unseen": 0, "twice": 2 * pods}.get(how, pods)):
            cause = "Suspended" if how == "asked" else "Evicted"
            tally = lost(tally, cause, at_s + n, uid=f"{attempt}-{n}")
        tally, over = opened(tally, attempt, at_s + 5)
        assert (tally.failures, sum(times for _, _, times in over)) == (expected, 1)
        assert (over[-1][0] == "Unseen") == (how == "unseen")
        assert len(tally.losses) <= failure.MAX_LOSSES


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
def test_the_same_end_again_with_no_commit_between_is_a_crash_loop(
    crashes: list[tuple[int, str, str, int]], times: int
) -> None:
    """Whether training is opened between or not: an image that cannot import its module opens no attempt."""
    tally = BEGUN
    for at_s, cause, ending, seq in crashes:
        tally = lost(tally, cause, NOW_S + at_s, uid=f"{at_s}", message=ending, node="x", seq=seq)
    assert tally.crash is not None
    assert tally.crash.times == times
    assert (failure.crash_loop(tally, 5) is not None) == (times >= failure.LOOPS)
    assert failure.crash_loop(tally, 6) is None, "a commit ends it"
    if times >= failure.LOOPS:
        assert opened(tally, 2)[1] == (("Error", "", 1),), "no node is to blame"


def document(*containers: dict[str, Any]) -> observed_object.PodView:
    """A pod as the API serves it."""
    return observed_object.pod_of(
        {
            "metadata": {"namespace": "team", "name": "train-x", "uid": "p-1"},
            "spec": {"nodeName": "node-a"},
            "status": {"phase": "Running", "containerStatuses": list(containers)},
        }
    )


def test_restarts_in_place_are_losses_once_each_and_the_sidecars_own_are_none() -> None:
    ending = {"terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}}
    trainer = {"name": "trainer", "restartCount": 1, "state": {"running": {}}, "lastState": ending}
    run = watched_run.Run(workload=TRAIN)
    for seen in (
        document(trainer),
        document(trainer),
        document(trainer, trainer | {"name": "deltashard-sidecar", "restartCount": 9}),
    ):
        run = watched_run.with_pod(run, replace(seen, workload=TRAIN), node_ready=True, now_s=NOW_S)
    assert [each.cause for each in failure.newest(run.ledger.tallies)] == ["Error"]


def test_a_pods_end_is_one_loss_however_often_it_is_told() -> None:
    """Terminating, failed, deleted: three words of one end; the deletion by hand of a failed pod is none."""
    run = watched_run.Run(workload=TRAIN)
    evicted = pod(terminating_at_s=NOW_S + 30, disruption="EvictionByEvictionAPI")
    for seen in (pod(), evicted, replace(evicted, phase="Failed", ending=ended(143))):
        run = watched_run.with_pod(run, seen, node_ready=True, now_s=NOW_S)
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S)
    assert [each.cause for each in failure.newest(run.ledger.tallies)] == ["Evicted"]
    assert not run.pods
