"""Whoever did not opt in never notices that the webhook exists, and whoever did needs it once.

As the chart installs it, failurePolicy Fail: with every replica dead, Jobs of others run, running trainings get their
pods replaced, unchanged manifests are applied again, and only a new annotated workload is refused, with a sentence.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from deltashard_operator.kube import cluster_name

from tests.load.simulation import control_plane, workload
from tests.load.simulation.control_plane import Plane
from tests.load.simulation.operator_process import Controller, Webhook
from tests.support.eventually import eventually
from tests.support.server.apiserver import Reply
from tests.support.tool import built

TEAM = "team"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A cluster with an annotated Job that was admitted while the webhook lived; now nobody answers for it."""
    plane = Plane(tmp_path_factory.mktemp("availability"), nodes=2)
    plane.start()
    try:
        controller, webhook = Controller(plane), Webhook(plane)
        try:
            controller.start()
            webhook.start()
            workload.make(plane, [TEAM], [2])
            for how in ("client", "server"):
                assert _apply(plane, how).returncode == 0
        finally:
            webhook.stop(signal.SIGKILL)
            controller.stop(signal.SIGKILL)
        eventually(lambda: _asked(plane, "dead").status == 500, what="the webhook's death", timeout_s=60)
        yield plane
    finally:
        plane.stop()


def _asked(plane: Plane, name: str, kind: str = "Job") -> Reply:
    document = workload.job(name, pods=1, node="node-0")
    if kind == "Pod":
        metadata = {"name": name, "annotations": {cluster_name.POLICY: "default"}}
        document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": document["spec"]["template"]["spec"],
        }
    return plane.rest.create(document, TEAM, dry_run=True)


def _apply(plane: Plane, how: str) -> subprocess.CompletedProcess[str]:
    manifest = plane.folder / f"{how}.json"
    manifest.write_text(json.dumps(workload.job(f"by-{how}", pods=1, node="node-1")))
    command = [
        built("kubectl"), f"--kubeconfig={plane.apiserver.kubeconfig}", f"--namespace={TEAM}", "apply",
        f"--server-side={'true' if how == 'server' else 'false'}", f"--filename={manifest}",
    ]  # fmt: skip
    environment = {"HOME": str(plane.folder), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("annotations", [None, {}, {"other.io/policy": "x"}, {cluster_name.ENCODING: "q8"}])
def test_jobs_of_others_run(plane: Plane, annotations: dict[str, str] | None) -> None:
    """Without any annotations map, with an empty one, with others' keys: created, and their pods run."""
    name = f"free-{len(annotations or {})}-{annotations is None:d}-{cluster_name.ENCODING in (annotations or {}):d}"
    document = workload.job(name, pods=1, node="node-0")
    metadata: dict[str, Any] = {"name": name}
    if annotations is not None:
        metadata["annotations"] = annotations
    plane.make(document | {"metadata": metadata}, TEAM)
    path = f"/api/v1/namespaces/{TEAM}/pods?labelSelector={cluster_name.JOB_NAME_LABEL}%3D{name}"

    def running() -> bool:
        found = plane.rest("GET", path).document["items"]
        return [pod["status"].get("phase") for pod in found] == ["Running"]

    eventually(running, what=f"the pod of {name}", timeout_s=control_plane.PATIENCE_S)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": document["spec"]["template"]["spec"],
    }
    plane.make(pod, TEAM)


@pytest.mark.parametrize("kind", ["Job", "Pod"])
def test_a_new_annotated_workload_is_refused_with_a_sentence(plane: Plane, kind: str) -> None:
    """It says which webhook could not be asked."""
    refused = _asked(plane, "asked", kind)
    assert refused.status == 500
    hook = "jobs.deltashard.io" if kind == "Job" else "pods.deltashard.io"
    assert f'failed calling webhook "{hook}"' in refused.document["message"]


@pytest.mark.parametrize("how", ["client", "server"])
def test_an_unchanged_manifest_is_applied_again(plane: Plane, how: str) -> None:
    """Nothing is created, so nobody has to be asked; and what was injected stays."""
    path = f"/apis/batch/v1/namespaces/{TEAM}/jobs/by-{how}"
    before = plane.rest("GET", path).document
    assert before["spec"]["template"]["spec"]["initContainers"][0]["name"] == cluster_name.SIDECAR
    done = _apply(plane, how)
    assert done.returncode == 0, done.stderr
    assert plane.rest("GET", path).document["spec"] == before["spec"]


def test_a_lost_pod_of_a_training_is_replaced(plane: Plane) -> None:
    """Its template has the sidecar since the Job was made."""
    mine = [pod for pod in workload.living(plane) if pod.job == "train-0"]
    assert len(mine) == 2
    workload.evict(plane, mine[0])

    def replaced() -> bool:
        found = [pod for pod in workload.living(plane) if pod.job == "train-0"]
        return len(found) == 2 and mine[0] not in found

    eventually(replaced, what="the replacement", every_s=0.5, timeout_s=control_plane.PATIENCE_S)
    path = f"/api/v1/namespaces/{TEAM}/pods?labelSelector={cluster_name.JOB_NAME_LABEL}%3Dtrain-0"
    for pod in plane.rest("GET", path).document["items"]:
        assert [each["name"] for each in pod["spec"]["initContainers"]] == [cluster_name.SIDECAR]
