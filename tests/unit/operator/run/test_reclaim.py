"""When the checkpoints of a finished run are removed, and what retains them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.run import reclaim, reconcile, run_record, watched_run
from deltashard_operator.run.observed_object import ABSENT_S, JobView, RequestedSettings, Workload
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.operator import sample
from tests.unit.operator.run.observed import NOW_S, TRAIN, pod

JOBSET = Workload(namespace="team", kind="JobSet", name="train", uid="u-1")
URL = "s3://checkpoints/team-a?endpoint=http://minio:9000"
WAITING, REMOVING, REMOVED, KEPT, FAILED = ReclaimState


def policy(*, enabled: bool = True, url: str = "", **fields: Any) -> Policy:
    spec: dict[str, Any] = {"reclaim": {"policy": "Delete", "after": "60s", **fields}}
    spec |= {"store": {"url": url}} if url else {}
    return replace(sample.policy(spec), can_reclaim=enabled)


DELETES, RETAINS = policy(), policy(policy="Retain")
UNUSABLE = Refusal("BadPolicy", "it is malformed")


def ended(workload: Workload = TRAIN, how: str = "Completed", **more: Any) -> WatchedRun:
    return replace(watched_run.finished(WatchedRun(workload=workload), how, NOW_S), **{"store": URL, **more})


def reconciled(
    run: WatchedRun, used_policy: Policy | Refusal | None = DELETES, after_s: float = 0.0, **facts: Any
) -> WatchedRun:
    return replace(run, reclaim=reclaim.reconcile(run, used_policy, now_s=NOW_S + after_s, **facts))


def moved(run: WatchedRun, state: ReclaimState) -> WatchedRun:
    return replace(run, reclaim=reclaim.with_state(run.reclaim, state, "as the Job reported", NOW_S + 60))


def state(run: WatchedRun) -> tuple[ReclaimState, bool] | None:
    return None if run.reclaim is None else (run.reclaim.state, run.reclaim.ready)


def job(uid: str, outcome: str = "", at_s: float = 0.0, **more: Any) -> JobView:
    return JobView(
        uid=uid,
        name=uid,
        workload=JOBSET,
        requested=RequestedSettings(),
        outcome=outcome,
        ended_at_s=at_s,
        **more,
    )


def test_bytes_are_removed_after_the_grace_period() -> None:
    run = reconciled(ended())
    assert run.reclaim == Reclaim(
        state=WAITING,
        since_s=NOW_S,
        message="the bytes are removed when the grace period ends",
        due_s=NOW_S + 60,
    )
    assert [state(reconciled(run, after_s=after_s)) for after_s in (59, 60)] == [
        (WAITING, False),
        (WAITING, True),
    ]
    jobset = ended(JOBSET, "Failed", last_seen_s=NOW_S)
    assert state(reconciled(jobset, after_s=100)) == (WAITING, False), "its Jobs may be recreated"
    assert state(reconciled(jobset, after_s=ABSENT_S)) == (WAITING, True)


@pytest.mark.parametrize(
    ("run", "used_policy"),
    [
        (WatchedRun(workload=TRAIN, store=URL), DELETES),
        (ended(), RETAINS),
        (ended(), sample.policy({})),
        (ended(), None),
        (ended(), UNUSABLE),
        (reconciled(ended()), RETAINS),
    ],
)
def test_live_or_retained_runs_are_not_removed(run: WatchedRun, used_policy: Policy | Refusal | None) -> None:
    assert reconciled(run, used_policy, after_s=1000).reclaim is None


@pytest.mark.parametrize(
    ("run", "used_policy", "facts", "why"),
    [
        (ended(), policy(enabled=False), {}, "reclaim.enabled is false"),
        (ended(), DELETES, {"continued": True}, "another workload"),
        (ended(JOBSET, "Deleted"), DELETES, {}, "cannot determine"),
        (ended(), policy(url="s3://elsewhere"), {}, "no longer names"),
        (ended(store=""), DELETES, {}, "no sidecar has reported"),
        (ended(jobs={"j": job("j")}), DELETES, {}, "not ended"),
        (reconciled(ended()), UNUSABLE, {}, "cannot be used"),
        (moved(reconciled(ended()), FAILED), policy(enabled=False), {}, "reclaim.enabled is false"),
    ],
)
def test_blocking_conditions_delay_removal(
    run: WatchedRun, used_policy: Policy | Refusal, facts: dict[str, Any], why: str
) -> None:
    found = reconciled(run, used_policy, 1000, **facts)
    assert state(found) == (KEPT, False)
    assert found.reclaim is not None
    assert (why in found.reclaim.message, found.reclaim.pending) == (True, False)
    assert state(reconciled(replace(ended(), reclaim=found.reclaim), after_s=1000)) == (WAITING, True)


@pytest.mark.parametrize("last", [KEPT, FAILED])
def test_outcome_is_kept_until_a_retry_is_allowed(last: ReclaimState) -> None:
    """A new controller has just seen the workload and waits again."""
    run = replace(moved(reconciled(ended(JOBSET, last_seen_s=NOW_S)), last), last_seen_s=NOW_S + 1000)
    assert state(reconciled(reconciled(run, after_s=1000), after_s=1010)) == (last, False)
    assert state(reconciled(run, after_s=1000 + ABSENT_S)) == (WAITING, True)
    assert state(reconciled(run, policy(enabled=False), 1000)) == (KEPT, False)


@pytest.mark.parametrize("left", [pod(), pod(terminating_at_s=NOW_S + 120)])
def test_removal_waits_for_the_last_pod(left: Any) -> None:
    run = reconciled(ended(pods={"p-1": left}), after_s=100)
    assert state(run) == (WAITING, False)
    assert "train-x" in (run.reclaim.message if run.reclaim else "")


def test_restarted_queued_jobset_is_not_finished() -> None:
    """Its new Jobs are suspended and have no pods that would show the restart."""
    run = WatchedRun(workload=JOBSET, store=URL, jobs={"a": job("a", "Failed", NOW_S)})
    run, _ = reconcile.reconcile(run, {}, NOW_S + 61)
    assert run.finished == "Failed"
    run = replace(run, jobs={"b": job("b", suspended=True)})
    run, _ = reconcile.reconcile(run, {}, NOW_S + 1000)
    assert state(reconciled(run, after_s=1000)) in {None, (KEPT, False)}


def test_jobset_in_the_middle_of_a_restart_has_not_ended() -> None:
    jobs = {
        "prep": job("prep", "Completed", NOW_S - 2 * 86400),
        "work": job("work", "Failed", NOW_S),
    }
    run, _ = reconcile.reconcile(WatchedRun(workload=JOBSET, jobs=jobs, store=URL), {}, NOW_S)
    assert not run.finished
    run, _ = reconcile.reconcile(watched_run.without_job(run, "work", NOW_S + 1), {}, NOW_S + 1)
    assert state(reconciled(run, policy(after="24h"), 2)) != (WAITING, True)


@pytest.mark.parametrize("last", [REMOVING, REMOVED])
def test_removal_job_state_is_final(last: ReclaimState) -> None:
    run = moved(reconciled(ended()), last)
    for used_policy, facts in ((DELETES, {"continued": True}), (RETAINS, {}), (UNUSABLE, {})):
        assert reconciled(run, used_policy, 1e6, **facts) == run


@pytest.mark.parametrize("known", [True, False])
def test_reclaim_state_round_trips_through_the_status(known: bool) -> None:
    """The state of a newer controller removes nothing and is preserved."""
    run = ended(reclaim=Reclaim(state=FAILED, since_s=5, message="m", due_s=9))
    document = {**run_record.document(run), "status": run_record.status(run, NOW_S)}
    if not known:
        document["status"]["reclaim"]["state"] = "Paused"
    found = run_record.run_of(document)
    assert found.finished
    assert found.reclaim == (run.reclaim if known else replace(run.reclaim, state=KEPT))  # type: ignore[type-var]
