"""A container is killed and its pod stays: the kubelet restarts it, and training resumes from a known state."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import SIDECAR

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_killed_containers_restart_and_resume(bench: ScenarioBench) -> None:
    limits = {"requests": {"cpu": "10m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    job = bench.job("killed", container={"resources": limits})
    start_event = bench.start_event(job, 0)
    node, pod = bench.cluster.nodes[start_event["node"]], start_event["pod"]

    def send_signal(container: str, number: signal.Signals) -> None:
        os.kill(node.container_pid(job.wait_container(pod, container)["containerID"]), number)

    bench.wait_commits(job, count=2)
    send_signal("trainer", signal.SIGKILL)
    again = bench.start_event(job, 1)
    assert again["pod"] == pod
    assert again["source"] == "cache"
    bench.assert_resumed(again, at_least=start_event["step"] + 1)
    job.wait_container(pod, "trainer", restartCount=1)

    bench.wait_commits(job, beyond=again["step"])
    send_signal(SIDECAR, signal.SIGKILL)
    at_kill = bench.event_server.last_step(again["process"])
    job.wait_container(pod, SIDECAR, restartCount=1)
    bench.note("the sidecar was killed and runs again")
    bench.wait_commits(job, beyond=at_kill)
    bench.event_server.wait_step(again["process"], at_kill + 1, timeout_s=60)
    assert job.container(pod, "trainer")["restartCount"] == 1

    committed = bench.newest(job)
    send_signal("trainer", signal.SIGUSR1)  # the trainer allocates memory without end
    third = bench.start_event(job, 2)
    assert third["pod"] == pod
    status = job.wait_container(pod, "trainer", restartCount=2)
    assert status["lastState"]["terminated"]["reason"] == "OOMKilled"
    bench.assert_resumed(third, at_least=committed)
    assert job.container(pod, SIDECAR)["restartCount"] == 1
    bench.assert_store_whole(job)
