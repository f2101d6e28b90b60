"""When a finished run's bytes go, and what keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.policy.workload_policy import Policy
from deltashard_operator.run import reclaim_judgement, run_record, watched_run
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.reclaim import MAX_TRIES, Reclaim, ReclaimState
from deltashard_operator.run.watched_run import Run

from tests.support.operator import sample
from tests.unit.operator.run.observed import NOW_S, TRAIN, pod

JOBSET = Workload(namespace="team", kind="JobSet", name="train", uid="u-1")
URL = "s3://checkpoints/team-a?endpoint=http://minio:9000"


def policy(*, enabled: bool = True, **spec: Any) -> Policy:
    words = {"reclaimPolicy": "Delete", "reclaimAfterSeconds": 60, **spec}
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


@pytest.mark.parametrize("said", [policy(reclaimPolicy="Retain"), sample.policy({})])
def test_nothing_is_removed_unless_the_policy_says_so(said: Policy) -> None:
    assert looked(ended(), said).reclaim is None
    assert reclaim_judgement.looked(ended(), None, continued=False, now_s=NOW_S) is None, "policy is gone"


def test_a_policy_that_retains_again_calls_the_removal_off() -> None:
    assert looked(looked(ended()), policy(reclaimPolicy="Retain")).reclaim is None


@pytest.mark.parametrize(
    ("run", "said", "continued", "why"),
    [
        (ended(), policy(enabled=False), False, "reclaim.enabled is false"),
        (ended(), policy(), True, "another workload"),
        (ended(JOBSET, "Deleted"), policy(), False, "may come back"),
        (ended(), policy(store={"url": "s3://elsewhere"}), False, "names another store"),
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


def test_a_pod_that_lives_is_waited_for() -> None:
    run = looked(ended(pods={"p-1": pod()}), after_s=100)
    assert run.reclaim is not None
    assert "train-x" in run.reclaim.message
    assert not reclaim_judgement.is_due(run, NOW_S + 100)


def test_a_job_that_is_at_work_is_left_to_its_end() -> None:
    run = reclaim_judgement.begun(looked(ended()), "j", NOW_S + 60)
    assert not reclaim_judgement.is_due(run, NOW_S + 1e6)
    assert looked(run, continued=True).reclaim == run.reclaim
    assert looked(run, policy(reclaimPolicy="Retain")).reclaim == run.reclaim


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
