"""Pods as strict clusters and meshes require them, with the real admission chain and kubelet."""

from __future__ import annotations

import copy
import os
import signal

import pytest

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.image import TAG, TRAINER
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import RESTRICTED, SIDECAR

pytestmark = pytest.mark.timeout(600, func_only=True)

_SLEEPER: Object = {
    "image": f"{TRAINER}:{TAG}",
    "imagePullPolicy": "Never",
    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"],
    "resources": {"limits": {"cpu": "50m", "memory": "64Mi"}},
}


def test_job_trains_and_resumes_in_strict_cluster(bench: ScenarioBench) -> None:
    api, namespace = bench.cluster.api, bench.namespace
    hard = {f"{what}.cpu": "2" for what in ("requests", "limits")}
    hard |= {f"{what}.memory": "4Gi" for what in ("requests", "limits")}
    limit = {
        "type": "Container",
        "default": {"cpu": "100m", "memory": "32Mi"},  # far too little for a sidecar
        "defaultRequest": {"cpu": "50m", "memory": "32Mi"},
        "max": {"cpu": "2", "memory": "3Gi"},
    }
    for kind, spec in (
        ("ResourceQuota", {"hard": {**hard, "pods": "4"}}),
        ("LimitRange", {"limits": [limit]}),
    ):
        document: Object = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "all"}, "spec": spec}
        api.create(f"/api/v1/namespaces/{namespace}/{kind.lower()}s", document)
    security = {**RESTRICTED, "runAsUser": 1000730000, "runAsGroup": 1000730000}
    inits = [
        {"name": "istio-proxy", "restartPolicy": "Always", "securityContext": security, **_SLEEPER},
        {
            "name": "fetch",
            **_SLEEPER,
            "command": ["/bin/sh", "-c", "echo fetched > /tmp/data"],
            "securityContext": security,
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        },
    ]
    # In a Guaranteed pod the sidecar requests its limit, and a node here has two processors for all scenarios.
    bench.policy(namespace, "strict", sidecar={"resources": {"limits": {"cpu": "1"}}})
    job = bench.job(
        "strict",
        steps=300,  # long enough for a kill on a busy machine
        notes={"deltashard.io/policy": "strict"},
        container={"securityContext": security, "resources": {"limits": {"cpu": "400m", "memory": "2Gi"}}},
        pod={"initContainers": copy.deepcopy(inits)},
    )
    start = bench.start_event(job, 0)
    pod = job.pod(start["pod"])
    assert pod is not None
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["istio-proxy", SIDECAR, "fetch"]
    assert pod["status"]["qosClass"] == "Guaranteed"
    committed = bench.wait_commits(job)
    trainer = job.wait_container(start["pod"], "trainer")["containerID"]
    os.kill(bench.cluster.nodes[start["node"]].container_pid(trainer), signal.SIGKILL)
    bench.assert_resumed(bench.start_event(job, 1), at_least=committed)
    job.wait_complete()
    assert bench.newest(job) == 300
    bench.assert_store_whole(job)
