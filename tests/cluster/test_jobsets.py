"""A group as a JobSet, and as a TrainJob, from which Kubeflow makes a JobSet; both controllers run in the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenario import jobset, kubeflow
from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.group import TrainingGroup
from tests.cluster.scenario.group import jobset as group_of_jobset
from tests.cluster.scenario.kubeflow_group import train_job

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_restarted_jobset_keeps_run(bench: ScenarioBench, tmp_path: Path) -> None:
    jobset.install(bench.cluster, tmp_path)
    bench.note("the JobSet controller is installed")
    group = group_of_jobset(bench, "pair", pods=2, notes=NO_TIMER)
    before, after, pods = recover_evicted_pod(group, f"{group.name}-workers-0")
    assert before != after, "the JobSet restarted"
    assert pods == 0, "a pod was not replaced"


def test_train_job_recovers_evicted_pod(bench: ScenarioBench, tmp_path: Path) -> None:
    """The annotation is on the runtime; the run belongs to the JobSet that its controller makes, whose Job stays."""
    jobset.install(bench.cluster, tmp_path)
    kubeflow.trainer(bench.cluster, tmp_path)
    bench.note("the Trainer's controller is installed")
    group = train_job(bench, "night", nodes=2, notes=NO_TIMER)
    before, after, pods = recover_evicted_pod(group, f"{group.name}-node-0")
    assert before == after
    assert pods == 1, "the other pod stays"


def recover_evicted_pod(group: TrainingGroup, job: str) -> tuple[str, str, int]:
    """Evict the second of two pods; return the Job's UIDs before and after, and how many pods are unchanged."""
    bench = group.bench
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs/{job}"
    first = group.wait_round(world_size=2)
    group.job.wait_status("both ranks are there", lambda status: status.get("ranks") == "2/2")
    before = bench.cluster.api.get(path)["metadata"]["uid"]
    group.wait_step(first.step + 40, attempt=first.attempt)
    group.job.evict(first.pods[1])
    second = group.wait_round(after=first.attempt, world_size=2)
    after = bench.cluster.api.get(path)["metadata"]["uid"]
    group.assert_restored(second, at_least=group.last_step(first.attempt) - 1)
    group.wait_step(second.step + 30, attempt=second.attempt)
    group.assert_every_sample_once()
    status = group.job.wait_status(
        "both ranks are there again, and the eviction is counted",
        lambda status: status.get("ranks") == "2/2" and status["failures"] == 1,
        timeout_s=180,
    )
    assert "Evicted" in {each["cause"] for each in status["losses"]}
    runs = bench.cluster.api.items(
        f"/apis/deltashard.io/v1alpha1/namespaces/{bench.namespace}/checkpointruns"
    )
    assert [(each["spec"]["workload"]["kind"], each["spec"]["runId"]) for each in runs] == [
        ("JobSet", group.job.run_id)
    ]
    return before, after, len(set(second.pods) & set(first.pods))
