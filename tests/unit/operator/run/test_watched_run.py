"""A run from facts to status and back: nothing is lost and nothing counted twice by a controller that starts anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.sidecar_report import (
    Commit,
    Heartbeat,
    Hello,
    Incident,
    IncidentKind,
    Measured,
    Rank,
)
from deltashard_operator.fleet.sidecar_report import Phase as At
from deltashard_operator.run import condition, failure, judgement, run_record, watched_run
from deltashard_operator.run import phase as phases
from deltashard_operator.run.observed_object import NodeView, Wish, Workload
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import Run
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision

from tests.support.operator.full_run import changed, full_run
from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, job, pod

NODES = {"node-a": NodeView(name="node-a", ready=True)}
EVERY = pb.Policy(every_s=60.0, encoding="q8", differential="intermittent")


def hello(uid: str = "p-1", process: str = "s-1") -> Hello:
    return Hello(
        namespace="team", pod="train-x", pod_uid=uid, process=process, workload_uid="u-1", node="node-a"
    )


def beat(
    phase: At = At.TRAINING, *, step: int = 10, seq: int = 0, at_s: float = NOW_S, **more: Any
) -> Heartbeat:
    fields: dict[str, Any] = {"attempt": 1, "policy": EVERY, "run": "team/train-u-1"} | more
    fields.setdefault("openings", fields["attempt"])
    if seq:
        fields |= {"last_commit": Commit(seq=seq, attempt=1, step=step - 1), "last_commit_at_s": at_s}
    return Heartbeat(phase=phase, ranks=(Rank(rank=0, world_size=1, step=step),), **fields)


def training(**more: Any) -> Run:
    """A run that trains."""
    run = watched_run.with_job(Run(workload=TRAIN), job(), NOW_S)
    run = watched_run.with_pod(run, pod(), node_ready=True, now_s=NOW_S)
    run, _ = watched_run.with_report(run, hello(), beat(seq=1, **more), NOW_S)
    return judged(run)


def judged(run: Run, at_s: float = NOW_S) -> Run:
    return judgement.judged(run, NODES, at_s)[0]


def told(run: Run, incident: Incident, process: str = "s-1") -> tuple[Run, list[str]]:
    run, notices = watched_run.with_report(
        run, hello(process=process), beat(seq=1, incidents=(incident,)), NOW_S
    )
    return run, [each.reason for each in notices]


def again(run: Run, at_s: float = NOW_S) -> Run:
    """The run as a new controller reads it."""
    document = run_record.document(run) | {"status": run_record.status(run, at_s)}
    return run_record.run_of(document)


def test_a_name_holds_the_workloads_and_enough_of_its_uid() -> None:
    assert watched_run.object_name(replace(TRAIN, uid="0b4f3c1e-aaaa")) == "train-0b4f3c1e"
    long = watched_run.object_name(replace(TRAIN, name="x" * 60 + ".y", uid="0b4f3c1e-aaaa"))
    assert len(long) == watched_run.MAX_NAME
    assert long.endswith("-0b4f3c1e")


def test_an_incident_is_taken_once_however_often_it_is_repeated() -> None:
    restored = Incident(id=1, kind=IncidentKind.RESTORED, step=90, lost_steps=7, seconds=1.5, cause="store")
    run, first = told(training(), restored)
    run, second = told(run, restored)
    assert (first, second) == (["Restored"], [])
    assert (run.restores, run.lost_steps) == (1, 7)
    run, third = told(again(judged(run)), restored)
    assert (third, run.restores) == ([], 1)
    run, fourth = told(run, restored, process="s-2")  # a new process counts from 1 again
    assert (fourth, run.restores) == (["Restored"], 2)


@pytest.mark.parametrize(
    ("kind", "type_", "event"),
    [
        (IncidentKind.FENCED, condition.FENCED, "Fenced"),
        (IncidentKind.TRACKING_FAULT, condition.TRACKING_FAULT, "TrackingFault"),
        (IncidentKind.FELL_BACK, condition.FELL_BACK, "FellBack"),
    ],
)
def test_what_only_an_incident_tells_stays_until_it_is_over_and_survives_the_controller(
    kind: IncidentKind, type_: str, event: str
) -> None:
    run, events = told(training(), Incident(id=1, kind=kind, message="as it is"))
    assert events == [event]
    run = judged(run)
    assert condition.is_true(run.conditions, type_)
    run = judged(again(run))
    assert condition.is_true(run.conditions, type_)
    assert "as it is" in condition.by_type(run.conditions)[type_].message


def test_a_new_attempt_ends_a_tracking_fault_and_a_new_commit_a_fencing() -> None:
    run, _ = told(training(), Incident(id=1, kind=IncidentKind.TRACKING_FAULT, message="x"))
    run, _ = watched_run.with_report(run, hello(), beat(seq=1, attempt=2), NOW_S)
    assert not condition.is_true(judged(run).conditions, condition.TRACKING_FAULT)
    run, _ = told(training(), Incident(id=1, kind=IncidentKind.FENCED, message="x"))
    run, _ = watched_run.with_report(run, hello(), beat(seq=2), NOW_S)
    assert not condition.is_true(judged(run).conditions, condition.FENCED)


def test_the_fencing_of_a_trainer_that_was_replaced_is_told_and_no_trouble() -> None:
    """A node comes back with its old pod, whose attempt is over."""
    run, _ = watched_run.with_report(training(), hello("p-2", "s-2"), beat(seq=1, attempt=2), NOW_S)
    run, events = told(run, Incident(id=1, kind=IncidentKind.FENCED, message="another one trains"))
    assert events == ["Fenced"]
    assert not condition.is_true(judged(run).conditions, condition.FENCED)


def test_a_workload_that_another_one_displaced_stays_fenced_until_it_trains_again() -> None:
    """Its trainer has ended (no attempt is open) and its sidecar sees the other workload's commits go on."""
    incident = Incident(id=1, kind=IncidentKind.FENCED, cause="taken_over", message="of another workload")
    theirs = replace(beat(seq=5, attempt=0), last_commit=Commit(seq=5, attempt=4, step=9))
    run, notices = watched_run.with_report(training(), hello(), replace(theirs, incidents=(incident,)), NOW_S)
    assert [each.message for each in notices] == ["pod train-x: of another workload"]
    assert condition.is_true(judged(run).conditions, condition.FENCED)
    later = replace(theirs, last_commit=Commit(seq=8, attempt=4, step=19))
    run, _ = watched_run.with_report(judged(run), hello(), later, NOW_S)
    assert condition.is_true(judged(run).conditions, condition.FENCED)
    run, _ = watched_run.with_report(judged(run), hello(), beat(attempt=9), NOW_S)  # taken back
    assert not condition.is_true(judged(run).conditions, condition.FENCED)


def test_a_trainer_that_left_had_trained_as_far_as_it_committed() -> None:
    """Its last save may end between two heartbeats: the sidecar's last word then holds the commit, and no rank."""
    left = replace(
        beat(phase=At.CLOSED, attempt=0), ranks=(), last_commit=Commit(seq=2, attempt=1, step=3000)
    )
    run, _ = watched_run.with_report(training(step=2749), hello(), left, NOW_S)
    assert (run.progress.step, run.progress.last_step) == (3000, 3000)
    theirs = replace(left, last_commit=Commit(seq=3, attempt=4, step=9000))  # of another workload
    run, _ = watched_run.with_report(run, hello(), theirs, NOW_S)
    assert run.progress.step == 3000


def test_a_trainer_that_left_before_it_committed_has_not_come_as_far_as_an_older_attempt() -> None:
    """It began at an older checkpoint than the newest."""
    older = Commit(seq=5, attempt=1, step=3000)
    again = replace(beat(step=2100, attempt=2), last_commit=older)
    run, _ = watched_run.with_report(training(step=3001), hello(), again, NOW_S)
    run, _ = watched_run.with_report(run, hello(), replace(again, ranks=(), attempt=0), NOW_S)
    assert run.progress.step == 2100


def test_of_pods_that_are_runs_of_their_own_the_step_is_the_slowest_ones() -> None:
    run = watched_run.with_job(Run(workload=TRAIN), job(), NOW_S)
    for number, (step, at_s) in enumerate(((3000, NOW_S), (1500, NOW_S + 100))):
        uid, name = f"p-{number}", f"team/train-u-1-{number}"
        run = watched_run.with_pod(
            run, replace(pod(), uid=uid, index=str(number)), node_ready=True, now_s=NOW_S
        )
        said = replace(
            beat(step=step, at_s=at_s, run=name),
            last_commit=Commit(seq=2, attempt=1, step=step),
            last_commit_at_s=at_s,
        )
        run, _ = watched_run.with_report(run, hello(uid), said, at_s)
        run, _ = watched_run.with_report(run, hello(uid), replace(said, ranks=(), attempt=0), at_s)
    assert run.progress.step == 1500


@pytest.mark.parametrize(
    ("said", "type_"),
    [
        ({"credentials_ok": False}, condition.CREDENTIALS_MISSING),
        ({"store_ok": False}, condition.STORE_UNAVAILABLE),
        ({"saves_failed_in_a_row": 2}, condition.SAVES_FAILING),
        ({"save_blocked": "ranks differ (rank 3)"}, condition.STALE),
    ],
)
def test_what_heartbeats_say_degrades_the_run_and_goes_with_them(said: dict[str, Any], type_: str) -> None:
    run, _ = watched_run.with_report(training(), hello(), beat(seq=1, **said), NOW_S)
    run = judged(run)
    assert run.phase is Phase.DEGRADED
    assert condition.is_true(run.conditions, type_)
    assert not condition.is_true(run.conditions, condition.READY)
    unheard, notices = judgement.judged(
        watched_run.with_pod(again(run), pod(), node_ready=True, now_s=NOW_S), NODES, NOW_S
    )
    assert (condition.is_true(unheard.conditions, type_), notices) == (True, ())
    run, _ = watched_run.with_report(run, hello(), beat(seq=1), NOW_S)
    run = judged(run)
    assert run.phase is Phase.TRAINING
    assert condition.is_true(run.conditions, condition.READY)


def test_time_alone_makes_a_checkpoint_stale_and_says_so_once() -> None:
    run = training()
    run, notices = judgement.judged(run, NODES, NOW_S + 3 * 60 - 1)
    assert not notices
    run, notices = judgement.judged(run, NODES, NOW_S + 3 * 60 + 1)
    assert [each.reason for each in notices] == ["CheckpointStale"]
    assert run.phase is Phase.DEGRADED
    run, notices = judgement.judged(run, NODES, NOW_S + 3 * 60 + 5)
    assert not notices
    run = watched_run.with_pod(again(run, NOW_S + 185), pod(), node_ready=True, now_s=NOW_S + 190)
    run, notices = judgement.judged(run, NODES, NOW_S + 190)
    assert not notices  # nor by a new controller, which hears nobody yet
    assert condition.is_true(run.conditions, condition.STALE)
    run, _ = watched_run.with_report(run, hello(), beat(seq=1), NOW_S + 191)
    run, notices = judgement.judged(run, NODES, NOW_S + 191)
    assert not notices
    assert condition.is_true(run.conditions, condition.STALE)
    run, _ = watched_run.with_report(run, hello(), beat(seq=2, at_s=NOW_S + 192), NOW_S + 192)
    assert not condition.is_true(judged(run, NOW_S + 192).conditions, condition.STALE)


def test_a_run_whose_sidecars_are_not_heard_keeps_its_phase_and_is_not_called_stale() -> None:
    run = watched_run.with_pod(again(training()), pod(), node_ready=True, now_s=NOW_S + 1)
    run = judged(run, NOW_S + 3600)
    assert run.phase is Phase.TRAINING
    assert condition.by_type(run.conditions)[condition.READY].status == "Unknown"
    assert not condition.is_true(run.conditions, condition.STALE)


def test_a_pod_that_is_not_heard_on_a_lost_node_does_not_train() -> None:
    """Before anybody evicts it. With a sidecar that is heard it trains: only the kubelet is gone."""
    lost = {"node-a": NodeView(name="node-a", ready=False)}
    run = training()
    assert judgement.judged(run, lost, NOW_S)[0].phase is Phase.TRAINING
    run = watched_run.without_connected(run, hello())
    assert judgement.judged(run, NODES, NOW_S)[0].phase is Phase.TRAINING
    assert judgement.judged(run, lost, NOW_S)[0].phase is Phase.RECOVERING


def test_a_new_controller_has_all_that_was_counted() -> None:
    run, _ = told(training(), Incident(id=4, kind=IncidentKind.RESTORED, lost_steps=3))
    run = watched_run.with_pod(run, pod(phase="Failed", ending=ended(1)), node_ready=True, now_s=NOW_S)
    run = replace(judged(run), generation=3, directed=EVERY, trained_s=500.0)
    found = again(run)
    assert found.failures == run.failures == 1
    assert (found.restores, found.lost_steps, found.generation, found.directed) == (1, 3, 3, EVERY)
    assert found.lost == {"p-1"}
    assert found.progress.last_seq == 1
    assert (found.phase, found.trained_s) == (run.phase, 500.0)
    found = watched_run.with_pod(
        found, pod(phase="Failed", ending=ended(1)), node_ready=True, now_s=NOW_S + 9
    )
    assert found.failures == 1
    assert run_record.patch(run_record.status(run, NOW_S), run_record.status(run, NOW_S + 1)) == {}


def numbered(run: Run, index: int, attempt: int, **more: Any) -> Run:
    """The run after the sidecar of a pod that is a run of its own reported."""
    said = replace(beat(seq=attempt, attempt=attempt, **more), run=f"team/train-u-1-{index}")
    return watched_run.with_report(run, hello(f"p-{index}", f"s-{index}"), said, NOW_S)[0]


def crashed(run: Run, index: int, restarts: int, at_s: float) -> Run:
    """The run after the training container of a numbered pod was started again in place."""
    seen = pod(uid=f"p-{index}", name=f"train-{index}", index=str(index), restarts=restarts, ending=ended(1))
    return watched_run.with_pod(run, seen, node_ready=True, now_s=at_s)


def test_the_failures_of_pods_that_are_runs_of_their_own_are_counted_each_by_its_attempts() -> None:
    """Not by the greatest attempt of any, which says nothing about the others; a new controller counts on."""
    run = watched_run.with_job(Run(workload=TRAIN), job(), NOW_S)
    for index in range(3):
        run = numbered(crashed(run, index, 0, NOW_S), index, 1)
    run, at_s = judged(run), NOW_S
    told = [
        (0, 1),
        (0, 2),
        (1, 1),
    ]  # (pod, restarts): the first fails twice, the second once, the third never
    for index, restarts in told:
        at_s += 100.0
        run = judged(crashed(run, index, restarts, at_s), at_s)
        run = judged(numbered(run, index, restarts + 1), at_s + 1)
        run = judged(run, at_s + 1 + failure.SETTLE_S)
    assert run.failures == len(told)
    losses = failure.newest(run.tallies)
    assert [(each.run, each.cause) for each in losses] == [
        ("0", failure.LossCause.ERROR),
        ("0", failure.LossCause.ERROR),
        ("1", failure.LossCause.ERROR),
    ]
    assert run.incidents.evidence.lossy == pytest.approx(len(told) / 3, rel=1e-3), "of the mean of three runs"
    found = again(run, at_s + 30)
    assert found.failures == len(told)
    found = judged(numbered(crashed(found, 2, 0, at_s), 2, 1), at_s + 40)
    found = judged(numbered(crashed(found, 0, 2, at_s), 0, 4), at_s + 41)
    found = judged(found, at_s + 41 + failure.SETTLE_S)
    assert found.failures == len(told) + 1, "one more while no controller looked"


def test_a_fence_is_no_replacement_because_another_number_has_a_greater_attempt() -> None:
    """Attempts of two runs cannot be compared: this one's trainer was ended, and it has no other."""
    run = watched_run.with_job(Run(workload=TRAIN), job(), NOW_S)
    for index, attempt in ((0, 5), (1, 1)):
        run = numbered(crashed(run, index, 0, NOW_S), index, attempt)
    fence = Incident(id=1, kind=IncidentKind.FENCED, message="another pod trains it")
    run = judged(numbered(run, 1, 1, incidents=(fence,)))
    assert condition.is_true(run.conditions, condition.FENCED)


def test_every_field_of_a_status_is_read_back() -> None:
    run = full_run()
    status = run_record.status(run, NOW_S)
    found = run_record.run_of(run_record.document(run) | {"status": status})
    again_written = run_record.status(replace(found, pods=run.pods, reports=run.reports), NOW_S)
    assert again_written == status
    for name in (
        "incidents",
        "decisions",
        "measured",
        "directed",
        "generation",
        "width",
        "tallies",
    ):
        assert getattr(found, name) == getattr(run, name), name


DECIDED = Decision(subject="interval", goal="auto", value="3 min", would="3 min", why="a save costs 0.5 s")


def test_a_decision_is_shown_and_told_when_it_changes() -> None:
    run = training(decisions=(DECIDED,), measured=Measured(cost_s=0.5))
    assert (run.decisions, run.measured) == ((DECIDED,), Measured(cost_s=0.5))
    run, notices = watched_run.with_report(run, hello(), beat(seq=1, decisions=(DECIDED,)), NOW_S)
    assert not notices
    later = changed(DECIDED, value="5 min", why="a save costs 1.5 s")
    run, notices = watched_run.with_report(again(run), hello(), beat(seq=1, decisions=(later,)), NOW_S)
    assert [(each.reason, each.warning) for each in notices] == [("IntervalChanged", False)]
    assert notices[0].message == "interval: 3 min -> 5 min; a save costs 1.5 s"
    shown = changed(later, would="9 min")
    run, notices = watched_run.with_report(run, hello(), beat(seq=1, decisions=(shown,)), NOW_S)
    assert not notices, "what only would be is no news"
    run, notices = watched_run.with_report(run, hello(), beat(seq=1), NOW_S)
    assert (run.decisions, notices) == ((shown,), ()), "a pod that begins has decided nothing yet"


def test_of_several_that_decide_the_one_with_rank_0_counts() -> None:
    run = training(decisions=(DECIDED,))
    other = replace(
        beat(seq=1, decisions=(changed(DECIDED, value="9 min"),)),
        ranks=(Rank(rank=3, world_size=4, step=9),),
    )
    run, _ = watched_run.with_report(run, hello("p-2", "s-2"), other, NOW_S)
    assert run.decisions == (DECIDED,)


def test_a_chosen_interval_is_shown_and_not_where_it_began() -> None:
    asked = pb.Policy(every_s=300.0, encoding="q8", differential="intermittent", goal="auto")
    chosen = changed(asked, every_s=93.4)
    run = replace(training(policy=chosen), directed=asked, generation=2)
    status = run_record.status(run, NOW_S)
    assert (status["intervalSeconds"], status["goal"]) == (94, "auto")
    assert again(run).directed == asked
    stated = replace(run, directed=changed(asked, goal=""))
    assert run_record.status(stated, NOW_S)["intervalSeconds"] == 300


def test_a_goal_that_cannot_be_had_is_a_condition_and_an_event_while_it_cannot() -> None:
    unreachable = changed(DECIDED, unreachable="at most 5 min of lost work cannot be had")
    run, _ = watched_run.with_report(training(), hello(), beat(seq=1, decisions=(unreachable,)), NOW_S)
    run, notices = judgement.judged(run, NODES, NOW_S)
    assert [each.reason for each in notices] == ["GoalUnreachable"]
    assert run.phase is Phase.TRAINING
    assert condition.is_true(run.conditions, condition.GOAL_UNREACHABLE)
    run, _ = watched_run.with_report(run, hello(), beat(seq=1, decisions=(DECIDED,)), NOW_S)
    assert not condition.is_true(judged(run).conditions, condition.GOAL_UNREACHABLE)


def test_a_crash_loop_is_a_condition_until_something_is_committed() -> None:
    run = training()
    for restarts in range(1, 4):
        run = watched_run.with_pod(run, pod(restarts=restarts, ending=ended(1)), node_ready=True, now_s=NOW_S)
    run, notices = judgement.judged(run, NODES, NOW_S + 1)
    assert [each.reason for each in notices] == ["CrashLooping"]
    assert "trainer with exit code 1 ended 3 times" in notices[0].message
    run = judged(again(run), NOW_S + 2)
    assert condition.is_true(run.conditions, condition.CRASH_LOOPING), "a new controller knows it"
    run, _ = watched_run.with_report(run, hello(), beat(seq=2, attempt=2), NOW_S + 3)
    run = judged(judged(run, NOW_S + 4), NOW_S + 60)
    assert not condition.is_true(run.conditions, condition.CRASH_LOOPING)
    assert run.incidents.evidence.lossy == pytest.approx(1, rel=1e-3)


def test_a_run_knows_how_wide_it_is() -> None:
    nodes = {"node-a": NodeView(name="node-a", ready=True)}
    run = watched_run.with_pod(training(), pod(uid="p-2", name="train-y"), node_ready=True, now_s=NOW_S)
    run, _ = judgement.judged(run, nodes, NOW_S)
    run = watched_run.without_pod(run, "p-2", node_ready=True, now_s=NOW_S)
    run, _ = judgement.judged(run, nodes, NOW_S)
    assert (run.width, run.pods_at_risk) == (2, 2)


def test_the_patch_of_a_status_removes_what_is_no_more() -> None:
    assert run_record.patch({"a": 1, "b": 2, "observedTime": "x"}, {"a": 3, "observedTime": "y"}) == {
        "a": 3,
        "b": None,
        "observedTime": "y",
    }
    assert run_record.patch({"a": 1, "observedTime": "x"}, {"a": 1, "observedTime": "y"}) == {}


def test_two_pods_of_one_run_show_the_slowest_rank_and_the_newest_commit() -> None:
    run = training()
    run = watched_run.with_pod(run, pod(uid="p-2", name="train-y"), node_ready=True, now_s=NOW_S)
    run, _ = watched_run.with_report(run, hello("p-2", "s-2"), beat(step=30, seq=4, at_s=NOW_S + 9), NOW_S)
    assert (run.progress.step, run.progress.last_seq, run.progress.last_step) == (10, 4, 29)


def test_pods_that_are_runs_of_their_own_show_the_oldest_newest_checkpoint() -> None:
    run = training()
    run = watched_run.with_pod(run, pod(uid="p-2", name="train-y"), node_ready=True, now_s=NOW_S)
    other = beat(step=30, seq=9, at_s=NOW_S + 50, run="team/train-u-1-1")
    run, _ = watched_run.with_report(run, hello("p-2", "s-2"), other, NOW_S)
    assert (run.progress.last_seq, run.progress.last_commit_at_s) == (1, NOW_S)


@pytest.mark.parametrize(
    ("changes", "stuck"),
    [
        ({}, True),
        ({"replaces_lost": True}, False),
    ],
)
def test_a_pod_that_cannot_end_on_a_lost_node_is_named_with_both_remedies(
    changes: dict[str, Any], stuck: bool
) -> None:
    run = watched_run.with_job(training(), job(**({"replaces_lost": False} | changes)), NOW_S)
    run = watched_run.with_pod(run, pod(terminating_at_s=NOW_S), node_ready=False, now_s=NOW_S)
    nodes = {"node-a": NodeView(name="node-a", ready=False)}
    early, _ = judgement.judged(run, nodes, NOW_S + 5)
    assert not condition.is_true(early.conditions, condition.STUCK)
    run, notices = judgement.judged(run, nodes, NOW_S + 15)
    assert condition.is_true(run.conditions, condition.STUCK) == stuck
    assert [each.reason for each in notices] == (["StuckOnLostNode"] if stuck else [])
    if stuck:
        assert "kubectl delete node node-a" in notices[0].message
        assert "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in notices[0].message
    healthy, _ = judgement.judged(run, NODES, NOW_S + 20)
    assert not condition.is_true(healthy.conditions, condition.STUCK)


def test_a_jobset_is_finished_by_all_its_jobs_and_a_failed_one_may_come_again() -> None:
    workload = Workload(namespace="team", kind="JobSet", name="set", uid="s-1")
    run = Run(workload=workload)
    run = watched_run.with_job(
        run, job(uid="j-1", workload=workload, outcome="Completed", ended_at_s=NOW_S), NOW_S
    )
    run = watched_run.with_job(run, job(uid="j-2", workload=workload), NOW_S)
    assert judged(run).phase is not Phase.FINISHED
    failed = watched_run.with_job(
        run, job(uid="j-2", workload=workload, outcome="Failed", ended_at_s=NOW_S), NOW_S
    )
    assert judged(failed, NOW_S + 1).phase is not Phase.FINISHED
    assert judged(failed, NOW_S + judgement.SETTLED_S).finished == "Failed"
    done = watched_run.with_job(
        run, job(uid="j-2", workload=workload, outcome="Completed", ended_at_s=NOW_S), NOW_S
    )
    assert judged(done).finished == "Completed"


@pytest.mark.parametrize(
    ("outcome", "how"), [("", "Deleted"), ("Completed", "Completed"), ("Failed", "Failed")]
)
def test_a_job_that_is_deleted_ended_as_its_last_word_says(outcome: str, how: str) -> None:
    run = watched_run.with_job(training(), job(outcome=outcome), NOW_S)
    run = judged(watched_run.without_job(run, "u-1", NOW_S))
    assert (run.phase, run.finished) == (Phase.FINISHED, how)


def test_a_statefulset_is_over_long_after_its_last_pod_and_begins_anew_with_the_next() -> None:
    workload = Workload(namespace="team", kind="StatefulSet", name="set", uid="s-1")
    run = watched_run.with_pod(
        Run(workload=workload), pod(workload=workload, job_uid=""), node_ready=True, now_s=NOW_S
    )
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S)
    assert not judged(run, NOW_S + 60).finished
    run = judged(run, NOW_S + judgement.ABSENT_S)
    assert run.finished == "Deleted"
    run = watched_run.with_pod(
        run, pod(uid="p-2", workload=workload, job_uid=""), node_ready=True, now_s=NOW_S + 5000
    )
    assert not judged(run, NOW_S + 5000).finished


def test_a_pytorch_job_is_finished_once_all_its_pods_that_are_there_succeeded() -> None:
    """A pod that failed may be made anew, which its operator knows; its workers may be cleaned away before the master."""
    workload = Workload(
        namespace="team", kind="PyTorchJob", name="ranks", uid="s-1", api_version="kubeflow.org/v1"
    )

    def with_pods(**phases: str) -> Run:
        run = Run(workload=workload)
        for name, phase in phases.items():
            made = pod(uid=name, name=name, workload=workload, job_uid="", phase=phase)
            run = watched_run.with_pod(run, made, node_ready=True, now_s=NOW_S)
        return run

    assert not judged(with_pods(master="Succeeded", worker="Running")).finished
    assert not judged(with_pods(master="Failed")).finished
    done = judged(with_pods(master="Succeeded", worker="Succeeded"))
    assert done.finished == "Completed"
    assert judged(with_pods(master="Succeeded")).finished == "Completed"
    again = pod(uid="p-9", workload=workload, job_uid="", phase="Running")
    assert not judged(watched_run.with_pod(done, again, node_ready=True, now_s=NOW_S)).finished


def test_a_jobs_own_annotations_count_over_its_pods() -> None:
    run = watched_run.with_pod(
        Run(workload=TRAIN), pod(wish=Wish(policy="fast")), node_ready=True, now_s=NOW_S
    )
    assert run.wish.policy == "fast"
    wish = Wish(policy="fast", run_id="ctr", overrides=(("deltashard.io/interval", "9s"),))
    run = watched_run.with_job(run, job(wish=wish), NOW_S)
    run = watched_run.with_pod(run, pod(wish=Wish(policy="fast")), node_ready=True, now_s=NOW_S)
    assert (run.wish, run.run_id) == (wish, "ctr")


def test_training_time_is_the_time_in_phases_that_train() -> None:
    run = judged(training(), NOW_S + 50)
    assert run.trained_s == 50.0
    run = watched_run.with_pod(run, pod(phase="Failed", ending=ended(1)), node_ready=True, now_s=NOW_S + 50)
    run = judged(run, NOW_S + 60)
    assert run.phase is Phase.RECOVERING
    assert judged(run, NOW_S + 600).trained_s == 50.0
    assert set(phases.TRAINS) == {Phase.TRAINING, Phase.SAVING, Phase.DEGRADED}


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0B"), (999, "999B"), (1536, "1.5Ki"), (3 << 30, "3Gi"), (123456789012, "115Gi")]
)
def test_sizes_are_for_people(n: int, text: str) -> None:
    assert run_record.human_bytes(n) == text


def test_a_run_id_that_is_too_long_for_a_label_has_one_of_its_own() -> None:
    assert run_record.run_label("ctr") == "ctr"
    label = run_record.run_label("x" * 40 + "-" + "y" * 40)
    assert len(label) <= 63
    assert label != run_record.run_label("x" * 40 + "-" + "z" * 40)


@pytest.mark.parametrize("skew_s", [-86400.0, -3600.0, 0.0, 3600.0, 86400.0])
def test_a_skewed_clock_neither_hides_nor_raises_that_a_checkpoint_is_stale(skew_s: float) -> None:
    """The controller's own clock counts from the moment at which a commit's number is seen to rise."""

    def said(run: Run, seq: int, at_s: float) -> Run:
        return judged(watched_run.with_report(run, hello(), beat(seq=seq, at_s=at_s + skew_s), at_s)[0], at_s)

    def stale(run: Run) -> bool:
        return condition.is_true(run.conditions, condition.STALE)

    run = watched_run.with_pod(
        watched_run.with_job(Run(workload=TRAIN), job(), NOW_S), pod(), node_ready=True, now_s=NOW_S
    )
    run = judged(watched_run.with_report(run, hello(), beat(), NOW_S)[0])
    for n in range(1, 10):
        run = said(run, n, NOW_S + 60 * n)
        assert not stale(run)
        assert run.progress.last_commit_at_s == NOW_S + 60 * n
    assert not stale(said(run, 9, NOW_S + 540 + 179))
    assert stale(said(run, 9, NOW_S + 540 + 181))
    anew = again(run, NOW_S + 540)
    assert not stale(said(anew, 9, NOW_S + 540 + 179)), "nor by a new controller"
    assert stale(said(anew, 9, NOW_S + 540 + 181))
    assert not stale(said(anew, 10, NOW_S + 540 + 181))


@pytest.mark.parametrize("run_name", ["team/train-u-1", ""])
def test_a_commit_of_before_is_as_old_as_it_says_but_never_of_the_future(run_name: str) -> None:
    """With `run-id` the first thing that is heard of a run may be the commit of another Job, a week ago."""
    run = watched_run.with_job(Run(workload=TRAIN), job(), NOW_S)
    run = watched_run.with_report(run, hello(), beat(run=run_name), NOW_S)[0] if not run_name else run
    old, _ = watched_run.with_report(run, hello(), beat(seq=7, at_s=NOW_S - 604800), NOW_S)
    assert old.progress.last_commit_at_s == NOW_S - 604800
    ahead, _ = watched_run.with_report(run, hello(), beat(seq=7, at_s=NOW_S + 604800), NOW_S)
    assert ahead.progress.last_commit_at_s == NOW_S


def test_a_sidecar_that_calls_its_run_anything_costs_no_memory() -> None:
    run = training()
    for n in range(watched_run.MAX_STAMPS + 10):
        run, _ = watched_run.with_report(run, hello(), beat(seq=1, run=f"team/x-{n}"), NOW_S)
    assert len(run.stamps) == watched_run.MAX_STAMPS


@pytest.mark.parametrize(
    ("every_s", "shown"), [(1.5, 2), (0.25, 1), (0.001, 1), (60.0, 60), (0.0, 0), (1 / 3 * 3, 1)]
)
def test_an_interval_comes_back_from_a_status_as_it_was(every_s: float, shown: int) -> None:
    """What is wanted would differ from what was directed, and every new controller would direct it anew."""
    wanted = changed(EVERY, every_s=every_s, every_steps=5)
    run = judged(replace(training(policy=EVERY), directed=wanted, generation=3))
    assert run_record.status(run, NOW_S)["intervalSeconds"] == shown
    found = again(run)
    assert (found.directed, found.generation) == (wanted, 3)
