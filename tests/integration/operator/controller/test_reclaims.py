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
WORD = json.dumps({"runs": 1, "stay": 0, "kept": [], "objects": 12, "bytes": 3400})


@pytest.fixture
def cluster(http: Rest) -> Cluster:
    """A namespace with a policy that removes at once."""
    made = Cluster.make(http)
    store = {"url": URL, "secretRef": {"name": "keys"}}
    policy = sample.policy_object("default", store=store, reclaim={"policy": "Delete", "after": "0s"})
    assert http.create(policy, made.namespace).status == 201
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


def say(cluster: Cluster, **reclaim: str) -> None:
    """Change what the policy says of removals."""
    path = cluster.path("checkpointpolicies", "default")
    assert cluster.http("PATCH", path, {"spec": {"reclaim": reclaim}}, content=MERGE).status == 200


def trained(controller: ControllerProcess, cluster: Cluster) -> Document:
    """A Job that has trained; its pod has ended and the Job not."""
    job = cluster.job()
    pod = cluster.running_pod(job)
    Sidecar(controller, cluster, pod, job, url=URL).report(step=9, seq=1, committed=8)
    cluster.reaches(job, phase="Training", store=URL)
    cluster.kubelet(pod, phase="Succeeded", exit_code=0, reason="Completed")
    return job


def reclaim(cluster: Cluster, job: Document, state: str) -> Document:
    """The status of the removal, once it is this."""
    found: list[Document] = []

    def is_so() -> bool:
        found[:] = [cluster.status(job).get("reclaim") or {}]
        return found[0].get("state") == state

    eventually(is_so, lambda: f"{state}: {found}")
    return found[0]


def removals(cluster: Cluster) -> list[Document]:
    query = "labelSelector=app.kubernetes.io/component%3Dreclaim"
    return list(cluster.http("GET", f"{cluster.path('jobs')}?{query}").document["items"])


def made(cluster: Cluster) -> Document:
    """The Job that removes the bytes, once it is there."""
    eventually(lambda: removals(cluster), "a Job that removes them")
    (found,) = removals(cluster)
    return found


def run_to_its_end(cluster: Cluster, job: Document, said: str) -> None:
    """What kubelet and Job controller do: a pod of the Job, which PSA restricted admits, its last word, the Job's end."""
    name, template = job["metadata"]["name"], job["spec"]["template"]
    labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    spec = {**template["spec"], "nodeName": "node-a"}
    kind = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-x", "labels": labels}}
    enforced = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.http("PATCH", f"/api/v1/namespaces/{cluster.namespace}", enforced, content=MERGE)
    reply = cluster.http.create({**kind, "spec": spec}, cluster.namespace)
    assert reply.status == 201, reply.document
    ended = {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z", "message": said}
    container = {"name": "reclaim", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
    path = f"{cluster.path('pods', f'{name}-x')}/status"
    assert cluster.http("PATCH", path, {"status": status}, content=STRATEGIC).status == 200
    cluster.end(job)


def test_a_job_of_the_run_s_namespace_removes_the_bytes_and_what_came_of_it_is_said(
    controller: ControllerProcess, cluster: Cluster
) -> None:
    """Once the grace is over, which a policy may end, and which Retain calls off; whatever becomes of the controller."""
    say(cluster, after="1h")
    job = trained(controller, cluster)
    assert "reclaim" not in cluster.status(job)
    cluster.end(job)
    assert reclaim(cluster, job, "Waiting")["due"] > cluster.status(job)["finishedAt"]
    say(cluster, policy="Retain")
    eventually(lambda: "reclaim" not in cluster.status(job), "called off")
    assert removals(cluster) == []
    say(cluster, policy="Delete", after="0s")
    removal = made(cluster)
    (container,) = removal["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["deltashard", "reclaim", URL]
    assert removal["metadata"]["name"] in reclaim(cluster, job, "Removing")["message"]
    controller.stop(signal.SIGKILL)
    run_to_its_end(cluster, removal, WORD)
    controller.start()
    assert "12 objects, 3400 bytes" in reclaim(cluster, job, "Removed")["message"]
    eventually(lambda: cluster.events("Reclaimed"), "an Event")
    assert controller.metric("deltashard_controller_reclaims_total", outcome="removed") == 1
    assert [each["metadata"]["uid"] for each in removals(cluster)] == [removal["metadata"]["uid"]]
