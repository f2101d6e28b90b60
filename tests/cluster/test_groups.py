"""Several pods train one run: after the loss of any pod, all resume from one step without manual action."""

from __future__ import annotations

import pytest

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.group import TrainingGroup, indexed_job

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_pod_group_recovers(bench: ScenarioBench) -> None:
    """One pod is deleted, one evicted, all are suspended and resume as two: each time all share one step, bit for bit.

    Only the notices cause commits: a pod that gets a termination notice makes the whole group save. So at most one
    step is lost.
    """
    group = indexed_job(bench, "four", pods=4, nodes="2:4", notes=NO_TIMER)
    first = group.wait_round(world_size=4)
    group.job.wait_status("all ranks are there", lambda status: status.get("ranks") == "4/4")
    second = remove_pod(group, first.attempt, lambda: group.job.delete_pod(first.pods[2]))
    # torchrun's rendezvous is at pod 0: without it all ranks restart.
    third = remove_pod(group, second, lambda: group.job.evict(group.rounds()[-1].pods[0]))

    group.wait_step(group.rounds()[-1].step + 30, attempt=third)
    group.job.patch({"spec": {"suspend": True}})
    wait_until(lambda: not group.job.pods(), timeout_s=120, what="the suspended pods gone")
    done = group.last_step(third)
    group.job.wait_phase("Pending")
    group.job.patch({"spec": {"parallelism": 2, "completions": 2, "suspend": False}})
    fourth = group.wait_round(after=third, world_size=2)
    group.assert_restored(fourth, at_least=done - 1)
    group.wait_step(fourth.step + 30, attempt=fourth.attempt)
    group.assert_every_sample_once()

    status = group.job.wait_status(
        "both ranks, and every failure is counted",
        lambda status: status.get("ranks") == "2/2" and status["failures"] == 3,
    )
    assert status["phase"] == "Training"
    assert {each["cause"] for each in status["losses"]} >= {"Deleted", "Evicted", "Suspended"}


def remove_pod(group: TrainingGroup, attempt: int, remove: object) -> int:
    """Remove a pod; the whole group saves within its grace period and resumes. Return the next attempt."""
    assert callable(remove)
    began = next(each for each in group.rounds() if each.attempt == attempt)
    group.wait_step(began.step + 40, attempt=attempt)
    remove()
    back = group.wait_round(after=attempt)
    group.bench.note(f"{group.name} had reached step {group.last_step(attempt)}")
    group.assert_restored(back, at_least=group.last_step(attempt) - 1)
    return back.attempt
