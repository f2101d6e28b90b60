"""When a finished run's bytes go, and what keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.run import judgement, reclaim_judgement, run_record, watched_run
from deltashard_operator.run.observed_object import JobView, Wish, Workload
from deltashard_operator.run.reclaim import MAX_MESSAGE, MAX_TRIES, Reclaim, ReclaimState
from deltashard_operator.run.watched_run import Run

from tests.support.operator import sample
from tests.unit.operator.run.observed import NOW_S, TRAIN, pod

JOBSET = Workload(namespace="team", kind="JobSet", name="train", uid="u-1")
URL = "s3://checkpoints/team-a?endpoint=http://minio:9000"


def policy(*, enabled: bool = True, url: str = "", **reclaim: Any) -> Policy:
    words: dict[str, Any] = {"reclaim": {"policy": "Delete", "after": "60s", **reclaim}}
    words |= {"store": {"url": url}} if url else {}
    return replace(sample.policy(words), reclaims=enabled)


def ended(workload: Workload = TRAIN, how: str = "Completed", **more: Any) -> Run:
    return replace(watched_run.finished(Run(workload=workload), how, NOW_S), store=URL, **more)


def looked(run: Run, said: Policy | None = None, *, continued: bool = False, after_s: float = 0.0) -> Run:
    found = reclaim_judgement.looked(run, said or policy(), continued=continued, now_s=NOW_S + after_s)
    return replace(run, reclaim=found)


def test_the_bytes_go_when_the_grace_is_over() -> None:
    run = looked(ended())
    assert run.reclaim is not None
    assert run.reclaim.state is ReclaimState.WAITING
    assert run.reclaim.due_s == NOW_S + 60
    assert run.reclaim.pending
    assert not reclaim_judgement.is_due(run, NOW_S + 59)
    assert reclaim_judgement.is_due(looked(run, after_s=60), NOW_S + 60)


@pytest.mark.parametrize("run", [Run(workload=TRAIN), Run(workload=JOBSET)])
def test_nothing_is_removed_of_what_is_not_over(run: Run) -> None:
    assert looked(run).reclaim is None


@pytest.mark.parametrize("said", [policy(policy="Retain"), sample.policy({})])
def test_nothing_is_removed_unless_the_policy_says_so(said: Policy) -> None:
    assert looked(ended(), said).reclaim is None
    assert reclaim_judgement.looked(ended(), None, continued=False, now_s=NOW_S) is None, "policy is gone"


def test_a_policy_that_retains_again_calls_the_removal_off() -> None:
    assert looked(looked(ended()), policy(policy="Retain")).reclaim is None


@pytest.mark.parametrize(
    ("run", "said", "continued", "why"),
    [
        (ended(), policy(enabled=False), False, "reclaim.enabled is false"),
        (ended(), policy(), True, "another workload"),
        (ended(JOBSET, "Deleted"), policy(), False, "may come back"),
        (ended(), policy(url="s3://elsewhere"), False, "names another store"),
        (replace(ended(), store=""), policy(), False, "no sidecar has said"),
        (
            ended(jobs={"j": JobView(uid="j", name="j", workload=TRAIN, wish=Wish())}),
            policy(),
            False,
            "not ended",
        ),
    ],
)
def test_what_speaks_against_it_keeps_the_bytes(run: Run, said: Policy, continued: bool, why: str) -> None:
    found = looked(run, said, continued=continued, after_s=1000).reclaim
    assert found is not None
    assert found.state is ReclaimState.KEPT
    assert why in found.message
    assert not found.pending
    assert not reclaim_judgement.is_due(replace(run, reclaim=found), NOW_S + 1e9)


def test_what_spoke_against_it_may_be_over() -> None:
    run = looked(ended(), continued=True)
    run = looked(run, after_s=100)
    assert run.reclaim is not None
    assert run.reclaim.state is ReclaimState.WAITING
    assert reclaim_judgement.is_due(run, NOW_S + 100)


def test_a_jobset_whose_jobs_ended_is_over() -> None:
    run = looked(ended(JOBSET, "Failed"), after_s=100)
    assert reclaim_judgement.is_due(run, NOW_S + 100)


def jobset_job(uid: str, outcome: str = "", at_s: float = 0.0, **more: Any) -> JobView:
    return JobView(uid=uid, name=uid, workload=JOBSET, wish=Wish(), outcome=outcome, ended_at_s=at_s, **more)


def test_a_jobset_that_was_restarted_and_waits_in_a_queue_is_not_over() -> None:
    """Its new Jobs are suspended and have no pods, by which it would be known to have begun anew."""
    run = Run(workload=JOBSET, store=URL, jobs={"a": jobset_job("a", "Failed", NOW_S)})
    run, _ = judgement.judged(run, {}, NOW_S + 61)
    assert run.finished == "Failed"
    run = replace(run, jobs={"b": jobset_job("b", suspended=True)})
    run, _ = judgement.judged(run, {}, NOW_S + 1000)
    assert not reclaim_judgement.is_due(looked(run, after_s=1000), NOW_S + 1000)


def test_a_jobset_between_two_deletions_of_its_restart_has_not_ended_long_ago() -> None:
    done_s = NOW_S - 2 * 86400
    jobs = {"prep": jobset_job("prep", "Completed", done_s), "work": jobset_job("work", "Failed", NOW_S)}
    run, _ = judgement.judged(Run(workload=JOBSET, jobs=jobs, store=URL), {}, NOW_S)
    assert not run.finished
    run = watched_run.without_job(run, "work", NOW_S + 1)
    run, _ = judgement.judged(run, {}, NOW_S + 1)
    run = looked(run, policy(after="24h"), after_s=2)
    assert not reclaim_judgement.is_due(run, NOW_S + 2)


def test_a_pod_that_is_on_its_way_out_is_waited_for() -> None:
    run = looked(ended(pods={"p-1": pod(terminating_at_s=NOW_S + 120)}), after_s=100)
    assert not reclaim_judgement.is_due(run, NOW_S + 100)


def test_a_longer_grace_counts_after_a_failure_too() -> None:
    run = reclaim_judgement.begun(looked(ended(), after_s=60), "j", NOW_S + 60)
    run, _ = reclaim_judgement.ended(run, ReclaimState.FAILED, "no store", NOW_S + 70)
    later_s = 70 + reclaim_judgement.AGAIN_S
    run = looked(run, policy(after="8760h"), after_s=later_s)
    assert not reclaim_judgement.is_due(run, NOW_S + later_s)
    assert run.reclaim is not None
    assert run.reclaim.tries == 1


def test_what_speaks_against_it_after_a_failure_may_be_over_too() -> None:
    run = reclaim_judgement.begun(looked(ended(), after_s=60), "j", NOW_S + 60)
    run, _ = reclaim_judgement.ended(run, ReclaimState.FAILED, "no store", NOW_S + 70)
    run = looked(run, policy(enabled=False), after_s=100)
    run = looked(run, policy(), after_s=1000)
    assert reclaim_judgement.is_due(run, NOW_S + 1000)


def test_a_policy_that_cannot_be_used_any_more_keeps_what_was_to_go() -> None:
    kept = reclaim_judgement.looked(looked(ended()), None, objection="unusable", now_s=NOW_S + 1000)
    assert kept is not None
    assert kept.state is ReclaimState.KEPT
    assert reclaim_judgement.looked(ended(), None, objection="unusable", now_s=NOW_S) is None, "it may retain"


def test_failures_without_a_job_count_too() -> None:
    run = looked(ended(), after_s=60)
    for _ in range(MAX_TRIES):
        run, _ = reclaim_judgement.ended(run, ReclaimState.FAILED, "another's Job", NOW_S)
    assert run.reclaim is not None
    assert not run.reclaim.pending


def test_a_sentence_fits_the_status() -> None:
    run = looked(replace(ended(), store="s3://b/" + "x" * 2000))
    assert run.reclaim is not None
    assert len(run.reclaim.message) == MAX_MESSAGE


def test_a_pod_that_lives_is_waited_for() -> None:
    run = looked(ended(pods={"p-1": pod()}), after_s=100)
    assert run.reclaim is not None
    assert "train-x" in run.reclaim.message
    assert not reclaim_judgement.is_due(run, NOW_S + 100)


def test_a_job_that_is_at_work_is_left_to_its_end() -> None:
    run = reclaim_judgement.begun(looked(ended()), "j", NOW_S + 60)
    assert not reclaim_judgement.is_due(run, NOW_S + 1e6)
    assert looked(run, continued=True).reclaim == run.reclaim
    assert looked(run, policy(policy="Retain")).reclaim == run.reclaim


def test_a_failure_is_tried_again_and_not_for_ever() -> None:
    run, now_s = looked(ended()), NOW_S + 60
    for n in range(1, MAX_TRIES + 1):
        assert reclaim_judgement.is_due(run, now_s)
        run = reclaim_judgement.begun(run, "j", now_s)
        run, notice = reclaim_judgement.ended(run, ReclaimState.FAILED, "no store", now_s)
        assert notice.warning
        assert run.reclaim is not None
        assert run.reclaim.tries == n
        assert run.reclaim.pending == (n < MAX_TRIES)
        assert not reclaim_judgement.is_due(run, now_s), "not at once"
        now_s += reclaim_judgement.AGAIN_S
        run = looked(run, after_s=now_s - NOW_S)
    assert "the last" in notice.message
    assert not reclaim_judgement.is_due(run, now_s + 1e9)


@pytest.mark.parametrize("state", [ReclaimState.REMOVED, ReclaimState.KEPT])
def test_a_job_s_word_is_the_last(state: ReclaimState) -> None:
    run = reclaim_judgement.begun(looked(ended()), "j", NOW_S + 60)
    run, notice = reclaim_judgement.ended(run, state, "so it is", NOW_S + 70)
    assert notice.warning == (state is ReclaimState.KEPT)
    again = looked(run, after_s=1e6)
    assert again.reclaim == run.reclaim
    assert not reclaim_judgement.is_due(again, NOW_S + 1e6)


def test_it_survives_in_the_status() -> None:
    run = replace(
        ended(), reclaim=Reclaim(state=ReclaimState.FAILED, since_s=5, message="m", due_s=9, tries=2)
    )
    document = run_record.document(run)
    found = run_record.run_of({**document, "status": run_record.status(run, NOW_S)})
    assert found.reclaim == run.reclaim
    assert found.store == URL


def test_a_state_of_a_newer_controller_removes_nothing_and_forgets_nothing() -> None:
    run = replace(ended(), reclaim=Reclaim(state=ReclaimState.WAITING, since_s=5, message="m"))
    document = {**run_record.document(run), "status": run_record.status(run, NOW_S)}
    document["status"]["reclaim"]["state"] = "Paused"
    found = run_record.run_of(document)
    assert found.reclaim is not None
    assert found.reclaim.state is ReclaimState.KEPT
    assert found.finished
