"""Losses and the failures they make: causes by table, and counts that no order of telling changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.run import failure, observed_object, watched_run
from deltashard_operator.run.failure import Loss, LossCause, Tally
from deltashard_operator.run.observed_object import PodView
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, job, pod

HOUR_S = 3600.0


CAUSES: list[tuple[str, PodView, dict[str, Any], LossCause | None]] = [
    ("a pod that runs", pod(), {}, None),
    ("a pod that succeeded", pod(phase="Succeeded", ending=ended(0, "Completed")), {}, None),
    ("a pod that never began", pod(phase="Pending", started=False, terminating_at_s=NOW_S), {}, None),
    ("an eviction", pod(terminating_at_s=NOW_S, disruption="EvictionByEvictionAPI"), {}, LossCause.EVICTED),
    (
        "a preemption",
        pod(terminating_at_s=NOW_S, disruption="PreemptionByScheduler"),
        {},
        LossCause.PREEMPTED,
    ),
    (
        "a taint",
        pod(terminating_at_s=NOW_S, disruption="DeletionByTaintManager"),
        {},
        LossCause.TAINT_EVICTED,
    ),
    (
        "a taint because the node is lost",
        pod(terminating_at_s=NOW_S, disruption="DeletionByTaintManager"),
        {"node_ready": False},
        LossCause.NODE_LOST,
    ),
    ("garbage of a gone node", pod(disruption="DeletionByPodGC"), {"gone": True}, LossCause.NODE_LOST),
    (
        "pressure, by its condition",
        pod(phase="Failed", disruption="TerminationByKubelet"),
        {},
        LossCause.NODE_PRESSURE,
    ),
    ("pressure, by its reason", pod(phase="Failed", reason="Evicted"), {}, LossCause.NODE_PRESSURE),
    ("a shutdown of the node", pod(phase="Failed", reason="Terminated"), {}, LossCause.NODE_SHUTDOWN),
    ("out of memory", pod(phase="Failed", ending=ended(137, "OOMKilled")), {}, LossCause.OOM_KILLED),
    ("a crash", pod(phase="Failed", ending=ended(1)), {}, LossCause.ERROR),
    ("a failure without a word", pod(phase="Failed"), {}, LossCause.FAILED),
    ("a deletion by hand", pod(terminating_at_s=NOW_S), {}, LossCause.DELETED),
    ("a suspension", pod(terminating_at_s=NOW_S), {"job": job(suspended=True)}, LossCause.SUSPENDED),
    ("a deletion by force", pod(), {"gone": True}, LossCause.DELETED),
    ("a pod that vanished with its node", pod(), {"gone": True, "node_ready": False}, LossCause.NODE_LOST),
]


@pytest.mark.parametrize(("seen", "more", "cause"), [c[1:] for c in CAUSES], ids=[c[0] for c in CAUSES])
def test_the_cause_of_a_loss_is_read_from_the_pod(
    seen: PodView, more: dict[str, Any], cause: LossCause | None
) -> None:
    arguments: dict[str, Any] = {"gone": False, "node_ready": True, "job": job(), "now_s": NOW_S} | more
    loss = failure.loss_of_pod(seen, **arguments)
    assert (loss.cause if loss is not None else None) == cause
    if loss is not None:
        assert (loss.pod, loss.node) == ("train-x", "node-a")
        assert loss.message


def test_only_what_somebody_asked_for_is_no_failure() -> None:
    assert {cause for cause in LossCause if Loss(at_s=0, cause=cause).asked} == {
        LossCause.DELETED,
        LossCause.SUSPENDED,
    }


def lost(tally: Tally, cause: LossCause = LossCause.ERROR, at_s: float = NOW_S, uid: str = "p") -> Tally:
    return failure.with_loss(tally, Loss(at_s=at_s, cause=cause, pod_uid=uid))


def opened(tally: Tally, attempt: int, at_s: float = NOW_S) -> Tally:
    """The tally some time after an attempt was first told of."""
    tally = failure.with_attempt(tally, attempt, at_s, own=True)
    return failure.with_attempt(tally, attempt, at_s + failure.SETTLE_S, own=True)


def test_a_loss_is_a_failure_at_once_and_still_one_when_training_is_opened_again() -> None:
    tally = opened(Tally(), 1)
    assert tally.failures == 0
    tally = lost(tally)
    assert tally.failures == 1
    assert opened(tally, 2).failures == 1


def test_all_pods_that_one_interruption_takes_are_one_failure() -> None:
    tally = opened(Tally(), 1)
    for n in range(4):
        tally = lost(tally, LossCause.NODE_LOST, uid=f"p-{n}")
    assert opened(tally, 2).failures == 1


def test_a_suspension_and_the_attempt_after_it_are_no_failure() -> None:
    assert opened(lost(opened(Tally(), 1), LossCause.SUSPENDED), 2).failures == 0


def test_attempts_tell_of_losses_that_no_controller_saw() -> None:
    tally = opened(lost(opened(Tally(), 1)), 5)
    assert tally.failures == 4
    assert [(each.cause, each.interruptions) for each in tally.losses] == [
        (LossCause.ERROR, 1),
        (LossCause.UNSEEN, 3),
    ]


def test_a_run_that_began_before_the_controller_counts_its_attempts_unless_they_are_anothers() -> None:
    assert failure.with_attempt(Tally(), 3, NOW_S, own=True).failures == 2
    assert failure.with_attempt(Tally(), 3, NOW_S, own=False).failures == 0


def test_a_loss_told_late_is_not_counted_beside_its_attempt() -> None:
    """The new trainer's heartbeat may overtake the kubelet's word about the old one."""
    tally = opened(Tally(), 1)
    tally = failure.with_attempt(tally, 2, NOW_S, own=True)
    tally = lost(tally, at_s=NOW_S + 3)
    tally = failure.with_attempt(tally, 2, NOW_S + failure.SETTLE_S, own=True)
    assert tally.failures == 1
    assert [each.cause for each in tally.losses] == [LossCause.ERROR]


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
        told = {"unseen": 0, "twice": 2 * pods}.get(how, pods)
        if how == "late":
            tally = failure.with_attempt(tally, attempt, at_s, own=True)
        for n in range(told):
            tally = lost(tally, cause, at_s + n, uid=f"{attempt}-{n}")
        tally = opened(tally, attempt, at_s + 5)
        assert tally.failures == expected
        assert len(tally.losses) <= failure.MAX_LOSSES


def test_the_estimate_begins_with_the_prior_and_moves_with_what_happens() -> None:
    fresh = failure.estimate({"": Tally()}, 0.0, NOW_S)
    assert fresh.mtbf_s == failure.PRIOR_S
    assert fresh.expected_restores == pytest.approx(2.0)
    quiet = failure.estimate({"": opened(Tally(), 1)}, 6 * 24 * HOUR_S, NOW_S)
    assert quiet.mtbf_s > 12 * failure.PRIOR_S
    tally, at_s = opened(Tally(), 1), NOW_S
    for attempt in range(2, 12):
        at_s += HOUR_S
        tally = opened(lost(tally, at_s=at_s), attempt, at_s + 1)
    busy = failure.estimate({"": tally}, 10 * HOUR_S, at_s)
    assert busy.mtbf_s == pytest.approx((failure.PRIOR_S + 10 * HOUR_S) / 11)
    assert busy.expected_restores == pytest.approx(24 * HOUR_S / busy.mtbf_s)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    tally = opened(lost(opened(Tally(), 1)), 2)
    later = failure.estimate({"": tally}, 30 * 24 * HOUR_S, NOW_S + 2 * failure.WINDOW_S)
    assert later.mtbf_s == failure.PRIOR_S + failure.WINDOW_S


def test_unseen_interruptions_weigh_as_many_as_they_are() -> None:
    tally = opened(opened(Tally(), 1), 6)
    assert failure.estimate({"": tally}, 0.0, NOW_S).mtbf_s == failure.PRIOR_S / 6


@given(st.floats(0, 1e8), st.integers(0, 50))
def test_more_failures_never_make_a_longer_mtbf(trained_s: float, n: int) -> None:
    tally, at_s = opened(Tally(), 1), NOW_S
    before = failure.estimate({"": tally}, trained_s, at_s).mtbf_s
    for attempt in range(2, 2 + min(n, 10)):
        tally = opened(lost(tally, at_s=at_s), attempt, at_s)
        after = failure.estimate({"": tally}, trained_s, at_s).mtbf_s
        assert 0 < after < before
        before = after


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
    assert [each.cause for each in failure.newest(run.tallies)] == [LossCause.ERROR]
    seen = observed_object.pod_of(
        document(
            phase="Running", containerStatuses=[container(1, 137), container(9, 1, name="deltashard-sidecar")]
        )
    )
    run = watched_run.with_pod(run, replace(seen, workload=TRAIN), node_ready=True, now_s=NOW_S)
    assert len(failure.newest(run.tallies)) == 1


def test_a_pods_end_is_one_loss_however_often_it_is_told() -> None:
    """Terminating, failed, deleted: three words of one end; the deletion by hand of a failed pod is none."""
    run = watched_run.Run(workload=TRAIN)
    evicted = pod(terminating_at_s=NOW_S + 30, disruption="EvictionByEvictionAPI")
    for seen in (pod(), evicted, replace(evicted, phase="Failed", ending=ended(143))):
        run = watched_run.with_pod(run, seen, node_ready=True, now_s=NOW_S)
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S)
    assert [each.cause for each in failure.newest(run.tallies)] == [LossCause.EVICTED]
    assert not run.pods
