"""A Job with one annotation trains, saves and completes; the cluster's objects show the result."""

from __future__ import annotations

import json

import pytest

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.job import SIDECAR
from tests.cluster.scenario.reference import checkpoints
from tests.support.machine import limit_s

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_job_completes(bench: ScenarioBench) -> None:
    job = bench.job("completes", steps=300, pace_s=0.1)  # long enough to be observed while it trains
    start_event = bench.start_event(job, 0)
    assert start_event["step"] == 0
    assert start_event["library"].startswith("/opt/deltashard/"), "the pod must run the wheel"
    assert not start_event["secrets"], "the store's credentials reach the sidecar only"
    (pod,) = job.pods()
    assert [each["name"] for each in pod["spec"]["initContainers"]] == [SIDECAR]
    job.wait_phase("Training", timeout_s=90)
    job.wait_complete()
    finished = bench.event_server.wait(job.key, lambda e: e["kind"] == "finished", timeout_s=5, what="end")
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

    wait_until(lambda: row() == ("Finished", "300"), timeout_s=60, what=lambda: f"the end: {row()}")


def test_request_makes_pinned_checkpoint(bench: ScenarioBench) -> None:
    """`kubectl apply` of a CheckpointRequest, without a save timer: the checkpoint has the requested name."""
    job = bench.job("requested", notes=NO_TIMER)
    bench.start_event(job, 0)
    job.wait_phase("Training")
    file = bench.folder / "request.json"
    request = {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointRequest",
        "metadata": {"name": "now"},
        "spec": {"runRef": {"name": job.run_id}, "pin": "before-new-data"},
    }
    file.write_text(json.dumps(request))
    there = ("-n", bench.namespace)
    bench.cluster.kubectl("apply", *there, "-f", file)
    timeout = f"--timeout={limit_s(90):.0f}s"
    bench.cluster.kubectl("wait", *there, "checkpointrequest/now", "--for=condition=Complete", timeout)
    status = json.loads(bench.cluster.kubectl("get", *there, "checkpointrequest/now", "-o=json"))["status"]
    (made,) = checkpoints(bench.url, job.run)
    assert (status["phase"], status["step"], status["seq"]) == ("Completed", made.step, made.seq)
    assert made.pins == ("before-new-data",)
    bench.assert_store_whole(job)


def test_kubectl_rewinds_run(bench: ScenarioBench) -> None:
    """A suspended run is rewound by the plugin's Job with the sidecar's own keys, and resumes from exactly that checkpoint."""
    job = bench.job("rewound", notes=NO_TIMER)
    start = bench.start_event(job, 0)
    for number in (1, 2):  # each leaves a checkpoint of its last step
        bench.event_server.wait_step(start["process"], start["step"] + 20, timeout_s=60)
        pod = start["pod"]
        job.delete_pod(pod)
        start = bench.start_event(job, number)
    older, newer = (each for each in checkpoints(bench.url, job.run)[-2:])
    assert older.step < newer.step == start["step"]
    back_to = ("rewind", job.name, "-c", f"seq:{older.seq}")
    refused = json.loads(bench.plugin(*back_to, "--json", status=2))
    assert "the run is training, in rewound-" in refused["error"]["what"], refused
    job.patch({"spec": {"suspend": True}})
    wait_until(lambda: not job.pods(), timeout_s=90, what="the suspended pods gone")
    job.wait_phase("Pending")
    bench.plugin(*back_to)
    bench.note(f"rewound to step {older.step}")
    job.patch({"spec": {"suspend": False}})
    back = bench.start_event(job, 3)
    assert back["step"] == older.step
    bench.assert_resumed(back)
