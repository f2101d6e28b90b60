"""The examples of examples/kubernetes: as written, as their controllers make them, as they are injected."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from deltashard_operator.api.workload_policy import merged
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample
from tests.support.published import PUBLISHED
from tests.support.server.minio_server import ROOT

EXAMPLES = ROOT / "examples" / "kubernetes"


UID = "7f0e4f0a-1c52-4c43-9d3c-3f5d1df1a009"


DEFAULTS = {
    "sidecar": {"image": PUBLISHED[0].name},
    "fleet": {
        "address": "deltashard-fleet.deltashard-system.svc:9443",
        "ca": "-----BEGIN CERTIFICATE-----\n",
    },
}
"""Like the chart's: all but the store."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))


POLICY = documents(EXAMPLES / "policy.yaml")[0]


WORKLOADS = [path for path in MANIFESTS if f"{cluster_name.POLICY}:" in path.read_text()]


def _owned(kind: str, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    version, name = manifest["apiVersion"], manifest["metadata"]["name"]
    return [{"apiVersion": version, "kind": kind, "name": name, "uid": UID, "controller": True}]


def _of_jobset(name: str, replicated: dict[str, Any]) -> dict[str, Any]:
    """Return the first Job that the JobSet controller makes of one of its templates."""
    job = copy.deepcopy(replicated["template"])
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/jobset-uid": UID,
        "jobset.sigs.k8s.io/job-global-index": "0",
        "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
    }
    metadata = job.get("metadata") or {}
    metadata["name"] = f"{name}-{replicated['name']}-0"
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    pods = job["spec"]["template"].setdefault("metadata", {})
    pods["labels"] = {**(pods.get("labels") or {}), **labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["spec"]}


def _of_pytorch_job(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the first worker that the training operator makes of it."""
    name, template = (
        manifest["metadata"]["name"],
        manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"],
    )
    metadata = template["metadata"]
    metadata["name"] = f"{name}-worker-0"
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": "0",
    }
    metadata["ownerReferences"] = _owned("PyTorchJob", manifest)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def admitted(path: Path) -> dict[str, Any]:
    """Return what the webhook receives: the manifest, or what its controller makes of it."""
    manifest = copy.deepcopy(documents(path)[0])
    kind, spec, name = manifest["kind"], manifest["spec"], manifest["metadata"]["name"]
    if kind == "CronJob":
        metadata = {**spec["jobTemplate"]["metadata"], "name": f"{name}-29012345"}
        metadata["ownerReferences"] = _owned(kind, manifest)
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": spec["jobTemplate"]["spec"],
        }
    if kind == "JobSet":
        return _of_jobset(name, spec["replicatedJobs"][0])
    if kind == "TrainingRuntime":
        return _of_jobset(
            documents(path)[1]["metadata"]["name"], spec["template"]["spec"]["replicatedJobs"][0]
        )
    if kind == "PyTorchJob":
        return _of_pytorch_job(manifest)
    if kind == "StatefulSet":
        metadata = spec["template"]["metadata"]
        metadata["name"] = f"{name}-0"
        metadata["labels"]["apps.kubernetes.io/pod-index"] = "0"
        metadata["ownerReferences"] = _owned(kind, manifest)
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec["template"]["spec"]}
    return manifest


def injected(path: Path) -> dict[str, Any]:
    document = admitted(path)
    response = sample.answer(document, merged(POLICY["spec"], DEFAULTS))
    assert response["allowed"], response
    return sample.applied(document, response)
