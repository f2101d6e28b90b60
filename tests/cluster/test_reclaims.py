"""The removal of a finished run's checkpoints, where the policy deletes them."""

from __future__ import annotations

import pytest

from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.reference import command_line

pytestmark = pytest.mark.timeout(600, func_only=True)
POLICY = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointpolicies/training"


def test_finished_run_is_deleted_and_pinned_run_kept(bench: ScenarioBench) -> None:
    goes, stays = (bench.job(name, steps=60) for name in ("goes", "stays"))
    for job in (goes, stays):
        job.wait_complete()
        job.wait_phase("Finished")
        assert bench.newest(job) == 60
        assert "reclaim" not in (job.checkpoint_run() or {})["status"], "the policy retains"
    command_line("pin", bench.url, "--run", stays.run, "paper")
    change = {"reclaim": {"policy": "Delete", "after": "0s"}}
    bench.cluster.api.patch(POLICY.format(bench.namespace), {"spec": change})
    said = bench.reclaimed(goes, "Removed")
    assert "1 runs" in said["message"], said
    assert objects(bench, goes) == []
    said = bench.reclaimed(stays, "Kept")
    assert "it has a pin, 'paper'" in said["message"], said
    bench.assert_store_whole(stays)
    removals = [
        each
        for each in bench.cluster.api.items(f"/apis/batch/v1/namespaces/{bench.namespace}/jobs")
        if each["metadata"]["name"].startswith("deltashard-reclaim-")
    ]
    assert len(removals) == 2


def objects(bench: ScenarioBench, job: TrainingJob) -> list[str]:
    found = bench.minio.client().list_objects(bench.bucket, prefix=f"{job.run}/", recursive=True)
    return [str(each.object_name) for each in found]
