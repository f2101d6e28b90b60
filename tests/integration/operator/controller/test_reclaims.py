"""The removal of finished runs' bytes, on a real API server: which Job is made, when, and what is said of its end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.operator import sample
from tests.support.operator.controller_process import MERGE, STRATEGIC, Cluster, ControllerProcess, Sidecar
from tests.support.server.apiserver import ApiServer, Rest

pytestmark = pytest.mark.timeout(900)
Document = dict[str, Any]
URL = "s3://bucket/prefix"
POLICIES = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointpolicies"


@pytest.fixture
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


@pytest.fixture
def cluster(http: Rest) -> Cluster:
    """A namespace with a policy that removes at once."""
    made = Cluster.make(http)
    policy(made, {"reclaim": {"policy": "Delete", "after": "0s"}})
    return made


@pytest.fixture(scope="module")
def controller(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    """Ask it; who stops it starts it again."""
    defaults = {**sample.DEFAULTS, "reclaiming": {"enabled": True}}
    running = ControllerProcess(apiserver, tmp_path_factory.mktemp("controller"), policy=defaults)
    running.start()
    try:
        yield running
    finally:
        if running.process is not None:
            running.stop(signal.SIGKILL)


def policy(cluster: Cluster, spec: Document) -> None:
    """Make the namespace's policy `default`, or change it."""
    folder = POLICIES.format(cluster.namespace)
    body = {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "default"},
        "spec": {"store": {"url": URL, "secretRef": {"name": "keys"}}, **spec},
    }
    if cluster.http("POST", folder, body).status != 201:
        assert cluster.http("PATCH", f"{folder}/default", {"spec": spec}, content=MERGE).status == 200


def trained(
    controller: ControllerProcess,
    cluster: Cluster,
    *,
    name: str = "train",
    url: str = URL,
    notes: dict[str, str] | None = None,
) -> Document:
    """A Job that has trained; its pod has ended and the Job not."""
    job = cluster.job(name, notes)
    pod = cluster.running_pod(job)
    with Sidecar(controller, cluster, pod, job, url=url) as sidecar:
        sidecar.beat(step=9, seq=1, committed=8)
        cluster.reaches(job, phase="Training", store=url)
        cluster.kubelet(pod, phase="Succeeded", exit_code=0, reason="Completed")
    return job


def reclaim(cluster: Cluster, job: Document, state: str) -> Document:
    """The status of the removal, once it is this."""
    return eventually(
        lambda: next(
            (
                said
                for said in [((cluster.run(job) or {}).get("status") or {}).get("reclaim") or {}]
                if said.get("state") == state
            ),
            None,
        ),
        f"{state}: {cluster.run(job)}",
    )


def made(cluster: Cluster) -> Document:
    """The Job that removes the bytes, once it is there."""
    return eventually(
        lambda: next(iter(removals(cluster)), None), f"a Job that removes them: {removals(cluster)}"
    )


def removals(cluster: Cluster) -> list[Document]:
    query = "labelSelector=app.kubernetes.io/component%3Dreclaim"
    return list(cluster.http("GET", f"{cluster.path('jobs')}?{query}").document["items"])


def run_to_its_end(cluster: Cluster, job: Document, said: str, *, failed: bool = False) -> None:
    """What kubelet and Job controller do: a pod of the Job, its last word, the Job's end."""
    name = job["metadata"]["name"]
    template = job["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-x",
            "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name},
        },
        "spec": {**template["spec"], "nodeName": "node-a"},
    }
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    place = f"/api/v1/namespaces/{cluster.namespace}"
    assert cluster.http("PATCH", place, {"metadata": {"labels": labels}}, content=MERGE).status == 200
    reply = cluster.http.create(pod, cluster.namespace)
    assert reply.status == 201, reply.document
    ended = {"exitCode": int(failed), "finishedAt": "2026-01-01T00:00:00Z", "message": said}
    container = {"name": "reclaim", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Failed" if failed else "Succeeded",
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    path = f"{cluster.path('pods', pod['metadata']['name'])}/status"
    assert cluster.http("PATCH", path, {"status": status}, content=STRATEGIC).status == 200
    cluster.end(job, failed=failed)


def test_a_finished_run_s_bytes_are_removed_by_a_job_of_its_namespace(
    controller: ControllerProcess, cluster: Cluster
) -> None:
    before = controller.metric("deltashard_controller_reclaims_total", outcome="removed") or 0
    job = trained(controller, cluster)
    assert "reclaim" not in cluster.run(job)["status"]
    cluster.end(job)
    removal = made(cluster)
    said = reclaim(cluster, job, "Removing")
    assert removal["metadata"]["name"] in said["message"]
    (container,) = removal["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["deltashard", "reclaim", URL]
    assert job["metadata"]["uid"] in container["args"]
    word = {"runs": 1, "stay": 0, "kept": [], "objects": 12, "bytes": 3400}
    run_to_its_end(cluster, removal, json.dumps(word))
    said = reclaim(cluster, job, "Removed")
    assert "12 objects, 3400 bytes" in said["message"]
    event = eventually(lambda: cluster.events("Reclaimed"), "an Event")[0]
    assert event["type"] == "Normal"
    assert controller.metric("deltashard_controller_reclaims_total", outcome="removed") == before + 1
    assert len(removals(cluster)) == 1


def test_the_grace_is_waited_for_and_may_be_ended(controller: ControllerProcess, cluster: Cluster) -> None:
    policy(cluster, {"reclaim": {"after": "1h"}})
    job = trained(controller, cluster)
    cluster.end(job)
    said = reclaim(cluster, job, "Waiting")
    assert said["due"] > cluster.run(job)["status"]["finishedAt"]
    assert removals(cluster) == []
    policy(cluster, {"reclaim": {"policy": "Retain"}})
    eventually(lambda: "reclaim" not in cluster.run(job)["status"], "called off")
    policy(cluster, {"reclaim": {"policy": "Delete", "after": "0s"}})
    assert made(cluster)


def test_what_the_job_kept_is_said(controller: ControllerProcess, cluster: Cluster) -> None:
    job = trained(controller, cluster)
    cluster.end(job)
    removal = made(cluster)
    reclaim(cluster, job, "Removing")
    kept = {"run": "n/train", "why": "it has a pin, 'best'"}
    word = {"runs": 0, "stay": 1, "kept": [kept], "objects": 0, "bytes": 0}
    run_to_its_end(cluster, removal, json.dumps(word))
    assert "it has a pin, 'best'" in reclaim(cluster, job, "Kept")["message"]
    assert eventually(lambda: cluster.events("ReclaimKept"), "an Event")[0]["type"] == "Warning"


def test_a_job_that_fails_is_said_and_tried_again_later(
    controller: ControllerProcess, cluster: Cluster
) -> None:
    job = trained(controller, cluster)
    cluster.end(job)
    removal = made(cluster)
    reclaim(cluster, job, "Removing")
    run_to_its_end(cluster, removal, "StoreUnavailable: no connection", failed=True)
    said = reclaim(cluster, job, "Failed")
    assert "StoreUnavailable: no connection" in said["message"]
    assert said["due"] > said["since"]
    assert said["tries"] == 1
    assert (
        "it is tried again" in eventually(lambda: cluster.events("ReclaimFailed"), "an Event")[0]["message"]
    )


def test_bytes_of_which_it_is_not_sure_stay(controller: ControllerProcess, cluster: Cluster) -> None:
    """Another store than the policy's; a run that another workload goes on with."""
    elsewhere = trained(controller, cluster, name="elsewhere", url="s3://bucket/before")
    cluster.end(elsewhere)
    assert "names another store" in reclaim(cluster, elsewhere, "Kept")["message"]
    shared = {"deltashard.io/run-id": "shared"}
    second = trained(controller, cluster, name="second", notes=shared)
    third = cluster.job("third", shared)
    cluster.end(second)
    assert "another workload" in reclaim(cluster, second, "Kept")["message"]
    cluster.end(third)
    assert "no sidecar has said" in reclaim(cluster, third, "Kept")["message"]


def test_a_controller_that_dies_makes_no_second_job(controller: ControllerProcess, cluster: Cluster) -> None:
    job = trained(controller, cluster)
    controller.stop(signal.SIGKILL)
    cluster.end(job)
    controller.start()
    removal = made(cluster)
    reclaim(cluster, job, "Removing")
    controller.stop(signal.SIGKILL)
    word = {"runs": 1, "stay": 0, "kept": [], "objects": 12, "bytes": 3400}
    run_to_its_end(cluster, removal, json.dumps(word))
    controller.start()
    assert "are removed" in reclaim(cluster, job, "Removed")["message"]
    assert [each["metadata"]["uid"] for each in removals(cluster)] == [removal["metadata"]["uid"]]
