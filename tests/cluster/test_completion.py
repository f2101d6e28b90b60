"""A Job with one annotation trains, saves, completes; and whoever looks at the cluster learns how it went."""

from __future__ import annotations

import pytest

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import Bench
from tests.cluster.scenario.job import SIDECAR

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_job_completes(bench: Bench) -> None:
    """Its last step is durable, the native sidecar is gone, `kubectl get checkpointruns` and Events tell the story."""
    job = bench.job("completes", steps=300, pace_s=0.1)  # long enough to be seen while it trains
    began = bench.began(job, 0)
    assert began["step"] == 0
    assert began["library"].startswith("/opt/deltashard/"), "what runs must be the wheel"
    assert not began["secrets"], "the store's credentials reach the sidecar only"
    (pod,) = job.pods()
    assert [each["name"] for each in pod["spec"]["initContainers"]] == [SIDECAR]
    job.wait_phase("Training", "Saving", timeout_s=90)
    job.wait_complete()
    finished = bench.witness.wait(job.key, lambda e: e["kind"] == "finished", timeout_s=5, what="finished")
    assert finished["digest"] == bench.reference.digest(300)
    assert bench.newest(job) == 300
    bench.assert_store_whole(job)
    (pod,) = job.pods()
    assert pod["status"]["phase"] == "Succeeded"
    sidecar = job.container(pod["metadata"]["name"], SIDECAR)
    assert sidecar["state"]["terminated"]["exitCode"] == 0
    assert sidecar["restartCount"] == 0

    job.wait_phase("Finished")

    def row() -> tuple[str, str]:
        head, *rows = bench.cluster.kubectl("get", "checkpointruns", "-n", bench.namespace).splitlines()
        assert len(rows) == 1, rows
        phase, step = (rows[0][head.index(column) :].split()[0] for column in ("PHASE", "LAST-STEP"))
        return phase, step

    wait_until(lambda: row() == ("Finished", "300"), timeout_s=60, what=lambda: f"the table says it: {row()}")
