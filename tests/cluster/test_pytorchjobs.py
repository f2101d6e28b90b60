"""A PyTorchJob, whose operator runs in the cluster: it recreates pods under their old names, and they resume its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario import kubeflow
from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.group import TrainingGroup
from tests.cluster.scenario.kubeflow_group import pytorch_job

pytestmark = pytest.mark.timeout(900, func_only=True)

STEPS, PACE_S = 330, 0.2
"""More than an epoch of three ranks. The pace is slow: the operator reports the cause of an end half a minute later."""


def test_pytorch_job_recovers_lost_pods(bench: ScenarioBench, tmp_path: Path) -> None:
    """The worker is evicted after a save by all; the master is lost without notice, and all ranks return to that save.

    In the end the PyTorchJob has succeeded, the run is finished, and every sample of the epoch was trained once.
    """
    kubeflow.training_operator(bench.cluster, tmp_path)
    bench.note("the training operator is installed")
    group = pytorch_job(bench, "ranks", workers=2, notes=NO_TIMER, steps=STEPS, pace_s=PACE_S)
    first = group.wait_round(world_size=3)
    assert first.pods == ["ranks-master-0", "ranks-worker-0", "ranks-worker-1"]
    group.job.wait_status("all ranks are there", lambda status: status.get("ranks") == "3/3")
    uids = uids_of(group)

    group.wait_step(first.step + 20, attempt=first.attempt)
    group.job.evict(first.pods[2])
    second = group.wait_round(after=first.attempt, world_size=3)
    group.assert_restored(second, at_least=group.last_step(first.attempt) - 1)

    group.job.wait_status("the eviction is counted", lambda status: status["failures"] == 1)
    group.lose_pod(second, 0)
    third = group.wait_round(after=second.attempt, world_size=3)
    group.assert_restored(third, at_least=second.step)
    assert first.pods == second.pods == third.pods, "a pod has another name"
    now = uids_of(group)
    assert {name for name in now if now[name] != uids[name]} == {"ranks-master-0", "ranks-worker-1"}
    status = group.job.wait_status(
        "all ranks are there again, and every end is counted",
        lambda status: status.get("ranks") == "3/3" and status["failures"] == 2,
    )
    assert {each["cause"] for each in status["losses"]} >= {"Deleted", "Evicted"}

    wait_until(
        lambda: group.job.conditions().get("Succeeded") == "True",
        timeout_s=180,
        what="the PyTorchJob succeeded",
    )
    group.job.wait_phase("Finished")
    assert group.last_step(third.attempt) == STEPS == bench.newest(group.job)
    group.assert_every_sample_once()
    runs = bench.cluster.api.items(
        f"/apis/deltashard.io/v1alpha1/namespaces/{bench.namespace}/checkpointruns"
    )
    workloads = [(each["spec"]["workload"]["kind"], each["spec"]["workload"]["apiVersion"]) for each in runs]
    assert workloads == [("PyTorchJob", "kubeflow.org/v1")]
    assert runs[0]["spec"]["runId"] == group.job.run_id
    assert not [each for each in group.job.events() if each["reason"] == "UnsupportedKind"]


def uids_of(group: TrainingGroup) -> dict[str, str]:
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in group.job.pods()}
