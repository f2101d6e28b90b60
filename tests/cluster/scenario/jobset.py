"""The JobSet controller (https://jobset.sigs.k8s.io) in the cluster, by its own chart, built from its Go module."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.kubernetes.cluster import LocalCluster
from tests.cluster.kubernetes.image import PAUSE
from tests.cluster.kubernetes.process import run
from tests.cluster.scenario.controller import controller_image, wait_created
from tests.cluster.scenario.stage import install_once
from tests.support.machine import limit_s
from tests.support.tool import require_tool

NAMESPACE = "jobset-system"
REPOSITORY, TAG = "localhost/jobset", "test"
FOLDER = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


@install_once
def install(cluster: LocalCluster, scratch: Path) -> None:
    """Install the controller; return when it would accept a JobSet."""
    program = require_tool("jobset")
    controller_image(cluster, scratch, program, f"{REPOSITORY}:{TAG}")
    values = {
        "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
        "controller.resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    run(
        require_tool("helm"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}", "upgrade", "--install",
        "jobset", program.parent / "chart", "--create-namespace",
        "--wait", f"--timeout={limit_s(200):.0f}s",
        *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()),
        timeout_s=240,
    )  # fmt: skip
    probe = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "probe"},
        "spec": {"replicatedJobs": [{"name": "x", "template": {"spec": {"template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "x", "image": PAUSE}],
        }}}}}]},
    }  # fmt: skip
    wait_created(cluster, f"{FOLDER}?dryRun=All", probe)
