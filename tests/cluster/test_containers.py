"""A container dies and its pod stays: the kubelet restarts the container, and training resumes from a known state."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import SIDECAR

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_killed_containers(bench: ScenarioBench) -> None:
    limits = {"requests": {"cpu": "10m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    job = bench.job("killed", container={"resources": limits})
    start_event = bench.start_event(job, 0)
    node, pod = bench.cluster.nodes[start_event["node"]], start_event["pod"]

    def strike(container: str, number: signal.Signals) -> None:
        os.kill(node.container_pid(job.wait_container(pod, container)["containerID"]), number)

    bench.wait_commits(job, count=2)
    strike("trainer", signal.SIGKILL)
    again = bench.start_event(job, 1)
    assert again["pod"] == pod
    assert again["source"] == "cache"
    bench.assert_resumed(again, at_least=start_event["step"] + 1)
    job.wait_container(pod, "trainer", restartCount=1)

    bench.wait_commits(job, beyond=again["step"])
    strike(SIDECAR, signal.SIGKILL)
    at_kill = bench.witness.last_step(again["life"])
    job.wait_container(pod, SIDECAR, restartCount=1)
    bench.note("the sidecar was killed and is back")
    bench.wait_commits(job, beyond=at_kill)
    bench.witness.wait_step(again["life"], at_kill + 1, timeout_s=60)
    assert job.container(pod, "trainer")["restartCount"] == 1

    committed = bench.newest(job)
    strike("trainer", signal.SIGUSR1)  # which makes the trainer allocate memory
    third = bench.start_event(job, 2)
    assert third["pod"] == pod
    told = job.wait_container(pod, "trainer", restartCount=2)
    assert told["lastState"]["terminated"]["reason"] == "OOMKilled"
    bench.assert_resumed(third, at_least=committed)
    assert job.container(pod, SIDECAR)["restartCount"] == 1
    bench.assert_store_whole(job)
