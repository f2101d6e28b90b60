"""deltashard itself disappears and returns: training continues, and unrelated workloads are unaffected.

Each of these scenarios has the stage for itself and begins with a fresh installation of the chart.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.cluster.kubernetes import image
from tests.cluster.kubernetes.api import ApiError, Object
from tests.cluster.kubernetes.cluster import UNRELIABLE
from tests.cluster.kubernetes.image import OLD_TAG, OLD_VERSION, TAG, TRAINER
from tests.cluster.kubernetes.node import POOL
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import POLICY, RESTRICTED, SIDECAR
from tests.cluster.scenario.reference import checkpoints, command_line
from tests.cluster.scenario.stage import ClusterStage
from tests.cluster.scenario.system import CHART, CONTROLLER, NAMESPACE, RELEASE, WEBHOOK
from tests.load.simulation import audit
from tests.support.machine import limit_s

pytestmark = [pytest.mark.exclusive, pytest.mark.timeout(600, func_only=True)]

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{CONTROLLER}"
SERVED_S = 30.0
"""Time limit in which another controller replaces a lost one."""


@pytest.fixture(autouse=True)
def installed(stage: ClusterStage, stage_lock: None) -> None:
    """Install this tree's deltashard, also after a scenario that failed."""
    stage.system.install()


def unrelated_objects(bench: ScenarioBench) -> list[tuple[str, Object]]:
    """Return (path, object) of workloads without annotations, or with those of other tools."""
    container = {"name": "c", "image": f"{TRAINER}:{TAG}", "args": ["-c", "0"], "securityContext": RESTRICTED}
    spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    found: list[tuple[str, Object]] = []
    for number, notes in enumerate(({}, {"annotations": {}}, {"annotations": {"else/where": "x"}})):
        metadata = {"name": f"unrelated-{number}", **notes}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        template = {
            "metadata": {key: value for key, value in metadata.items() if key != "name"},
            "spec": spec,
        }
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
        found += [
            (f"/api/v1/namespaces/{bench.namespace}/pods", pod),
            (f"/apis/batch/v1/namespaces/{bench.namespace}/jobs", job),
        ]
    return found


def test_helm_test_passes(bench: ScenarioBench) -> None:
    output = bench.stage.system.helm("test", RELEASE, "--logs", f"--timeout={limit_s(180):.0f}s")
    assert "Phase:          Succeeded" in output, output
    bench.note(output[output.index("POD LOGS") :])


def test_training_continues_without_operator(bench: ScenarioBench) -> None:
    cluster, system = bench.cluster, bench.stage.system
    job = bench.job("no-operator")
    start = bench.start_event(job, 0)
    bench.wait_commits(job)
    cluster.kubectl(
        "delete", "deployment", WEBHOOK, CONTROLLER, "-n", NAMESPACE, "--cascade=foreground", "--wait"
    )
    wait_until(lambda: not system.pods(), timeout_s=90, what="every pod of the system gone")
    bench.note("the system is gone")

    before = bench.newest(job)
    bench.wait_commits(job, beyond=before, count=2)
    job.delete_pod(start["pod"])
    successor = bench.start_event(job, 1)
    bench.assert_resumed(successor, at_least=bench.event_server.last_step(start["process"]) - 1)
    for path, document in unrelated_objects(bench):
        cluster.api.create(path, document)
    wait_until(
        lambda: (
            cluster.api.get(f"/api/v1/namespaces/{bench.namespace}/pods/unrelated-0")["status"]["phase"]
            == "Succeeded"
        ),
        timeout_s=90,
        what="an unrelated pod ran",
    )
    jobs = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs"
    with pytest.raises(ApiError, match="failed calling webhook"):
        cluster.api.create(jobs, bench.manifest("refused"))
    # With failurePolicy Ignore the webhook is not called; a Job that would train without checkpoints is still refused.
    for number in (0, 1):
        change = [{"op": "replace", "path": f"/webhooks/{number}/failurePolicy", "value": "Ignore"}]
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
        cluster.api.patch(path, change, "json")

    def refused_by_policy() -> bool:
        with pytest.raises(ApiError) as refused:
            cluster.api.create(f"{jobs}?dryRun=All", bench.manifest("refused"))
        return f"no {SIDECAR}" in str(refused.value)

    wait_until(refused_by_policy, timeout_s=30, what="the policy refuses a Job without its sidecar")

    at_return = bench.newest(job)
    system.install()
    bench.note("the system is installed again")
    status = job.wait_status(
        "newer commits are known", lambda run: run.get("lastCommittedStep", 0) > at_return, timeout_s=90
    )
    assert status["restores"] == 1, "the restore while no controller ran"
    bench.assert_store_whole(job)


def test_leader_node_loss_fails_over(bench: ScenarioBench) -> None:
    """The replica on another node serves within 30 s: a changed policy reaches a pod, and a new Job gets its run."""
    cluster, system = bench.cluster, bench.stage.system
    selector = {"matchLabels": {"app.kubernetes.io/component": "controller"}}
    anti_affinity = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}]
    system.install(
        values={
            "controller.nodeSelector": {POOL: UNRELIABLE},
            "controller.tolerations": [{"key": POOL, "value": UNRELIABLE, "effect": "NoSchedule"}],
            "controller.affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": anti_affinity}
            },
        }
    )
    bench.policy(bench.namespace, "hourly", interval={"every": "1h"})
    job = bench.job("changed-policy", notes={POLICY: "hourly"})
    bench.start_event(job, 0)
    job.wait_phase("Training")
    assert not checkpoints(bench.url, job.run), "no timer yet"
    replicas = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in system.pods()
        if pod["metadata"]["name"].startswith(f"{CONTROLLER}-")
    }
    assert sorted(replicas.values()) == ["m1", "m2"]
    leader = cluster.api.get(LEASE)["spec"]["holderIdentity"]
    lost = cluster.nodes[replicas[leader]]
    try:
        lost.freeze()
        began_s = time.monotonic()
        bench.note(f"{lost.name} is frozen, and {leader} with it")
        change = {"spec": {"interval": {"every": "1s"}}}
        path = f"/apis/deltashard.io/v1alpha1/namespaces/{bench.namespace}/checkpointpolicies/hourly"
        cluster.api.patch(path, change)
        other = bench.job("new")
        wait_until(
            lambda: other.checkpoint_run() and checkpoints(bench.url, job.run),
            timeout_s=SERVED_S,
            every_s=0.2,
            what="the new Job has its run, and the changed policy is in force",
        )
        bench.note(f"another controller serves after {time.monotonic() - began_s:.1f} s")
        assert cluster.api.get(LEASE)["spec"]["holderIdentity"] in {*replicas} - {leader}
        job.wait_status("the new interval", lambda run: run.get("intervalSeconds") == 1, timeout_s=90)
    finally:
        lost.thaw()
    cluster.wait_node(lost.name)
    bench.assert_store_whole(job)


def test_controller_writes_no_user_objects(stage: ClusterStage, stage_lock: None) -> None:
    """The API server's audit log has no write of the controller to a user's object, in all scenarios so far."""
    calls = list(audit.requests(stage.cluster.audit_log, f"system:serviceaccount:{NAMESPACE}:{CONTROLLER}"))
    statuses = [each for each in calls if each.resource == "checkpointruns/status" and each.status == 200]
    assert statuses, "the controller wrote no status"
    # A namespace that is being deleted refuses its own Events: refusals are not findings here.
    assert not audit.violations(each for each in calls if each.status < 400)


def test_uninstall_and_upgrade(bench: ScenarioBench, tmp_path: Path) -> None:
    """Jobs train and checkpoints are readable without deltashard. An older version's run resumes under the newer one."""
    cluster, system = bench.cluster, bench.stage.system
    job = bench.job("survivor")
    start = bench.start_event(job, 0)
    bench.wait_commits(job)
    system.uninstall()
    bench.note("uninstalled")
    bench.wait_commits(job, beyond=bench.newest(job), count=2)
    bench.event_server.wait_step(start["process"], 1, timeout_s=60)
    bench.assert_store_whole(job)
    assert command_line("ls", bench.url)
    plain = bench.manifest("plain", steps=1)
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs?dryRun=All"
    made = cluster.api.create(path, plain)  # annotated, and no webhook remains
    assert "initContainers" not in made["spec"]["template"]["spec"]
    job.delete()

    archive = image.build(tmp_path / "old.tar", tag=OLD_TAG, version=OLD_VERSION)
    for node in cluster.nodes.values():
        if not node.pool:
            node.ctr("images", "import", archive)
    chart = tmp_path / "deltashard"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    file.write_text(
        file.read_text()
        .replace("version: ", f"version: {OLD_VERSION} # ")
        .replace("appVersion: ", f"appVersion: {OLD_VERSION} # ")
    )
    system.install(tag=OLD_TAG, chart=chart)
    bench.note("the older version is installed")
    old = bench.job("upgraded")
    first = bench.start_event(old, 0)
    bench.wait_commits(old)
    assert image_of_sidecar(bench, first["pod"]).endswith(f":{OLD_TAG}")
    system.install()
    bench.note("the newer version is installed")
    bench.wait_commits(old, beyond=bench.newest(old))
    old.delete()
    # Templates are immutable: a Job keeps its original sidecar. The next Job resumes its run.
    newer = bench.job("upgraded", notes={"deltashard.io/run-id": old.run_id})
    second = bench.start_event(newer, 1)
    assert image_of_sidecar(bench, second["pod"]).endswith(f":{TAG}")
    bench.assert_resumed(second, at_least=bench.event_server.last_step(first["process"]) - 1)
    bench.wait_commits(old, beyond=second["step"])
    bench.assert_store_whole(old)


def image_of_sidecar(bench: ScenarioBench, pod: str) -> str:
    found = bench.cluster.api.get(f"/api/v1/namespaces/{bench.namespace}/pods/{pod}")
    return str(next(each["image"] for each in found["spec"]["initContainers"] if each["name"] == SIDECAR))
