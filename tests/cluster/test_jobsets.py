"""A group as a JobSet, whose own controller runs in the cluster: when it begins all of its Jobs anew, they go on with its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenario import jobset
from tests.cluster.scenario.bench import NO_TIMER, Bench
from tests.cluster.scenario.group import jobset as group_of_jobset

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_a_jobset_that_restarts_keeps_its_run(bench: Bench, tmp_path: Path) -> None:
    """A pod is evicted, so its Job fails, and the JobSet makes another one, with another UID, of all of its pods."""
    jobset.install(bench.cluster, tmp_path)
    bench.note("the JobSet controller answers")
    group = group_of_jobset(bench, "pair", pods=2, notes=NO_TIMER)
    first = group.wait_round(world_size=2)
    group.wait_status("both are there", lambda status: status.get("ranks") == "2/2")
    job = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs/pair-workers-0"
    before = bench.cluster.api.get(job)["metadata"]["uid"]
    group.wait_step(first.step + 40, attempt=first.attempt)
    group.job.evict(first.pods[1])
    second = group.wait_round(after=first.attempt, world_size=2)
    assert bench.cluster.api.get(job)["metadata"]["uid"] != before, "the JobSet restarted"
    assert not set(second.pods) & set(first.pods)
    group.assert_restored(second, at_least=group.last_step(first.attempt) - 1)
    group.wait_step(second.step + 30, attempt=second.attempt)
    group.assert_every_sample_once()
    status = group.wait_status(
        "the eviction is counted", lambda status: status.get("settledOpenings") == 2, timeout_s=180
    )
    assert (status["ranks"], status["failures"]) == ("2/2", 1)
    assert [(each["cause"], each["lossy"]) for each in status["interruptions"]] == [("Evicted", 0)]
    runs = bench.cluster.api.items(
        f"/apis/deltashard.io/v1alpha1/namespaces/{bench.namespace}/checkpointruns"
    )
    assert [each["spec"]["workload"]["kind"] for each in runs] == ["JobSet"]
