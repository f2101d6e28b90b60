"""Groups as Kubeflow defines them: a PyTorchJob, and a TrainJob with its runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.image import PYTHON
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.group import ENVIRONMENT, GRACE_S, TrainingGroup
from tests.cluster.scenario.job import JOBSET, PYTORCH_JOB, TRAIN_JOB


def _pod(made: Object, called: str, **env: str) -> Object:
    spec: Object = made["spec"]["template"]["spec"]
    trainer = spec["containers"][0]
    trainer |= {"name": called, "args": ["/app/group.py"]}
    more = {**ENVIRONMENT, **env}
    trainer["env"] = [*trainer["env"], *({"name": key, "value": value} for key, value in more.items())]
    return {**spec, "terminationGracePeriodSeconds": GRACE_S}


def pytorch_job(
    bench: ScenarioBench, name: str, *, workers: int, labels: Mapping[str, str] | None = None, **more: Any
) -> TrainingGroup:
    """Build a PyTorchJob of a master and `workers` workers, whose ranks its operator numbers."""
    made = bench.manifest(name, **more)
    template = _pod(made, "pytorch", LOCAL_RANK="0")
    del template["restartPolicy"]
    part = {
        "restartPolicy": "OnFailure",
        "template": {"metadata": {"annotations": made["metadata"]["annotations"]}, "spec": template},
    }
    parts = {"Master": {"replicas": 1, **part}, "Worker": {"replicas": workers, **part}}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": {**(labels or {})}},
        "spec": {"pytorchReplicaSpecs": parts},
    }
    return TrainingGroup(bench, bench.applied(manifest, PYTORCH_JOB))


def train_job(
    bench: ScenarioBench,
    name: str,
    *,
    nodes: int,
    labels: Mapping[str, str] | None = None,
    rendered: Callable[[Object], Object] = lambda runtime: runtime,
    **more: Any,
) -> TrainingGroup:
    """Build a TrainJob of `nodes` nodes and the runtime that it names. Its controller makes a JobSet, which has the run."""
    made = bench.manifest(name, **more)
    template = _pod(made, "node")
    job = {
        "metadata": {
            "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"},
            "annotations": made["metadata"]["annotations"],
        },
        "spec": {"backoffLimit": 1000, "template": {"spec": template}},
    }
    jobset = {
        "network": {"publishNotReadyAddresses": False},
        "replicatedJobs": [{"name": "node", "template": job}],
    }
    group = TRAIN_JOB.api.removeprefix("/apis/")
    runtime = {
        "apiVersion": group,
        "kind": "TrainingRuntime",
        "metadata": {"name": "torch"},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 1}}, "template": {"spec": jobset}},
    }
    bench.cluster.api.create(
        f"{TRAIN_JOB.api}/namespaces/{bench.namespace}/trainingruntimes", rendered(runtime)
    )
    manifest = {
        "apiVersion": group,
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {**(labels or {})}},
        "spec": {
            "runtimeRef": {"apiGroup": group.partition("/")[0], "kind": "TrainingRuntime", "name": "torch"},
            "trainer": {
                "numNodes": nodes,
                "numProcPerNode": 1,
                "command": [PYTHON, "-m", "torch.distributed.run"],
                "args": ["/app/group.py"],
            },
        },
    }
    made_of = bench.applied(manifest, TRAIN_JOB)
    path = f"{JOBSET.api}/namespaces/{bench.namespace}/{JOBSET.plural}/{name}"
    wait_until(lambda: bench.cluster.api.find(path), timeout_s=60, what=f"the JobSet of TrainJob {name}")
    made_of.uid = bench.cluster.api.get(path)["metadata"]["uid"]
    return TrainingGroup(bench, made_of)
