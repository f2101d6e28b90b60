"""Several pods that train one run: one of them goes, and all go on from one step, without a person."""

from __future__ import annotations

import pytest

from tests.cluster.scenario.bench import NO_TIMER, Bench
from tests.cluster.scenario.group import TrainingGroup

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_a_pod_of_four(bench: Bench) -> None:
    """Deleted, evicted."""
    group = TrainingGroup(bench, "four", pods=4, nodes="2:4")
    first = group.wait_round(world_size=4)
    bench.wait_commits(group.job, count=2)
    group.wait_step(first.step + 60, attempt=first.attempt)
    group.job.delete_pod(first.pods[2])
    second = group.wait_round(after=first.attempt)
    group.assert_restored(second, at_least=1)
    group.wait_step(second.step + 30, attempt=second.attempt)
    group.assert_every_sample_once()
    import json, time

    print(json.dumps(group.job.checkpoint_run()["status"], indent=1))
    group.job.evict(second.pods[0])
    third = group.wait_round(after=second.attempt)
    group.assert_restored(third, at_least=1)
    group.wait_step(third.step + 30, attempt=third.attempt)
    group.assert_every_sample_once()
    time.sleep(30)
    print(json.dumps(group.job.checkpoint_run()["status"], indent=1))
    group.job.patch({"spec": {"suspend": True}})
    from tests.cluster.kubernetes.process import wait_until

    wait_until(lambda: not group.job.pods(), timeout_s=90, what="gone")
    print(json.dumps(group.job.checkpoint_run()["status"]["phase"], indent=1))
    bench.cluster.kubectl("get", "checkpointruns", "-A")
    group.job.patch({"spec": {"parallelism": 2, "completions": 2, "suspend": False}})
    fourth = group.wait_round(after=third.attempt)
    group.assert_restored(fourth, at_least=1)
    group.wait_step(fourth.step + 30, attempt=fourth.attempt)
    group.assert_every_sample_once()
    time.sleep(5)
    print(json.dumps(group.job.checkpoint_run()["status"], indent=1))
    assert 0, NO_TIMER
