"""The controller on a real API server: contents of CheckpointRuns and Events, and no writes to users' objects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltashard_operator.kube import cluster_name
from deltashard_operator.run import run_record
from deltashard_proto.v1 import fleet_pb2 as wire

from tests.support.eventually import eventually
from tests.support.operator import sample
from tests.support.operator.controller_process import (
    MERGE,
    ControllerProcess,
    Document,
    NamespaceObjects,
    ReportingSidecar,
)
from tests.support.operator.definition import serving
from tests.support.server.apiserver import ApiServer
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import free_port

pytestmark = pytest.mark.timeout(900)  # processes start slowly on a busy machine


@pytest.fixture(scope="module")
def controller(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    """Tests share this controller process and must not stop it."""
    running = ControllerProcess(apiserver, tmp_path_factory.mktemp("controller"), annotate_pods=True)
    running.start()
    try:
        yield running
        assert running.stop() == 0, running.log
    finally:
        if running.process is not None:
            running.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def second_apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Controllers that start and stop need a separate server: two at once would write the same CheckpointRuns."""
    with serving(tmp_path_factory.mktemp("second")) as server:
        yield server


@dataclass
class IsolatedController:
    """A controller of one test, not started yet, and a namespace. It also watches objects of other tests."""

    controller: ControllerProcess
    cluster: NamespaceObjects


@pytest.fixture
def isolated_controller(second_apiserver: ApiServer, tmp_path: Path) -> Iterator[IsolatedController]:
    running = ControllerProcess(second_apiserver, tmp_path)
    with second_apiserver.http() as http:
        yield IsolatedController(running, NamespaceObjects.make(http))
    if running.process is not None:
        running.stop(signal.SIGKILL)


def incident(number: int, kind: str, **more: Any) -> wire.Incident:
    return wire.Incident(id=number, kind=wire.IncidentKind.Value(f"INCIDENT_KIND_{kind}"), **more)


def wait_for_pods(cluster: NamespaceObjects, owner: Document, pods: int = 1) -> None:
    eventually(lambda: len(cluster.status(owner).get("pods") or ()) == pods, "the workload's pods")


def test_job_gets_run_whose_phases_follow_training(
    controller: ControllerProcess, cluster: NamespaceObjects
) -> None:
    job = cluster.job(annotations={cluster_name.RUN_ID: "ctr"})
    found = eventually(lambda: cluster.run(job), "a CheckpointRun")
    uid = job["metadata"]["uid"]
    assert found["metadata"]["name"] == f"train-{uid.replace('-', '')[:8]}"
    assert found["metadata"]["labels"] == {cluster_name.RUN_ID: "ctr", cluster_name.WORKLOAD_UID: uid}
    query = f"?labelSelector={cluster_name.RUN_ID}%3D{run_record.run_label('ctr')}"
    assert len(cluster.http("GET", cluster.path("checkpointruns") + query).document["items"]) == 1
    assert found["spec"]["runId"] == "ctr"
    assert "ownerReferences" not in found["metadata"]  # the CheckpointRun outlives the Job
    cluster.wait_for_status(job, phase="Pending")
    pod = cluster.running_pod(job)
    sidecar = ReportingSidecar(controller, cluster, pod, job)
    reply = sidecar.report(phase="RESTORING")
    assert (reply.sequence, reply.report_run, reply.next_s) == (1, True, 15.0)
    cluster.wait_for_status(job, phase="Restoring")
    kept = wire.KeptCheckpoint(seq=2, step=8, bytes=3 << 30, pins=["best"])
    sidecar.report(step=9, seq=2, committed=8, stored_bytes=3 << 30, checkpoint_count=1, checkpoints=[kept])
    status = cluster.wait_for_status(
        job, phase="Training", step=9, lastCommittedStep=8, stored="3072Mi", bits=8
    )
    assert status["intervalSeconds"] == 300
    assert [(each["seq"], each["pins"]) for each in status["newestCheckpoints"]] == [(2, ["best"])]
    assert cluster.condition(job, "Ready")["status"] == "True"
    labels = {"namespace": cluster.namespace, "run": "train"}
    assert controller.metric("deltashard_run_last_commit_timestamp_seconds", **labels)
    assert controller.metric("deltashard_run_phase", phase="Training", **labels) == 1
    cluster.kubelet(pod, phase="Succeeded", exit_code=0, reason="Completed")
    cluster.end(job)
    status = cluster.wait_for_status(job, phase="Finished", finishedReason="Completed")
    assert status["failures"] == 0
    assert controller.metric("deltashard_run_last_commit_timestamp_seconds", **labels) is None


def test_eviction_is_one_failure_and_restore_is_recorded_once(
    controller: ControllerProcess, cluster: NamespaceObjects
) -> None:
    cluster.node("node-a")
    job = cluster.job()
    first = cluster.running_pod(job)
    ReportingSidecar(controller, cluster, first, job).report(step=100, seq=3, committed=90)
    cluster.wait_for_status(job, phase="Training")
    cluster.kubelet(first, phase="Failed", exit_code=79, disruption="EvictionByEvictionAPI")
    status = cluster.wait_for_status(job, phase="Recovering", failures=0)
    assert [(each["cause"], each["pod"]) for each in status["losses"]] == [
        ("Evicted", first["metadata"]["name"])
    ]
    sidecar = ReportingSidecar(controller, cluster, cluster.running_pod(job), job)
    restored = incident(1, "RESTORED", message="continues from step 90", lost_steps=10, attempt=2)
    again = {"attempt": 2, "step": 91, "seq": 3, "committed": 90, "incidents": [restored]}
    assert (
        sidecar.report(**again).acknowledged_incident == 0
    )  # the count of the second incident is not written yet
    cluster.wait_for_status(job, phase="Training", restores=1, lostSteps=10, attempt=2)
    eventually(lambda: sidecar.report(**again).acknowledged_incident == 1, "the incident is acknowledged")
    events = cluster.events("Restored")
    assert {each["involvedObject"]["kind"] for each in events} == {"CheckpointRun", "Job"}
    assert "continues from step 90" in events[0]["message"]
    assert (len(events), events[0]["type"]) == (2, "Normal")
    assert cluster.wait_for_status(job, failures=1)["restores"] == 1


@pytest.mark.parametrize("kind", ["CheckpointPolicy", "ClusterCheckpointPolicy"])
def test_policy_status_has_run_count_and_store_health(
    controller: ControllerProcess, cluster: NamespaceObjects, kind: str
) -> None:
    """The store has a fault and recovers. A proven capability remains."""
    wide = kind.startswith("Cluster")
    path = cluster.path("checkpointpolicies", "mine")
    if wide:
        path = "/apis/deltashard.io/v1alpha1/clustercheckpointpolicies/mine"
    policy = sample.policy_object("mine", store={"url": "s3://bucket/prefix"}) | {"kind": kind}
    assert cluster.http.create(policy, cluster.namespace).status == 201

    def policy_status() -> dict[str, Any]:
        return dict(cluster.http("GET", path).document.get("status") or {})

    def conditions() -> dict[str, str]:
        return {each["type"]: each["status"] for each in policy_status().get("conditions") or ()}

    job = cluster.job(annotations={cluster_name.POLICY: "cluster/mine" if wide else "mine"})
    pod = cluster.running_pod(job)
    sidecar = ReportingSidecar(controller, cluster, pod, job, url="s3://bucket/prefix")
    failed = incident(1, "STORE_UNAVAILABLE", message="the bucket does not exist")
    sidecar.report(step=5, store_ok=False, incidents=[failed])
    eventually(lambda: conditions() == {"Ready": "False"}, "Ready is False")
    assert "the bucket does not exist" in policy_status()["conditions"][0]["message"]
    sidecar.report(step=9, seq=1, committed=8)
    eventually(lambda: conditions() == {"Ready": "True"}, "Ready is True")
    assert policy_status()["runs"] == 1
    change = {"spec": {"interval": {"every": "77s"}}}
    generation = cluster.http("PATCH", path, change, content=MERGE).document["metadata"]["generation"]
    eventually(lambda: sidecar.report(step=9).directive.policy.every_s == 77.0, "a directive")
    cluster.kubelet(pod, phase="Succeeded", exit_code=0, reason="Completed")
    cluster.end(job)
    eventually(lambda: policy_status()["runs"] == 0, "no run uses the policy")
    assert (conditions(), policy_status()["observedGeneration"]) == ({"Ready": "True"}, generation)


def test_new_controller_continues_after_kill(isolated_controller: IsolatedController) -> None:
    """No condition of a running run changes before sidecars report. Counters keep their values."""
    controller, cluster = isolated_controller.controller, isolated_controller.cluster
    controller.start()
    job, still, gone = cluster.job(), cluster.job("still"), cluster.job("gone")
    pod = cluster.running_pod(job)
    sidecar = ReportingSidecar(controller, cluster, pod, job)
    other = ReportingSidecar(controller, cluster, cluster.running_pod(still), still)
    restored = incident(1, "RESTORED", step=4, lost_steps=2, attempt=2)
    state = {"seq": 1, "committed": 4, "attempt": 2, "incidents": [restored]}
    sidecar.report(step=5, **state)
    other.report(step=5, seq=1, committed=4)
    cluster.wait_for_status(job, phase="Training", restores=1)
    eventually(lambda: cluster.run(gone), "the other Job's CheckpointRun")
    eventually(lambda: len(cluster.events("Restored")) == 2, "both Events")
    quiet = cluster.wait_for_status(still, phase="Training", lastCommittedStep=4)
    controller.stop(signal.SIGKILL)
    cluster.delete("jobs", "gone")
    cluster.kubelet(pod, phase="Running", restarts=1, exit_code=137, reason="OOMKilled")
    controller.start()
    cluster.wait_for_status(gone, phase="Finished", finishedReason="Deleted")
    eventually(lambda: "losses" in cluster.status(job), "the loss by the restart")
    moving = {"observedTime": "", "trainedSeconds": 0}
    assert cluster.status(still) | moving == quiet | moving
    sidecar.report(step=6, **state)
    after = cluster.wait_for_status(job, step=6)
    assert (after["restores"], after["lostSteps"]) == (1, 2)
    assert [each["cause"] for each in after["losses"]] == ["OOMKilled"]
    eventually(lambda: sidecar.report(step=6, **state).acknowledged_incident == 1, "the acknowledgement")
    assert len(cluster.events("Restored")) == 2
    assert controller.stop() == 0, controller.log


def test_deletions_during_api_outage_are_found(
    isolated_controller: IsolatedController, second_apiserver: ApiServer, tmp_path: Path
) -> None:
    """The API server does not know older changes. The controller keeps its leadership and its process."""
    controller, cluster = isolated_controller.controller, isolated_controller.cluster
    policy = sample.policy_object("default", store={"url": "s3://b-c"}, interval={"every": "60s"})
    assert cluster.http.create(policy, cluster.namespace).status == 201
    with FaultyProxy(second_apiserver.port) as proxy:
        direct = f"127.0.0.1:{second_apiserver.port}"
        controller.kubeconfig = tmp_path / "kubeconfig"
        controller.kubeconfig.write_text(
            second_apiserver.kubeconfig.read_text().replace(direct, f"127.0.0.1:{proxy.port}")
        )
        controller.start()
        job, gone = cluster.job(), cluster.job("gone")
        pod, lost = cluster.running_pod(job), cluster.running_pod(job)
        sidecar = ReportingSidecar(controller, cluster, pod, job)
        sidecar.report(step=5, every_s=60.0)
        cluster.wait_for_status(job, phase="Training")
        wait_for_pods(cluster, job, 2)
        eventually(lambda: cluster.run(gone), "the other Job's CheckpointRun")
        proxy.upstream_port = free_port()
        proxy.disconnect()
        cluster.delete("jobs", "gone")
        cluster.delete("pods", lost["metadata"]["name"])
        cluster.delete("checkpointpolicies", "default")
        second_apiserver.kill_api()
        assert controller.get("livez") == (200, "ok")
        second_apiserver.start_api()
        proxy.upstream_port = second_apiserver.port
        cluster.wait_for_status(gone, phase="Finished", finishedReason="Deleted")
        wait_for_pods(cluster, job, 1)
        eventually(
            lambda: sidecar.report(step=5, every_s=60.0).directive.policy.every_s == 300.0,
            "the directive of the chart's policy",
        )
        eventually(lambda: controller.get("healthz")[0] == 200, "health")
        assert controller.metric("deltashard_controller_leading") == 1
        assert controller.stop() == 0, controller.log


def test_pending_writes_are_flushed_on_sigterm(isolated_controller: IsolatedController) -> None:
    controller, cluster = isolated_controller.controller, isolated_controller.cluster
    controller.status_interval_s = 3600.0
    controller.start()
    job = cluster.job()
    sidecar = ReportingSidecar(controller, cluster, cluster.running_pod(job), job)
    sidecar.report(step=5, seq=1, committed=4)
    cluster.wait_for_status(job, phase="Training", lastCommittedStep=4)
    sidecar.report(step=9, seq=2, committed=8)
    assert controller.stop() == 0, controller.log
    assert cluster.status(job)["lastCommittedStep"] == 8


def test_finished_runs_expire_and_do_not_reappear(isolated_controller: IsolatedController) -> None:
    controller, cluster = isolated_controller.controller, isolated_controller.cluster
    controller.keep_finished_days = 3 / 86400
    job = cluster.job()
    controller.start()
    eventually(lambda: cluster.run(job), "a CheckpointRun")
    cluster.end(job)
    eventually(lambda: not cluster.run(job), "the removal of the CheckpointRun")
    controller.stop()
    controller.start()
    other = cluster.job("other")
    eventually(lambda: cluster.run(other), "another CheckpointRun")
    assert not cluster.run(job)


def test_runs_save_before_node_shutdown(controller: ControllerProcess, cluster: NamespaceObjects) -> None:
    node = f"node-{cluster.namespace}"
    cluster.node(node)
    job, other = cluster.job(), cluster.job("other")
    sidecar = ReportingSidecar(controller, cluster, cluster.running_pod(job, node=node), job)
    second = ReportingSidecar(controller, cluster, cluster.running_pod(other, node="elsewhere"), other)
    sidecar.report(step=5)
    second.report(step=5)
    cluster.wait_for_status(job, phase="Training")
    cordon = {"spec": {"unschedulable": True}}
    assert cluster.http("PATCH", f"/api/v1/nodes/{node}", cordon, content=MERGE).status == 200
    reply = eventually(lambda: (found := sidecar.report(step=6)).saves and found, "an order")
    (order,) = reply.saves
    assert (order.id.startswith(f"drain/{node}/"), order.reason, order.urgent) == (True, "drain", False)
    assert reply.next_s == 5.0
    assert not second.report(step=6).saves
    over = wire.SaveResult(id=order.id, outcome=wire.SaveResult.OUTCOME_COMMITTED, step=6, seq=1)
    assert not sidecar.report(step=7, save_results=[over]).saves


def test_pods_carry_newest_checkpoint_time(controller: ControllerProcess, cluster: NamespaceObjects) -> None:
    job = cluster.job()
    pod = cluster.running_pod(job)
    ReportingSidecar(controller, cluster, pod, job).report(step=9, seq=1, committed=8)
    time = eventually(lambda: cluster.status(job).get("lastCommitTime"), "a commit")
    path = cluster.path("pods", pod["metadata"]["name"])

    def noted() -> object:
        notes = cluster.http("GET", path).document["metadata"]["annotations"]
        return notes.get("deltashard.io/checkpoint-time")

    assert eventually(noted, "the annotation", timeout_s=120) == time


def test_unauthorized_report_is_refused_and_run_id_stays_held(
    controller: ControllerProcess, cluster: NamespaceObjects
) -> None:
    first = cluster.job("first", {cluster_name.RUN_ID: "ctr"})
    eventually(lambda: cluster.run(first), "a CheckpointRun")
    second = cluster.job("second", {cluster_name.RUN_ID: "ctr"})
    pod = cluster.running_pod(second)
    wait_for_pods(cluster, second)
    unrelated = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "unrelated"}}
    spec = {"containers": [{"name": "c", "image": "i"}]}
    unknown = cluster.http.create({**unrelated, "spec": spec}, cluster.namespace).document
    assert ReportingSidecar(controller, cluster, unknown, second).post().status == 404
    answer = ReportingSidecar(controller, cluster, pod, first).post()
    assert (answer.status, second["metadata"]["uid"] in answer.text) == (403, True)
    sidecar = ReportingSidecar(controller, cluster, pod, second)
    answer = sidecar.post()
    assert (answer.status, "run id ctr is held by Job first" in answer.text) == (403, True)
    eventually(lambda: cluster.condition(second, "RunIdTaken").get("status") == "True", "the condition")
    assert eventually(lambda: cluster.events("RunIdTaken"), "an Event")
    cluster.end(first)
    eventually(lambda: cluster.condition(second, "RunIdTaken")["status"] == "False", "the end of RunIdTaken")
    sidecar.report(step=1)
    cluster.wait_for_status(second, phase="Training")


def test_deleted_checkpointrun_is_recreated_with_counts(
    controller: ControllerProcess, cluster: NamespaceObjects
) -> None:
    job = cluster.job()
    sidecar = ReportingSidecar(controller, cluster, cluster.running_pod(job), job)
    sidecar.report(step=5, incidents=[incident(1, "RESTORED", lost_steps=4, attempt=1)])
    cluster.wait_for_status(job, restores=1)
    before = cluster.run(job)["metadata"]
    cluster.delete("checkpointruns", before["name"])
    after = cluster.wait_for_status(job, restores=1, lostSteps=4)
    assert after["phase"] == "Training"
    assert cluster.run(job)["metadata"]["uid"] != before["uid"]
