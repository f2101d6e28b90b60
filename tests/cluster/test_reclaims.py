"""The removal of a finished run's checkpoints, where the policy deletes them."""

from __future__ import annotations

import pytest

from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.reference import command_line

pytestmark = pytest.mark.timeout(600, func_only=True)
POLICY = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointpolicies/training"


def test_finished_run_is_deleted_unless_pinned(bench: ScenarioBench) -> None:
    deleted, pinned = (bench.job(name, steps=60) for name in ("deleted", "pinned"))
    for job in (deleted, pinned):
        job.wait_complete()
        job.wait_phase("Finished")
        assert bench.newest(job) == 60
        assert "reclaim" not in (job.checkpoint_run() or {})["status"], "the policy retains"
    command_line("pin", bench.url, "--run", pinned.run, "paper")
    change = {"reclaim": {"policy": "Delete", "after": "0s"}}
    bench.cluster.api.patch(POLICY.format(bench.namespace), {"spec": change})
    status = bench.reclaimed(deleted, "Removed")
    assert "1 runs" in status["message"], status
    assert objects(bench, deleted) == []
    status = bench.reclaimed(pinned, "Kept")
    assert "it has a pin, 'paper'" in status["message"], status
    bench.assert_store_whole(pinned)
    removals = [
        each
        for each in bench.cluster.api.items(f"/apis/batch/v1/namespaces/{bench.namespace}/jobs")
        if each["metadata"]["name"].startswith("deltashard-reclaim-")
    ]
    assert len(removals) == 2


def objects(bench: ScenarioBench, job: TrainingJob) -> list[str]:
    found = bench.minio.client().list_objects(bench.bucket, prefix=f"{job.run}/", recursive=True)
    return [str(each.object_name) for each in found]
