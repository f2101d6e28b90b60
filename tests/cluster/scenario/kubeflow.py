"""Kubeflow's two controllers in the cluster, by their own manifests: built from Go modules, with webhooks and certificates.

The training operator v1 serves PyTorchJobs only, whose definition is large enough. Its workers wait for a master in
an init container with a project image: the operator accepts another template for it, and PodSecurity restricted would
refuse the default one. The Trainer v2 makes JobSets of TrainJobs, so the JobSet controller must be installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.cluster import LocalCluster
from tests.cluster.kubernetes.image import PAUSE, PYTHON, TAG, TRAINER
from tests.cluster.scenario.controller import controller_image, wait_created
from tests.cluster.scenario.job import PYTORCH_JOB, RESTRICTED, TRAIN_JOB, WorkloadType
from tests.cluster.scenario.stage import install_once
from tests.support.machine import limit_s
from tests.support.tool import require_tool

WAIT_FOR_MASTER = (
    "import socket, sys, threading\n"
    "for _ in range(600):\n"
    "    try:\n"
    "        socket.getaddrinfo('{{.MasterAddr}}', 0)\n"
    "    except OSError:\n"
    "        threading.Event().wait(0.5)\n"
    "    else:\n"
    "        sys.exit()\n"
    "sys.exit(1)\n"
)


@install_once
def training_operator(cluster: LocalCluster, scratch: Path) -> None:
    waits = {
        "name": "init-pytorch",
        "image": f"{TRAINER}:{TAG}",
        "imagePullPolicy": "Never",
        "command": [PYTHON, "-c", WAIT_FOR_MASTER],
        "securityContext": {**RESTRICTED, "runAsUser": 1001},
    }
    _install(
        cluster,
        scratch,
        tool="training-operator",
        image="ghcr.io/kubeflow/training-v1/training-operator",
        resources=[
            "crds/kubeflow.org_pytorchjobs.yaml", "rbac/cluster-role-binding.yaml", "rbac/role.yaml",
            "rbac/service-account.yaml", "webhook", "service.yaml", "deployment.yaml",
        ],
        certificate="training-operator-webhook-cert",
        arguments=["--enable-scheme=pytorchjob"],
        files={"etc/config/initContainer.yaml": json.dumps([waits]).encode()},
    )  # fmt: skip
    template = {"spec": {"containers": [{"name": "pytorch", "image": PAUSE}]}}
    _wait_accepted(
        cluster,
        PYTORCH_JOB,
        "PyTorchJob",
        {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}},
    )


@install_once
def trainer(cluster: LocalCluster, scratch: Path) -> None:
    _install(
        cluster,
        scratch,
        tool="kubeflow-trainer",
        image="ghcr.io/kubeflow/trainer/trainer-controller-manager",
        resources=["crds", "manager", "rbac", "webhook"],
        certificate="kubeflow-trainer-webhook-cert",
    )
    runtime = WorkloadType(TRAIN_JOB.api, "trainingruntimes", "")
    template = {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": PAUSE}]}}}}
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            **template,
        },
    }
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    _wait_accepted(cluster, runtime, "TrainingRuntime", spec)


def _install(
    cluster: LocalCluster,
    scratch: Path,
    *,
    tool: str,
    image: str,
    resources: list[str],
    certificate: str,
    arguments: list[str] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Apply a controller's manifests as its own overlay does, with an image of its program and `files`."""
    program = require_tool(tool)
    name = f"localhost/{tool}"
    controller_image(cluster, scratch, program, f"{name}:{TAG}", folders=("etc/config",), files=files)
    folder, namespace = scratch / tool, f"{tool}-system"
    shutil.copytree(program.parent / "manifests", folder)
    container = "/spec/template/spec/containers/0"
    changes = {
        "imagePullPolicy": "Never",
        "command": ["/manager", *(arguments or [])],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1},
    }
    patch = [{"op": "add", "path": f"{container}/{key}", "value": value} for key, value in changes.items()]
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": resources,
        "images": [{"name": image, "newName": name, "newTag": TAG}],
        "secretGenerator": [{"name": certificate, "options": {"disableNameSuffixHash": True}}],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(overlay))
    if cluster.api.find(f"/api/v1/namespaces/{namespace}") is None:
        cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("apply", "--server-side", "-k", folder)
    cluster.kubectl(
        "wait", "deployment", "--all", "--for=condition=Available", f"--namespace={namespace}",
        f"--timeout={limit_s(200):.0f}s", timeout_s=240,
    )  # fmt: skip


def _wait_accepted(cluster: LocalCluster, kind: WorkloadType, called: str, spec: Object) -> None:
    group = kind.api.removeprefix("/apis/")
    probe = {"apiVersion": group, "kind": called, "metadata": {"name": "probe"}, "spec": spec}
    wait_created(cluster, f"{kind.api}/namespaces/default/{kind.plural}?dryRun=All", probe)
