"""Presence of a group's ranks, the reporting rank, and the time of the next report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.report import Rank, Report
from deltashard_operator.fleet.report import SidecarPhase as At
from deltashard_operator.run import (
    rank_presence,
    reconcile,
    report_change,
    run_record,
    schedule,
    watched_run,
)
from deltashard_operator.run.observed_object import NodeView, PodView, RequestedSettings
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import (
    MAX_MISSED_INTERVALS,
    PEER_INTERVAL_S,
    REPORTER_INTERVAL_S,
    WatchedRun,
)

from tests.unit.operator.run.observed import (
    NODES,
    NOW_S,
    RUN,
    TRAIN,
    apply_report,
    by_type,
    pod,
    reconciled,
    report,
    restarted,
    seen,
)


def rank_pod(n: int, **more: Any) -> PodView:
    return pod(**{"uid": f"p-{n}", "name": f"train-{n}", "index": str(n)} | more)


def rank_report(n: int, *, step: int = 50, size: int = 4, phase: At = At.TRAINING, **more: Any) -> Report:
    ranks = () if phase in {At.WAITING, At.CLOSED} else (Rank(rank=n, world_size=size, step=step),)
    return report(
        f"p-{n}", phase, **{"ranks": ranks, "attempt": 7, "attempts_opened": 1, "report_run": n == 0} | more
    )


def group(pods: int = 4) -> WatchedRun:
    run = seen(WatchedRun(workload=TRAIN), *map(rank_pod, range(pods)))
    for n in range(pods):
        run = apply_report(run, rank_report(n, size=pods))
    return run


def rank_status(run: WatchedRun) -> tuple[str, Phase]:
    run = reconciled(run)
    return run_record.status(run, NOW_S)["ranks"], run.phase


def without(run: WatchedRun, n: int) -> WatchedRun:
    return watched_run.without_pod(run, f"p-{n}", node_ready=True, now_s=NOW_S)


def test_pending_replacement_is_not_present() -> None:
    """A pod object whose image is being pulled does not make its rank present."""
    fresh = rank_pod(3, uid="q-3", phase="Pending", started=False)
    run = reconciled(seen(reconciled(without(group(), 3)), fresh))
    assert run.phase is Phase.RECOVERING
    run = reconciled(seen(run, replace(fresh, started=True)))
    assert run.phase is Phase.RECOVERING, "its container runs, but no rank trains in it yet"


def test_pod_on_a_lost_node_has_no_rank() -> None:
    nodes = {**NODES, "node-b": NodeView(name="node-b", ready=False, since_s=NOW_S + 1)}
    run = reconcile.reconcile(seen(group(), rank_pod(3, node="node-b")), nodes, NOW_S + 2)[0]
    assert (run.progress.ranks_present, run.phase) == (3, Phase.RECOVERING)


def test_spare_pod_of_a_complete_group_is_not_awaited() -> None:
    """The group has three of at most four pods, or one pod because the workload sets `runs: one`."""
    for size in (3, 1):
        run = apply_report(seen(group(size), rank_pod(size)), rank_report(size, phase=At.WAITING))
        for each in (run, apply_report(restarted(run), rank_report(size, phase=At.WAITING))):
            assert rank_status(each) == (f"{size}/{size}", Phase.TRAINING)


def test_ranks_of_an_ended_attempt_are_not_counted() -> None:
    run = apply_report(group(), rank_report(3, attempt=5))
    for n in range(3):
        run = apply_report(run, rank_report(n, attempt=9))
    assert rank_status(run)[0] == "3/4"


def test_deleted_pod_leaves_three_of_four_ranks() -> None:
    run = reconciled(without(group(), 3))
    assert rank_status(run) == ("3/4", Phase.RECOVERING)
    assert "3 of 4 ranks are present" in by_type(run)["Ready"].message
    for n in range(3):  # torchrun ends the others and waits for the fourth
        run = apply_report(run, rank_report(n, phase=At.WAITING))
    assert rank_status(run) == ("0/4", Phase.RECOVERING)
    for n in range(3):  # three start together without it: they are complete
        run = apply_report(run, rank_report(n, size=3, attempt=20))
    assert rank_status(run) == ("3/3", Phase.TRAINING)


def test_silent_rank_is_not_treated_as_lost() -> None:
    """Applies to one silent sidecar, and to all sidecars after a start of the controller, whichever reports first."""
    silent = reconciled(apply_report(group(), rank_report(0, seq=2), NOW_S + 700), NOW_S + 800)
    assert (silent.progress.ranks_present, silent.phase) == (1, Phase.TRAINING)
    for first in range(4):
        run = restarted(group())
        assert rank_status(run) == ("4/4", Phase.TRAINING)
        assert rank_status(apply_report(run, rank_report(first))) == ("4/4", Phase.TRAINING)


def test_closed_ranks_are_not_missing() -> None:
    assert apply_report(group(), rank_report(0, phase=At.CLOSED)).phase is Phase.TRAINING


def test_independent_pods_have_no_expected_ranks() -> None:
    run = WatchedRun(workload=TRAIN)
    for n in range(2):
        run = seen(run, rank_pod(n, requested=RequestedSettings(runs="per-pod")))
        run = apply_report(run, rank_report(0, size=1, pod_uid=f"p-{n}", run=f"{RUN}-{n}"))
    assert (rank_presence.of_run(run, NOW_S), run.phase) == ((0, 0, False), Phase.TRAINING)
    assert "ranks" not in run_record.status(run, NOW_S)
    run = apply_report(run, rank_report(1, phase=At.WAITING, run=f"{RUN}-1"))
    for each in (run, apply_report(restarted(run), rank_report(0, size=1, run=f"{RUN}-0"))):
        assert each.phase is Phase.RECOVERING, "a pod without a report may still be missing"


def reporters(run: WatchedRun, at_s: float) -> list[int]:
    return [n for n in range(4) if schedule.is_reporter(run, f"p-{n}", at_s)]


def test_rank_0_reports_and_one_other_while_it_is_silent() -> None:
    run, silence_s = group(), MAX_MISSED_INTERVALS * REPORTER_INTERVAL_S
    assert reporters(run, NOW_S) == [0]
    run = apply_report(run, rank_report(3), NOW_S + silence_s)
    assert reporters(run, NOW_S + silence_s) == [0]
    late_s = NOW_S + silence_s + 1
    for n in (2, 1, 3):
        run = apply_report(run, rank_report(n), late_s)
    assert reporters(run, late_s) == [2]
    state = rank_report(2, seq=9, report_run=True)
    run = apply_report(run, state, late_s + 60)
    assert (run.progress.last_seq, reporters(run, late_s + 60)) == (9, [2])
    run = apply_report(run, rank_report(0, seq=9), late_s + 70)
    assert 0 in reporters(run, late_s + 70)
    run = apply_report(run, rank_report(2, seq=7, report_run=True), late_s + 80)
    assert (run.progress.last_seq, reporters(run, late_s + 80)) == (9, [0])


def test_new_controller_waits_for_rank_0_before_asking_another() -> None:
    run, late_s = (
        apply_report(restarted(group()), rank_report(2)),
        NOW_S + MAX_MISSED_INTERVALS * REPORTER_INTERVAL_S + 1,
    )
    assert reporters(run, NOW_S) == []
    assert reporters(apply_report(run, rank_report(1), late_s), late_s) == [1]


@pytest.mark.parametrize(
    ("n", "after_s", "more", "expected_s"),
    [
        (0, 0.0, {}, REPORTER_INTERVAL_S),
        (1, 0.0, {}, PEER_INTERVAL_S),
        (1, 0.0, {"urgent": True}, schedule.URGENT_INTERVAL_S),
        (0, 0.0, {"live": 50_000}, 50_000 / schedule.REPORTS_PER_S),
        (9, 0.0, {}, schedule.CHANGED_INTERVAL_S),
    ],
)
def test_next_report_delay_depends_on_rank_urgency_and_load(
    n: int, after_s: float, more: dict[str, Any], expected_s: float
) -> None:
    assert schedule.next_s(group(), f"p-{n}", NOW_S + after_s, **more) == expected_s


def test_sidecar_is_silent_after_two_and_a_half_report_intervals() -> None:
    for report_interval_s in (0.0, 1000.0):
        run, _ = report_change.with_report(
            group(1), rank_report(0, size=1), NOW_S, report_interval_s=report_interval_s
        )
        limit_s = MAX_MISSED_INTERVALS * max(report_interval_s, REPORTER_INTERVAL_S)
        assert [len(watched_run.live_reports(run, NOW_S + limit_s + n)) for n in (0, 1)] == [1, 0]


def test_recent_changes_shorten_the_report_interval() -> None:
    """A sidecar that started long before its first report to this controller did not change recently."""
    late_s, before = NOW_S + schedule.CHANGED_FOR_S, seen(group(), rank_pod(4))
    for sent in (rank_report(0, phase=At.WAITING), rank_report(4, started_at_s=NOW_S)):
        run = apply_report(before, sent, NOW_S)
        uid = sent.identity.pod_uid
        assert schedule.next_s(run, uid, NOW_S) == schedule.CHANGED_INTERVAL_S
        assert schedule.next_s(run, uid, late_s) > schedule.CHANGED_INTERVAL_S
