"""CheckpointRequests, on a real API server: the save is ordered of the run's sidecar, and what came of it is written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from deltashard_operator.kube import cluster_name
from deltashard_proto.v1 import fleet_pb2 as wire

from tests.support.eventually import eventually
from tests.support.operator.controller_process import Cluster, ControllerProcess, Document, Sidecar
from tests.support.server.apiserver import ApiServer

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def controller(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    """Ask it; who stops it starts it again."""
    running = ControllerProcess(apiserver, tmp_path_factory.mktemp("controller"), annotate_pods=True)
    running.start()
    try:
        yield running
    finally:
        if running.process is not None:
            running.stop(signal.SIGKILL)


def ask(cluster: Cluster, run: str, **spec: Any) -> str:
    """Make a request; its UID."""
    kind = {"apiVersion": "deltashard.io/v1alpha1", "kind": "CheckpointRequest"}
    document = {**kind, "metadata": {"name": "now"}, "spec": {"runRef": {"name": run}, **spec}}
    reply = cluster.http.create(document, cluster.namespace)
    assert reply.status == 201, reply.document
    return str(reply.document["metadata"]["uid"])


def status(cluster: Cluster) -> Document:
    return dict(cluster.http("GET", cluster.path("checkpointrequests", "now")).document.get("status") or {})


def reaches(cluster: Cluster, phase: str) -> Document:
    eventually(lambda: status(cluster).get("phase") == phase, lambda: f"{phase}: {status(cluster)}")
    return status(cluster)


def training(
    controller: ControllerProcess, cluster: Cluster, name: str = "train"
) -> tuple[Document, Sidecar]:
    """A Job whose one pod trains; its run id is its name."""
    job = cluster.job(name, {cluster_name.RUN_ID: name})
    pod = cluster.running_pod(job)
    sidecar = Sidecar(controller, cluster, pod, job)
    sidecar.report(step=9, seq=1, committed=8)
    return job, sidecar


def ordered(sidecar: Sidecar, saves_over: tuple[wire.SaveOver, ...] = ()) -> list[str]:
    """Ids of the saves that the answer to a report names."""
    reply = sidecar.report(step=9, seq=1, committed=8, saves_over=saves_over)
    return [each.id for each in reply.saves]


def test_a_save_is_ordered_when_its_run_begins_and_completed_by_its_sidecar_alone(
    controller: ControllerProcess, cluster: Cluster
) -> None:
    uid = ask(cluster, "train", pin="best", urgent=True, deadline="1h")
    waiting = reaches(cluster, "Pending")
    assert "no run id is train in this namespace yet" in waiting["conditions"][0]["message"]
    job, sidecar = training(controller, cluster)
    eventually(lambda: ordered(sidecar) == [uid], "the order")
    (save,) = sidecar.report(step=9, seq=1, committed=8).saves
    assert (save.reason, save.urgent, save.pin) == ("request", True, "best")
    assert 3000 < save.deadline_s <= 3600
    reaches(cluster, "Ordered")
    over = wire.SaveOver(id=uid, outcome=wire.SaveOver.OUTCOME_COMMITTED, step=12, seq=2)
    _, stranger = training(controller, cluster, "other")
    ordered(stranger, (over,))
    assert ordered(sidecar) == [uid], "another run's sidecar has no say in it"
    assert status(cluster)["phase"] == "Ordered"
    ordered(sidecar, (over,))
    found = reaches(cluster, "Completed")
    assert (found["step"], found["seq"], found["observedGeneration"]) == (12, 2, 1)
    assert found["conditions"][0]["message"] == "saved at step 12, pinned as best"
    eventually(lambda: ordered(sidecar) == [], "the order is closed")
    cluster.http("DELETE", cluster.path("checkpointrequests", "now"))
    cluster.end(job)
    cluster.reaches(job, phase="Finished")
    ask(cluster, "train")
    assert "is finished (Completed)" in reaches(cluster, "Failed")["conditions"][0]["message"]


def test_pods_bear_the_time_of_the_newest_checkpoint(controller: ControllerProcess, cluster: Cluster) -> None:
    job = cluster.job()
    pod = cluster.running_pod(job)
    Sidecar(controller, cluster, pod, job).report(step=9, seq=1, committed=8)
    time = eventually(lambda: cluster.status(job).get("lastCommitTime"), "a commit")
    path = cluster.path("pods", pod["metadata"]["name"])

    def noted() -> object:
        notes = cluster.http("GET", path).document["metadata"]["annotations"]
        return notes.get("deltashard.io/checkpoint-time")

    assert eventually(noted, "the annotation", timeout_s=120) == time
