"""Kueue (https://kueue.sigs.k8s.io) in the cluster, by its own chart: built from its Go module, with webhooks.

Its webhooks apply only to namespaces that have its label: it is installed while other scenarios create Jobs, and it
refuses everything until it answers. It manages only the kinds that tests queue, and only objects with a queue's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.cluster import LocalCluster
from tests.cluster.kubernetes.process import run, wait_until
from tests.cluster.scenario import jobset, kubeflow
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.controller import controller_image, wait_created
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.stage import install_once
from tests.support.machine import limit_s
from tests.support.tool import require_tool

NAMESPACE = "kueue-system"
REPOSITORY, TAG = "localhost/kueue", "test"
API = "/apis/kueue.x-k8s.io/v1beta2"
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a workload that waits in a LocalQueue."""
NAME = "small"
"""The name of every queue."""
QUEUE_LABELS = {"deltashard.test/queues": "true"}
"""Label of namespaces whose objects Kueue's webhooks receive."""
FRAMEWORKS = [
    "batch/job",
    "jobset.x-k8s.io/jobset",
    "kubeflow.org/pytorchjob",
    "trainer.kubeflow.org/trainjob",
]
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "integrations": {"frameworks": FRAMEWORKS},
}


@install_once
def install(cluster: LocalCluster, scratch: Path) -> None:
    """Install Kueue; return when a ResourceFlavor exists.

    The controllers of every queued kind are installed first: Kueue notices a kind that is defined later only after
    some time.
    """
    for before in (jobset.install, kubeflow.trainer, kubeflow.training_operator):
        before(cluster, scratch)
    program = require_tool("kueue")
    controller_image(cluster, scratch, program, f"{REPOSITORY}:{TAG}", folders=("visibility",))
    manager = {
        "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    values = {
        "controllerManager.manager": manager,
        "controllerManager.readinessProbe.initialDelaySeconds": 1,  # the chart also uses it as the period
        "controllerManager.featureGates": [{"name": "VisibilityOnDemand", "enabled": False}],
        "managerConfig.controllerManagerConfigYaml": json.dumps(CONFIGURATION),
    }
    text = run(
        require_tool("helm"), "template", "kueue", program.parent / "chart", f"--namespace={NAMESPACE}",
        *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()),
    )  # fmt: skip
    documents = [each for each in yaml.safe_load_all(text) if each and each["kind"] != "APIService"]
    for each in documents:
        for webhook in each.get("webhooks", ()):
            webhook["namespaceSelector"] = {"matchLabels": QUEUE_LABELS}
    manifests = scratch / "kueue.yaml"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    manifests.write_text(yaml.safe_dump_all([namespace, *documents]))
    cluster.kubectl("apply", "--server-side", "-f", manifests)
    cluster.kubectl(
        "wait", "deployment", "--all", "--for=condition=Available", f"--namespace={NAMESPACE}",
        f"--timeout={limit_s(200):.0f}s", timeout_s=240,
    )  # fmt: skip
    wait_created(cluster, f"{API}/resourceflavors", _object("ResourceFlavor"))


def queue(bench: ScenarioBench, **quota: str) -> None:
    """Create a queue in the scenario's namespace, the only one of a ClusterQueue that covers only these resources."""
    name = bench.namespace
    bench.cluster.kubectl(
        "label", "namespace", name, *(f"{key}={value}" for key, value in QUEUE_LABELS.items())
    )
    flavor = {
        "name": NAME,
        "resources": [{"name": what, "nominalQuota": much} for what, much in quota.items()],
    }
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "resourceGroups": [{"coveredResources": [*quota], "flavors": [flavor]}],
    }
    api = bench.cluster.api
    api.create(f"{API}/clusterqueues", _object("ClusterQueue", name, spec=spec))
    local = _object("LocalQueue", spec={"clusterQueue": name})
    api.create(f"{API}/namespaces/{name}/localqueues", local)


def _object(kind: str, name: str = NAME, **more: Any) -> Object:
    return {"apiVersion": API.removeprefix("/apis/"), "kind": kind, "metadata": {"name": name}, **more}


def workload(job: TrainingJob) -> Object | None:
    """Return Kueue's Workload for a workload; None until it exists."""
    found = job.api.items(f"{API}/namespaces/{job.namespace}/workloads")
    owned = [each for each in found if each["metadata"]["ownerReferences"][0]["name"] == job.name]
    return owned[0] if owned else None


def wait_condition(job: TrainingJob, kind: str, status: str = "True") -> Object:
    found: list[Object] = []

    def reported() -> bool:
        conditions = ((workload(job) or {}).get("status") or {}).get("conditions", ())
        found[:] = [each for each in conditions if (each["type"], each["status"]) == (kind, status)]
        return bool(found)

    wait_until(
        reported, timeout_s=120, every_s=0.3,
        what=lambda: f"{job.name} {kind} {status}: {json.dumps((workload(job) or {}).get('status'))}",
    )  # fmt: skip
    return found[0]


def counted(job: TrainingJob) -> list[tuple[int, Object]]:
    """Return (number of pods, reserved quota) of each pod set of an admitted workload."""
    found = workload(job)
    assert found is not None
    parts = found["status"]["admission"]["podSetAssignments"]
    return [(each["count"], each["resourceUsage"]) for each in parts]
