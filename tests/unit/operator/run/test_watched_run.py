"""A run's state survives a restart of the controller: nothing is lost or counted twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.report import Incident, IncidentKind, KeptCheckpoint
from deltashard_operator.fleet.report import SidecarPhase as At
from deltashard_operator.run import reconcile, report_change, run_record, watched_run
from deltashard_operator.run.failure import CRASH_WINDOW_S
from deltashard_operator.run.observed_object import (
    ABSENT_S,
    NodeView,
    RequestedSettings,
    Workload,
    seconds_of,
)
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import MAX_NAME, WatchedRun
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision

from tests.support.operator.full_run import full_run
from tests.unit.operator.run.observed import (
    NODES,
    NOW_S,
    RUN,
    TRAIN,
    apply_report,
    by_type,
    ended,
    job,
    pod,
    reconciled,
    reloaded,
    report,
    report_reasons,
    restarted,
    seen,
    training,
)

LOST = {"node-a": NodeView(name="node-a", ready=False, since_s=NOW_S + 1)}
K = IncidentKind


def is_true(run: WatchedRun, type_: str) -> bool:
    return type_ in (found := by_type(run)) and found[type_].status == "True"


# -- reports -----------------------------------------------------------------------------------------------------------


def test_late_report_changes_nothing() -> None:
    """The report is an older one of the same process, or one of an earlier process."""
    run = training(sequence=1000, process="new", started_at_s=50.0)
    for late in (
        report(sequence=999, process="new", phase=At.WAITING),
        report(sequence=1000, process="new", phase=At.WAITING),
        report(sequence=5000, process="old", started_at_s=40.0, phase=At.WAITING),
    ):
        assert report_change.with_report(run, late, NOW_S + 1) == (run, ())
    assert apply_report(run, report(sequence=1, process="newer", started_at_s=60.0, phase=At.WAITING)) != run


@pytest.mark.parametrize("kind", [K.FENCED, K.TRACKING_FAULT, K.FELL_BACK])
def test_incident_condition_lasts_until_resolved_across_controllers(
    kind: IncidentKind,
) -> None:
    incident, type_ = Incident(id=1, kind=kind, message="as it is", count=3), report_change.event_reason(kind)
    run, events = report_reasons(training(), report(incidents=[incident]))
    assert events == [type_]
    for each in (run, reconciled(reloaded(run))):
        assert "as it is (3 times)" in by_type(each)[type_].message
        assert is_true(each, type_)
    restored = Incident(id=2, kind=K.RESTORED, attempt=2)
    resolved = apply_report(run, report(attempt=2, incidents=[incident, restored]))
    assert not is_true(resolved, type_), (
        "an incident that is sent again until its Event is recorded is not a new one"
    )


def test_restore_fallback_is_a_problem_until_the_next_restore() -> None:
    incidents = [Incident(id=1, kind=K.FELL_BACK, attempt=2), Incident(id=2, kind=K.RESTORED, attempt=2)]
    run = apply_report(training(), report(attempt=2, incidents=incidents))
    assert is_true(run, "FellBack")
    later = [Incident(id=3, kind=K.RESTORED, attempt=3)]
    assert not is_true(apply_report(run, report(attempt=3, incidents=later)), "FellBack")


def test_first_report_after_controller_start_clears_no_condition() -> None:
    run = watched_run.with_job(WatchedRun(workload=TRAIN), job(), NOW_S)
    fields: dict[str, Any] = {"run": f"{RUN}-1", "attempt": 3, "seq": 2}
    run = apply_report(seen(run, pod(index="1")), report(**fields, incidents=[Incident(id=1, kind=K.FENCED)]))
    run = apply_report(restarted(run), report(**fields))
    assert is_true(run, "Fenced")
    assert not is_true(apply_report(run, report(**fields | {"attempt": 4})), "Fenced")


def test_fencing_of_a_replaced_trainer_is_an_event_but_no_problem() -> None:
    """A node returns with its old pod, whose attempt has ended. Attempts of different parts are not compared."""
    run = apply_report(seen(training(), pod(uid="p-2")), report("p-2", seq=1, attempt=2))
    run, events = report_reasons(run, report(ranks=(), incidents=[Incident(id=1, kind=K.FENCED)]))
    assert (events, is_true(run, "Fenced")) == (["Fenced"], False)
    run = watched_run.with_job(WatchedRun(workload=TRAIN), job(), NOW_S)
    for n, attempt in ((0, 5), (1, 1)):
        run = apply_report(
            seen(run, pod(uid=f"p-{n}", index=str(n))), report(f"p-{n}", run=f"{RUN}-{n}", attempt=attempt)
        )
    run = apply_report(run, report("p-1", run=f"{RUN}-1", incidents=[Incident(id=1, kind=K.FENCED)]))
    assert is_true(run, "Fenced")
    assert not is_true(apply_report(run, report("p-1", run=f"{RUN}-1", seq=2)), "Fenced"), (
        "the run commits again"
    )


def test_displaced_workload_stays_fenced_until_it_trains_again() -> None:
    """Its trainer has ended (no attempt is open), and its sidecar sees new commits of the other workload."""
    incident = Incident(id=1, kind=K.FENCED, cause="taken_over")
    displaced: dict[str, Any] = {"attempt": 0, "attempts_opened": 1}
    run = apply_report(
        training(), report(newest=pb.Commit(seq=5, attempt=4), incidents=[incident], **displaced)
    )
    assert is_true(run, "Fenced")
    run = apply_report(run, report(newest=pb.Commit(seq=8, attempt=4), **displaced))
    assert is_true(run, "Fenced")
    assert not is_true(apply_report(run, report(attempt=9)), "Fenced"), "its own attempt is open again"


# -- progress ----------------------------------------------------------------------------------------------------------


def test_exited_trainer_had_trained_up_to_its_commit() -> None:
    """The last save may end between two reports. The sidecar's last report then has the commit and no rank."""
    left: dict[str, Any] = {"phase": At.CLOSED, "attempt": 0, "ranks": (), "attempts_opened": 1}
    run = apply_report(training(step=2749), report(newest=pb.Commit(seq=2, attempt=1, step=3000), **left))
    assert (run.progress.step, run.progress.last_step) == (3000, 3000)
    run = apply_report(
        run, report(newest=pb.Commit(seq=3, attempt=4, step=9000), **left)
    )  # of another workload
    assert run.progress.step == 3000
    older = pb.Commit(seq=5, attempt=1, step=3000)  # another attempt began at an older checkpoint
    run = apply_report(training(step=3001), report(newest=older, step=2100, attempt=2))
    assert apply_report(run, report(newest=older, ranks=(), attempt=0)).progress.step == 2100


def test_older_commit_counts_after_a_rewind() -> None:
    run = training(seq=9)
    assert apply_report(run, report(seq=5)).progress.last_seq == 9
    run = apply_report(run, report(seq=5, attempt=2), NOW_S + 5)
    assert (run.progress.last_seq, run.progress.last_commit_at_s) == (5, NOW_S)


def test_independent_pods_show_slowest_step_and_oldest_checkpoint() -> None:
    run = watched_run.with_job(WatchedRun(workload=TRAIN), job(), NOW_S)
    for n, (step, age_s) in enumerate(((3000, 0.0), (1500, 50.0))):
        run = seen(run, pod(uid=f"p-{n}", index=str(n)))
        run = apply_report(run, report(f"p-{n}", run=f"{RUN}-{n}", step=step, seq=n + 1, age_s=age_s))
    progress = run.progress
    assert (progress.step, progress.last_seq, progress.last_commit_at_s) == (1500, 2, NOW_S - 50)


@pytest.mark.parametrize("skew_s", [-86400.0, 0.0, 86400.0])
def test_clock_skew_does_not_affect_staleness(skew_s: float) -> None:
    """The controller's own clock measures from the moment at which the commit's number increases."""

    def stale(run: WatchedRun, seq: int, at_s: float) -> bool:
        return is_true(apply_report(run, report(seq=seq, age_s=max(skew_s, 0)), at_s), "Stale")

    run = training(seq=0)
    for n in range(1, 4):
        run = apply_report(run, report(seq=n, age_s=max(skew_s, 0.0)), NOW_S + 60 * n)
        assert (is_true(run, "Stale"), run.progress.last_commit_at_s) == (False, NOW_S + 60 * n)
    for each in (run, restarted(run, NOW_S + 180)):
        assert [stale(each, 3, NOW_S + 180 + after_s) for after_s in (179, 181)] == [False, True]
        assert not stale(each, 4, NOW_S + 180 + 181)


def test_commit_of_an_earlier_run_keeps_its_age() -> None:
    """With `run-id` the first report of a run may name the commit of another Job, a week old."""
    run = seen(watched_run.with_job(WatchedRun(workload=TRAIN), job(), NOW_S))
    run = apply_report(run, report(run=""))
    assert apply_report(run, report(seq=7, age_s=604800.0)).progress.last_commit_at_s == NOW_S - 604800


def test_newest_checkpoints_keep_their_first_reported_time() -> None:
    def kept(*checkpoints: tuple[int, float]) -> tuple[KeptCheckpoint, ...]:
        return tuple(KeptCheckpoint(seq=seq, step=seq * 10, age_s=age_s) for seq, age_s in checkpoints)

    run = training(seq=5, checkpoints=kept((3, 200.0), (5, 0.0)), checkpoint_count=2)
    run = apply_report(
        restarted(run), report(seq=7, checkpoints=kept((3, 260.9), (5, 61.2), (7, 1.0))), NOW_S + 60
    )
    listed = run_record.status(run, NOW_S + 60)["newestCheckpoints"]
    assert [(each["seq"], seconds_of(each["time"]) - NOW_S) for each in listed] == [
        (7, 60),
        (5, 0),
        (3, -200),
    ]


def test_run_name_of_a_sidecar_does_not_change_its_part() -> None:
    run = training()
    for n in range(9):
        run = apply_report(run, report(run=f"team/x-{n}"))
    assert set(run.parts) == {""}


# -- conditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "type_"),
    [
        ({"credentials_ok": False}, "CredentialsMissing"),
        ({"store_ok": False}, "StoreUnavailable"),
        ({"consecutive_save_failures": 2}, "SavesFailing"),
        ({"save_blocked": "ranks differ (rank 3)"}, "Stale"),
    ],
)
def test_reported_problem_degrades_the_run_until_resolved(fields: dict[str, Any], type_: str) -> None:
    run = apply_report(training(), report(seq=1, **fields))
    assert (run.phase, is_true(run, type_), is_true(run, "Ready")) == (Phase.DEGRADED, True, False)
    unreported, run_events = reconcile.reconcile(restarted(run), NODES, NOW_S)
    assert (unreported.phase, is_true(unreported, type_), run_events) == (Phase.DEGRADED, True, ())
    run = apply_report(run, report(seq=1))
    assert (run.phase, is_true(run, type_), is_true(run, "Ready")) == (Phase.TRAINING, False, True)


def test_checkpoint_becomes_stale_by_time_and_is_reported_once() -> None:
    run, run_events = reconcile.reconcile(
        apply_report(training(), report(seq=1), NOW_S + 100), NODES, NOW_S + 179
    )
    assert not run_events
    run, run_events = reconcile.reconcile(run, NODES, NOW_S + 181)
    assert ([each.reason for each in run_events], run.phase) == (["CheckpointStale"], Phase.DEGRADED)
    for each in (run, restarted(run, NOW_S + 185)):  # a new controller without reports does not repeat it
        repeated, run_events = reconcile.reconcile(each, NODES, NOW_S + 190)
        later, event_reasons = report_reasons(repeated, report(seq=1), NOW_S + 191)
        assert (run_events, event_reasons, is_true(later, "Stale")) == ((), [], True)
    assert not is_true(apply_report(run, report(seq=2), NOW_S + 192), "Stale")


@pytest.mark.parametrize(("every_s", "limit_s"), [(300.0, 910.0), (5.0, reconcile.MIN_STALE_S), (0.0, 1e9)])
def test_checkpoint_is_stale_after_three_intervals_with_a_minimum(every_s: float, limit_s: float) -> None:
    fields: dict[str, Any] = {
        "policy": pb.Policy(every_s=every_s, encoding="q8"),
        "newest": pb.Commit(seq=1, attempt=1, durable_s=10.0),
    }
    run = training(**fields)
    for after_s, stale in ((limit_s - 1, False), (limit_s + 1, every_s > 0)):
        assert is_true(apply_report(run, report(**fields), NOW_S + after_s), "Stale") == stale


def test_run_with_silent_sidecars_keeps_its_phase_and_is_not_stale() -> None:
    for each in (training(), restarted(training())):
        assert is_true(reconciled(each, NOW_S + 1), "Ready"), "a controller start does not change it"
        run = reconciled(reconciled(each, NOW_S + 1), NOW_S + 3600)
        assert (run.phase, by_type(run)["Ready"].status) == (Phase.TRAINING, "Unknown")
        assert not is_true(run, "Stale")


def test_pod_on_a_lost_node_trains_only_if_it_reports_later() -> None:
    """The pod is not yet evicted. Earlier reports prove nothing; a later report shows that only the kubelet is lost."""
    run = training()
    assert reconcile.reconcile(run, LOST, NOW_S + 2)[0].phase is Phase.RECOVERING
    run, _ = report_change.with_report(run, report(seq=1), NOW_S + 3)
    assert reconcile.reconcile(run, LOST, NOW_S + 3)[0].phase is Phase.TRAINING


@pytest.mark.parametrize("stuck", [True, False])
def test_pod_stuck_on_a_lost_node_is_reported_with_remedies(stuck: bool) -> None:
    run = watched_run.with_job(training(), job(replaces_lost=not stuck), NOW_S)
    run = seen(run, pod(terminating_at_s=NOW_S), node_ready=False)
    assert not is_true(reconcile.reconcile(run, LOST, NOW_S + 5)[0], "StuckOnLostNode")
    run, run_events = reconcile.reconcile(run, LOST, NOW_S + 15)
    assert is_true(run, "StuckOnLostNode") == stuck
    assert [each.reason for each in run_events] == (["StuckOnLostNode"] if stuck else [])
    for remedy in ("kubectl delete node node-a", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"):
        assert not stuck or remedy in run_events[0].message
    assert not is_true(reconciled(run, NOW_S + 20), "StuckOnLostNode")


DECIDED = Decision(subject="interval", goal="auto", value="3 min", proposed="3 min", why="a save costs 0.5 s")


def decided(**changes: str) -> tuple[Decision, ...]:
    return (Decision(**{field.name: value for field, value in DECIDED.ListFields()} | changes),)


def test_changed_decision_is_shown_and_reported() -> None:
    run = training(decisions=(DECIDED,))
    assert run.progress.decisions == (DECIDED,)
    later = decided(value="5 min", why="a save costs 1.5 s")
    run, _ = report_change.with_report(restarted(run), report(decisions=later), NOW_S)
    run, run_events = reconcile.reconcile(run, NODES, NOW_S)
    assert [(each.reason, each.message, each.warning) for each in run_events] == [
        ("IntervalChanged", "interval: 3 min -> 5 min; a save costs 1.5 s", False)
    ]
    for unchanged in (decided(value="5 min", proposed="9 min"), ()):  # a new pod has decided nothing yet
        run, events = report_reasons(run, report(decisions=unchanged))
        assert not events
    assert run.progress.decisions[0].proposed == "9 min"


def test_unreachable_goal_is_a_condition_and_an_event() -> None:
    run, events = report_reasons(training(), report(seq=1, decisions=decided(unreachable="cannot be had")))
    assert (events, run.phase) == (["GoalUnreachable"], Phase.TRAINING)
    assert is_true(run, "GoalUnreachable")
    assert not is_true(apply_report(run, report(seq=1, decisions=decided())), "GoalUnreachable")


def test_a_crash_loop_is_a_condition_until_something_is_committed() -> None:
    run = training()
    for n in range(1, 4):
        end = replace(ended(1), at_s=NOW_S + n * CRASH_WINDOW_S)
        run = seen(run, pod(restarts=n, ending=end))
    run, run_events = reconcile.reconcile(run, NODES, NOW_S + 1)
    assert [each.reason for each in run_events] == ["CrashLooping"]
    assert "container trainer ended with exit code 1, 3 times" in run_events[0].message
    run = reconciled(restarted(run), NOW_S + 2)
    assert is_true(run, "CrashLooping"), "a new controller resumes the count"
    assert not is_true(apply_report(run, report(seq=2, attempt=2), NOW_S + 3), "CrashLooping")


# -- the workload's end ------------------------------------------------------------------------------------------------


def test_jobset_finishes_with_all_its_jobs_and_may_restart() -> None:
    workload = Workload(namespace="team", kind="JobSet", name="set", uid="s-1")

    def finished(at_s: float = NOW_S, **changes: Any) -> str:
        jobs = job(uid="j-1", outcome="Completed", ended_at_s=NOW_S), job(uid="j-2", **changes)
        return reconciled(
            WatchedRun(workload=workload, jobs={each.uid: each for each in jobs}), at_s
        ).finished

    failed: dict[str, Any] = {"outcome": "Failed", "ended_at_s": NOW_S}
    assert [finished(), finished(NOW_S + 1, **failed)] == ["", ""]
    assert finished(NOW_S + reconcile.JOBSET_RESTART_GRACE_S, **failed) == "Failed"
    assert finished(outcome="Completed", ended_at_s=NOW_S) == "Completed"


def test_statefulset_ends_long_after_its_last_pod_and_may_restart() -> None:
    workload = Workload(namespace="team", kind="StatefulSet", name="set", uid="s-1")
    run = seen(WatchedRun(workload=workload), pod(workload=workload, job_uid=""))
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S)
    assert not reconciled(run, NOW_S + 60).finished
    run = reconciled(run, NOW_S + ABSENT_S)
    assert run.finished == "Deleted"
    assert not reconciled(seen(run, pod(uid="p-2", workload=workload, job_uid="")), NOW_S + 5000).finished


def test_pytorch_job_finishes_when_all_existing_pods_succeeded() -> None:
    """The operator may replace a failed pod. Workers may be cleaned up before the master."""
    workload = Workload(
        namespace="team", kind="PyTorchJob", name="r", uid="s-1", api_version="kubeflow.org/v1"
    )

    def ended_as(*phases: str) -> str:
        pods = (pod(uid=f"p-{n}", workload=workload, job_uid="", phase=each) for n, each in enumerate(phases))
        return reconciled(seen(WatchedRun(workload=workload), *pods)).finished

    assert [ended_as("Succeeded", "Running"), ended_as("Failed")] == ["", ""]
    assert [ended_as("Succeeded", "Succeeded"), ended_as("Succeeded")] == ["Completed", "Completed"]


def test_job_annotations_override_pod_annotations() -> None:
    run = seen(WatchedRun(workload=TRAIN), pod(requested=RequestedSettings(policy="fast")))
    assert run.requested.policy == "fast"
    requested = RequestedSettings(policy="fast", run_id="ctr", overrides=(("deltashard.io/interval", "9s"),))
    run = seen(
        watched_run.with_job(run, job(requested=requested), NOW_S),
        pod(requested=RequestedSettings(policy="fast")),
    )
    assert (run.requested, run.run_id) == (requested, "ctr")


def test_training_time_counts_training_phases() -> None:
    run = seen(reconciled(training(), NOW_S + 50), pod(phase="Failed", ending=ended(1)))
    run = reconciled(run, NOW_S + 60)
    assert run.phase is Phase.RECOVERING
    assert reconciled(run, NOW_S + 600).trained_s == 50.0


# -- the API's document ------------------------------------------------------------------------------------------------


def test_every_status_field_round_trips() -> None:
    run = full_run()
    status = run_record.status(run, NOW_S + 50)
    found = reloaded(run, NOW_S + 50)
    assert found.ledger == run.ledger
    assert run_record.status(replace(found, pods=run.pods), NOW_S + 50) == status


def test_long_names_and_labels_are_truncated_and_stay_unique() -> None:
    assert WatchedRun(workload=replace(TRAIN, uid="0b4f3c1e-aaaa")).name == "train-0b4f3c1e"
    long = WatchedRun(workload=replace(TRAIN, name="x" * 60 + ".y", uid="0b4f3c1e-aaaa")).name
    assert (len(long), long[-9:]) == (MAX_NAME, "-0b4f3c1e")
    assert run_record.run_label("ctr") == "ctr"
    labels = {run_record.run_label("x" * 40 + "-" + each * 40) for each in "yz"}
    assert [len(each) <= 63 for each in labels] == [True, True]
