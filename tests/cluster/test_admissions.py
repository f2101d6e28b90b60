"""Pods as strict clusters and meshes want them, and what is refused: the real admission chain, the real kubelet."""

from __future__ import annotations

import copy
import json
import os
import signal
from typing import Any

import pytest

from tests.cluster.kubernetes.api import ApiError, Object
from tests.cluster.kubernetes.image import TAG, TRAINER
from tests.cluster.scenario.bench import Bench
from tests.cluster.scenario.job import RESTRICTED, SIDECAR

pytestmark = pytest.mark.timeout(600, func_only=True)

_SLEEPER: Object = {
    "image": f"{TRAINER}:{TAG}",
    "imagePullPolicy": "Never",
    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"],
    "resources": {"limits": {"cpu": "50m", "memory": "64Mi"}},
}


def test_strict_cluster(bench: Bench) -> None:
    """One pod has it all: PodSecurity restricted, quota, LimitRange, Guaranteed, a UID from nowhere, a mesh, inits."""
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
    whoever = {**RESTRICTED, "runAsUser": 1000730000, "runAsGroup": 1000730000}
    inits = [
        {"name": "istio-proxy", "restartPolicy": "Always", "securityContext": whoever, **_SLEEPER},
        {
            "name": "fetch",
            **_SLEEPER,
            "command": ["/bin/sh", "-c", "echo fetched > /tmp/data"],
            "securityContext": whoever,
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        },
    ]
    # In a Guaranteed pod the sidecar requests its limit, and a node here has two processors for all scenarios.
    bench.policy(namespace, "strict", sidecar={"resources": {"limits": {"cpu": "1"}}})
    job = bench.job(
        "strict",
        steps=300,  # long enough to be killed within on a busy machine
        notes={"deltashard.io/policy": "strict"},
        container={"securityContext": whoever, "resources": {"limits": {"cpu": "400m", "memory": "2Gi"}}},
        pod={"initContainers": copy.deepcopy(inits)},
    )
    life = bench.began(job, 0)
    pod = job.pod(life["pod"])
    assert pod is not None
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["istio-proxy", SIDECAR, "fetch"]
    assert pod["status"]["qosClass"] == "Guaranteed"
    committed = bench.wait_commits(job)
    trainer = job.wait_container(life["pod"], "trainer")["containerID"]
    os.kill(bench.cluster.nodes[life["node"]].container_pid(trainer), signal.SIGKILL)
    bench.assert_resumed(bench.began(job, 1), at_least=committed)
    job.wait_complete()
    assert bench.newest(job) == 300
    bench.assert_store_whole(job)


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "policy": ({"deltashard.io/policy": "nobody"}, "there is no CheckpointPolicy 'nobody'"),
    "policy-name": ({"deltashard.io/policy": "No Body"}, "deltashard.io/policy"),
    "container": ({"deltashard.io/container": "trainee"}, "the pod has no container 'trainee'"),
    "run-id": ({"deltashard.io/run-id": "../other"}, "a DNS label"),
    "arena-size": ({"deltashard.io/arena-size": "64K"}, "a quantity from 64Mi to 1Ti"),
    "interval": ({"deltashard.io/interval": "soon"}, "a duration up to 168h"),
    "encoding": ({"deltashard.io/encoding": "q5"}, "one of fp32, fp16, bf16, q8, q4, q3, q2"),
    "unknown": ({"deltashard.io/intervall": "5m"}, "there is no such annotation"),
}


def refusal(bench: Bench, manifest: Object) -> str:
    """What the API says against a Job; fails when it says nothing."""
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs?dryRun=All"
    with pytest.raises(ApiError) as refused:
        bench.cluster.api.create(path, manifest)
    return str(refused.value)


def test_wrong_values(bench: Bench) -> None:
    """Each wrong annotation is refused with a sentence that names the key and what it takes."""
    for name, (notes, sentence) in WRONG.items():
        said = refusal(bench, bench.manifest(f"wrong-{name}", notes=notes))
        assert sentence in said, (name, said)
        assert next(iter(notes)) in said, (name, said)
    taken = bench.manifest("taken", container={"name": SIDECAR})
    assert "rename your container" in refusal(bench, taken)
    right = bench.manifest("right")
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs?dryRun=All"
    made: dict[str, Any] = bench.cluster.api.create(path, right)
    assert made["spec"]["template"]["spec"]["initContainers"][0]["name"] == SIDECAR


def test_applied_again(bench: Bench) -> None:
    """`kubectl apply` of an unchanged annotated manifest changes nothing; of Jobs without annotations it works as ever."""
    file = bench.folder / "job.json"
    manifest = bench.manifest("again", steps=1, spec={"suspend": True})
    file.write_text(json.dumps(manifest))
    apply = ("apply", "-n", bench.namespace, "-f", file)
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs"
    assert "created" in bench.cluster.kubectl(*apply)
    before = bench.cluster.api.get(f"{path}/again")
    bench.cluster.kubectl(*apply)  # a template is immutable: any difference would be refused
    after = bench.cluster.api.get(f"{path}/again")
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"]["template"]["spec"]["initContainers"][0]["name"] == SIDECAR
    plain = bench.manifest("plain", steps=1, spec={"suspend": True})
    del plain["metadata"]["annotations"]
    file.write_text(json.dumps(plain))
    assert "created" in bench.cluster.kubectl(*apply)
    found = bench.cluster.api.get(f"{path}/plain")
    assert "initContainers" not in found["spec"]["template"]["spec"]
