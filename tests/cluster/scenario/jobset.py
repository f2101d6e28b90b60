"""The JobSet controller (https://jobset.sigs.k8s.io) in the cluster, by its own chart: built from its Go module, webhooks and all."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.kubernetes.api import ApiError
from tests.cluster.kubernetes.cluster import Cluster
from tests.cluster.kubernetes.image import PAUSE, Image, Layer, archive
from tests.cluster.kubernetes.process import run, wait_until
from tests.cluster.scenario.stage import once
from tests.support.machine import limit_s
from tests.support.tool import built

NAMESPACE = "jobset-system"
REPOSITORY, TAG = "localhost/jobset", "test"
FOLDER = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


@once
def install(cluster: Cluster, scratch: Path) -> None:
    """Have it answer; returns when a JobSet would be taken."""
    program = built("jobset")
    layer = Layer()
    layer.folder("etc")
    layer.folder("tmp", 0o1777)
    layer.file("manager", program.read_bytes(), 0o755)
    image = Image(name=f"{REPOSITORY}:{TAG}", layers=(layer.bytes(),), entrypoint=("/manager",), env={})
    file = archive(scratch / "jobset.tar", [image])
    for node in cluster.nodes.values():
        if not node.pool:
            node.ctr("images", "import", file)
    values = {
        "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
        "controller.resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    run(
        built("helm"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}", "upgrade", "--install",
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

    def taken() -> bool:
        try:
            cluster.api.create(f"{FOLDER}?dryRun=All", probe)
        except ApiError as error:
            if "failed calling webhook" not in str(error) and error.code != 404:
                raise
            return False
        return True

    # Its certificate is made after it began, and the API server hears of that a little later.
    wait_until(taken, timeout_s=120, every_s=0.5, what="the JobSet webhook answers")
