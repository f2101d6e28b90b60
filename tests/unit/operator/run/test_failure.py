"""Losses and the failures they make: causes by table, and counts that no order of telling changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.run import failure, observed_object, watched_run
from deltashard_operator.run.failure import Loss, LossCause, Point, Tally
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, job, pod

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
    ("a taint", GOING | {"disruption": "DeletionByTaintManager"}, {}, "TaintEvicted"),
    ("a taint of a lost node", GOING | {"disruption": "DeletionByTaintManager"}, NODE, "NodeLost"),
    ("garbage of a gone node", {"disruption": "DeletionByPodGC"}, GONE, "NodeLost"),
    ("pressure, by its condition", FAILED | {"disruption": "TerminationByKubelet"}, {}, "NodePressure"),
    ("pressure, by its reason", FAILED | {"reason": "Evicted"}, {}, "NodePressure"),
    ("a shutdown of the node", FAILED | {"reason": "Terminated"}, {}, "NodeShutdown"),
    ("out of memory", FAILED | {"ending": ended(137, "OOMKilled")}, {}, "OOMKilled"),
    ("a crash", FAILED | {"ending": ended(1)}, {}, "Error"),
    ("a failure without a word", FAILED, {}, "PodFailed"),
    ("a deletion by hand", GOING, {}, "Deleted"),
    ("a suspension", GOING, {"job": job(suspended=True)}, "Suspended"),
    ("a deletion by force", {}, GONE, "Deleted"),
    ("it vanished with its node", {}, GONE | NODE, "NodeLost"),
]


@pytest.mark.parametrize(("seen", "more", "cause"), [c[1:] for c in CAUSES], ids=[c[0] for c in CAUSES])
def test_the_cause_of_a_loss_is_read_from_the_pod(
    seen: dict[str, Any], more: dict[str, Any], cause: str
) -> None:
    arguments: dict[str, Any] = {"gone": False, "node_ready": True, "job": job(), "now_s": NOW_S} | more
    loss = failure.loss_of_pod(pod(**seen), **arguments)
    assert (loss.cause if loss is not None else "") == cause
    assert failure.has_ended(pod(**seen)) == (bool(cause) and not (arguments["gone"] and not seen))
    if loss is not None:
        assert (loss.pod, loss.node, bool(loss.message)) == ("train-x", "node-a", True)


def lost(
    tally: Tally, cause: LossCause = LossCause.ERROR, at_s: float = NOW_S, uid: str = "p", **more: Any
) -> Tally:
    return failure.with_loss(tally, Loss(at_s=at_s, cause=cause, pod_uid=uid, **more))[0]


def told(tally: Tally, openings: int, at_s: float) -> Tally:
    return failure.with_openings(tally, openings, at_s)[0]


def closed(
    tally: Tally, openings: int, at_s: float = NOW_S
) -> tuple[Tally, tuple[failure.Interruption, ...]]:
    """The tally some time after an opening was first told of, and what is over by it."""
    tally, first = failure.with_openings(tally, openings, at_s)
    tally, second = failure.with_openings(tally, openings, at_s + failure.SETTLE_S)
    return tally, (*first, *second)


def opened(tally: Tally, openings: int, at_s: float = NOW_S) -> Tally:
    return closed(tally, openings, at_s)[0]


def test_attempts_tell_of_losses_that_no_controller_saw() -> None:
    tally = opened(lost(opened(Tally(), 1)), 5)
    assert tally.failures == 4
    assert [(each.cause, each.interruptions) for each in tally.losses] == [
        (LossCause.ERROR, 1),
        (LossCause.UNSEEN, 3),
    ]


def test_a_run_that_began_before_the_controller_counts_its_openings() -> None:
    assert told(Tally(), 3, NOW_S).failures == 2


def test_a_loss_of_a_trainer_that_was_opened_since_counts_for_what_comes_after_it() -> None:
    """A pod of the new attempt goes before that is settled: two interruptions, and why each."""
    tally = told(lost(opened(Tally(), 1), LossCause.NODE_LOST, NOW_S), 2, NOW_S + 5)
    loss = Loss(at_s=NOW_S + 9, cause=LossCause.EVICTED, pod_uid="q")
    tally, _ = failure.with_loss(tally, loss, took_part=2)
    late = Loss(
        at_s=NOW_S + 3, cause=LossCause.ERROR, pod_uid="q"
    )  # its container, before it was opened again
    tally, _ = failure.with_loss(tally, late, took_part=2)
    tally, first = failure.with_openings(tally, 2, NOW_S + 30)
    assert [(each.cause, each.times) for each in first] == [(LossCause.NODE_LOST, 1)]
    tally, second = closed(tally, 3, NOW_S + 31)
    assert [(each.cause, each.times) for each in second] == [(LossCause.EVICTED, 1)]
    assert tally.failures == 2


def test_a_node_is_blamed_for_what_it_lost_and_not_for_what_followed() -> None:
    tally = opened(Tally(), 1)
    tally = lost(tally, LossCause.EVICTED, NOW_S, uid="a", node="node-a")
    tally = lost(tally, LossCause.ERROR, NOW_S + 3, uid="b", node="node-b")
    tally, found = closed(tally, 2, NOW_S + 20)
    assert [each.nodes for each in found] == [frozenset({"node-a"})]
    tally = lost(tally, LossCause.DELETED, NOW_S + 100, uid="a", node="node-a")
    tally = lost(tally, LossCause.ERROR, NOW_S + 103, uid="b", node="node-b")
    assert [each.nodes for each in closed(tally, 3, NOW_S + 120)[1]] == [frozenset()]


@pytest.mark.parametrize(
    ("story", "cause", "failures"),
    [
        # Of a group of three: (cause, pod, seconds after the first).
        ([("Deleted", "a", 0), ("Error", "b", 3), ("TrainerLost", "c", 3)], "Deleted", 0),
        ([("Suspended", "a", 0), ("Suspended", "b", 0), ("TrainerLost", "c", 1)], "Suspended", 0),
        ([("Evicted", "a", 0), ("Error", "b", 3), ("Error", "c", 3)], "Evicted", 1),
        ([("TrainerLost", "b", 0), ("Error", "c", 1), ("NodeLost", "a", 15)], "NodeLost", 1),
        ([("Error", "b", 0), ("Deleted", "a", 10)], "Error", 1),
        ([("Deleted", "a", 0), ("Evicted", "b", 2)], "Evicted", 1),
        ([("TrainerLost", "b", 0), ("OOMKilled", "c", 1)], "OOMKilled", 1),
    ],
)
def test_what_stopped_a_group_is_told_from_what_followed_of_it(
    story: list[tuple[str, str, int]], cause: str, failures: int
) -> None:
    tally = opened(Tally(), 1)
    for why, pod_uid, after_s in story:
        tally = lost(tally, LossCause(why), NOW_S + after_s, uid=pod_uid)
    before = tally.failures
    tally, found = closed(tally, 2, NOW_S + 20)
    assert tally.failures == before, "a counter never falls"
    assert [(each.cause.value, each.times) for each in found] == [(cause, 1)]
    assert tally.failures == failures


def test_without_attempts_a_burst_is_one_failure() -> None:
    tally = lost(lost(Tally(), at_s=NOW_S), at_s=NOW_S + 10)
    assert tally.failures == 1
    assert lost(tally, at_s=NOW_S + 2 * HOUR_S).failures == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["seen", "unseen", "late", "twice", "asked"]), st.integers(1, 3)),
        max_size=12,
    )
)
def test_failures_are_the_interruptions_that_nobody_asked_for(story: list[tuple[str, int]]) -> None:
    """Whatever is told, late, by several pods, or not at all: every attempt but the first is one interruption."""
    tally, at_s, attempt, expected = opened(Tally(), 1), NOW_S, 1, 0
    for how, pods in story:
        at_s += HOUR_S
        attempt += 1
        expected += how != "asked"
        cause = LossCause.SUSPENDED if how == "asked" else LossCause.EVICTED
        losses = {"unseen": 0, "twice": 2 * pods}.get(how, pods)
        if how == "late":
            tally = told(tally, attempt, at_s)
        for n in range(losses):
            tally = lost(tally, cause, at_s + n, uid=f"{attempt}-{n}")
        tally = opened(tally, attempt, at_s + 5)
        assert tally.failures == expected
        assert (tally.losses[-1].cause is LossCause.UNSEEN) == (how == "unseen")
        assert len(tally.losses) <= failure.MAX_LOSSES


def crashed(tally: Tally, *, attempt: int, seq: int, trained_s: float, code: int = 1, **more: Any) -> Tally:
    """The tally after the trainer of this attempt ended with this exit code."""
    return lost(
        tally,
        at_s=NOW_S + 100 * attempt,
        ending=f"trainer with exit code {code}",
        at=Point(seq=seq, trained_s=trained_s),
        **more,
    )


def crashes(*each: dict[str, Any]) -> tuple[Tally, list[failure.Interruption]]:
    """A tally after these crashes, one an attempt, and the interruptions that they were."""
    tally, over = opened(Tally(), 1), list[failure.Interruption]()
    for n, one in enumerate(each, start=1):
        tally = crashed(tally, attempt=n, **one)
        tally, found = closed(tally, n + 1, NOW_S + 100 * n + 10)
        over.extend(found)
    return tally, over


def test_the_same_crash_without_a_commit_between_is_one_application_failure() -> None:
    tally, over = crashes(*({"seq": 5, "trained_s": 600.0 + n} for n in range(4)))
    assert [each.again for each in over] == [False, True, True, True]
    assert tally.failures == 4
    loop = failure.crash_loop(tally, Point(seq=5, trained_s=604.0))
    assert loop is not None
    assert (loop.times, loop.endings) == (4, ("trainer with exit code 1",))
    assert failure.crash_loop(tally, Point(seq=6, trained_s=604.0)) is None, "a commit ends it"
    assert failure.crash_loop(tally, Point(seq=5, trained_s=1000.0)) is None, "and so does training"


@pytest.mark.parametrize(
    "second",
    [
        {"seq": 6, "trained_s": 601.0},
        {"seq": 5, "trained_s": 601.0, "code": 2},
        {"seq": 5, "trained_s": 600.0 + failure.LOOP_TRAINED_S + 1},
    ],
)
def test_what_differs_is_no_crash_loop(second: dict[str, Any]) -> None:
    """Crashes a long training apart are none though nothing was committed: there the interval may be what is wrong."""
    _, over = crashes({"seq": 5, "trained_s": 600.0}, second)
    assert [each.again for each in over] == [False, False]


def test_a_lost_node_between_two_crashes_is_no_crash_loop() -> None:
    tally, _ = crashes({"seq": 5, "trained_s": 600.0})
    tally = lost(tally, LossCause.NODE_LOST, at_s=NOW_S + 250)
    tally, over = closed(tally, 3, NOW_S + 260)
    assert (over[0].cause, tally.crash) == (LossCause.NODE_LOST, None)
    tally, over = closed(crashed(tally, attempt=3, seq=5, trained_s=601.0), 4, NOW_S + 400)
    assert [each.again for each in over] == [False]


def test_a_container_that_ends_before_training_is_opened_is_a_crash_loop_by_its_restarts() -> None:
    """An image that cannot import its module opens no attempt."""
    tally = opened(Tally(), 1)
    for n in range(3):
        assert failure.crash_loop(tally, Point()) is None
        tally = crashed(tally, attempt=n + 1, seq=0, trained_s=0.0)
    loop = failure.crash_loop(tally, Point())
    assert loop is not None
    assert loop.times == 3
    tally, over = closed(tally, 2, NOW_S + 900)
    assert [(each.times, each.again) for each in over] == [(1, False)]


def test_crashes_faster_than_their_attempts_settle_are_seen_all_the_same() -> None:
    tally = opened(Tally(), 1)
    for n in range(3):
        tally = lost(
            tally, at_s=NOW_S + 5 * n, ending="trainer with exit code 1", at=Point(seq=2, trained_s=9.0)
        )
    tally, over = closed(tally, 4, NOW_S + 16)
    assert [(each.cause, each.times, each.again) for each in over] == [
        (LossCause.ERROR, 1, False),
        (LossCause.ERROR, 2, True),
    ]
    assert LossCause.UNSEEN not in {each.cause for each in tally.losses}
    assert tally.failures == 3


def test_without_attempts_a_crash_loop_is_known_too() -> None:
    tally, over = Tally(), list[failure.Interruption]()
    for n in range(3):
        loss = Loss(at_s=NOW_S + 300 * n, cause=LossCause.ERROR, pod_uid="p", ending="x with exit code 1")
        tally, found = failure.with_loss(tally, loss)
        over.extend(found)
    assert [each.again for each in over] == [False, True, True]
    assert failure.crash_loop(tally, Point()) is not None


def document(**status: Any) -> dict[str, Any]:
    """A pod as the API serves it."""
    return {
        "metadata": {"namespace": "team", "name": "train-x", "uid": "p-1", "labels": {}, "annotations": {}},
        "spec": {"nodeName": "node-a"},
        "status": status,
    }


def container(
    restarts: int, code: int, at: str = "2026-01-01T00:00:00Z", name: str = "trainer"
) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": at}}
    return {"name": name, "restartCount": restarts, "state": {"running": {}}, "lastState": ended}


def test_restarts_in_place_are_losses_once_each_and_the_sidecars_own_are_none() -> None:
    run = watched_run.Run(workload=TRAIN)
    for _ in range(3):
        seen = observed_object.pod_of(document(phase="Running", containerStatuses=[container(1, 137)]))
        run = watched_run.with_pod(run, replace(seen, workload=TRAIN), node_ready=True, now_s=NOW_S)
    assert [each.cause for each in failure.newest(run.ledger.tallies)] == [LossCause.ERROR]
    seen = observed_object.pod_of(
        document(
            phase="Running", containerStatuses=[container(1, 137), container(9, 1, name="deltashard-sidecar")]
        )
    )
    run = watched_run.with_pod(run, replace(seen, workload=TRAIN), node_ready=True, now_s=NOW_S)
    assert len(failure.newest(run.ledger.tallies)) == 1


def test_a_pods_end_is_one_loss_however_often_it_is_told() -> None:
    """Terminating, failed, deleted: three words of one end; the deletion by hand of a failed pod is none."""
    run = watched_run.Run(workload=TRAIN)
    evicted = pod(terminating_at_s=NOW_S + 30, disruption="EvictionByEvictionAPI")
    for seen in (pod(), evicted, replace(evicted, phase="Failed", ending=ended(143))):
        run = watched_run.with_pod(run, seen, node_ready=True, now_s=NOW_S)
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S)
    assert [each.cause for each in failure.newest(run.ledger.tallies)] == [LossCause.EVICTED]
    assert not run.pods
