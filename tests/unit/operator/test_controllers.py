"""The controller on a real API server: what CheckpointRuns and Events say, and that nothing of a user's is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apiserver import ApiServer, Rest
from tests.unit.operator.controlling import Cluster, ControllerProcess, Sidecar, eventually


@pytest.fixture
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


@pytest.fixture
def cluster(http: Rest) -> Cluster:
    return Cluster.make(http)


@pytest.fixture(scope="module")
def controller(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    running = ControllerProcess(apiserver, tmp_path_factory.mktemp("controller"))
    running.start()
    yield running
    assert running.stop() == 0, running.log


def test_a_job_gets_a_run_whose_phases_follow_training_to_its_end(
    controller: ControllerProcess, cluster: Cluster
) -> None:
    job = cluster.job()
    found = eventually(lambda: cluster.run(job), "a CheckpointRun")
    uid = job["metadata"]["uid"]
    assert found["metadata"]["name"] == f"train-{uid.replace('-', '')[:8]}"
    assert found["spec"]["runId"] == f"train-{uid}"
    cluster.reaches(job, phase="Pending")
    pod = cluster.running_pod(job)
    with Sidecar(controller, cluster, pod, job) as sidecar:
        sidecar.beat(phase="RESTORING")
        cluster.reaches(job, phase="Restoring")
        sidecar.beat(phase="TRAINING", step=5)
        cluster.reaches(job, phase="Training", step=5)
        sidecar.beat(phase="SAVING", step=9, seq=2, committed=8, stored_bytes=3 << 30, checkpoints=1)
        status = cluster.reaches(job, phase="Saving", lastCommittedStep=8, stored="3Gi", bits=8)
        assert status["intervalSeconds"] == 300
        assert cluster.condition(job, "Ready")["status"] == "True"
        name = job["metadata"]["name"]
        assert controller.metric(
            "deltashard_run_last_commit_timestamp_seconds", namespace=cluster.namespace, run=name
        )
        cluster.kubelet(pod, phase="Succeeded", exit_code=0, reason="Completed")
        cluster.end(job)
        status = cluster.reaches(job, phase="Finished", finishedReason="Completed")
    assert status["failures"] == 0
    assert (
        controller.metric("deltashard_run_last_commit_timestamp_seconds", namespace=cluster.namespace) is None
    )
