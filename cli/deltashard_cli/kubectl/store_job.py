"""Manifest of a Job that runs one `deltashard` command on a run's store with its sidecar's credentials. Pure.

A user of `kubectl` has no store credentials. The Job copies image, environment variables and Secret from the sidecar's
container as injection wrote them, and nothing else from the pod's containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_checkpoint.errors import UserError

SIDECAR = "deltashard-sidecar"
URL = "DELTASHARD_URL"
NON_STORE_PREFIXES = ("DELTASHARD_", "POD_", "NODE_")
"""Prefixes of the sidecar's variables that do not configure the store."""
MEMORY, TOKENS = "deltashard-shm", "deltashard-token"
FLEET = "fleet"
"""Path of the token for the controller; the other tokens are for the store."""
POD_FIELDS = ("serviceAccountName", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations")
"""Fields that the pod needs to be admitted and scheduled like the run's pods."""
NO_MESH = {
    "labels": {"sidecar.istio.io/inject": "false"},
    "annotations": {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"},
}
"""Disables proxy injection: a Job does not complete while a proxy container runs."""
DEADLINE_S = 600
TTL_S = 3600
Document = Mapping[str, Any]


def manifest(run: Document, pod: Document, arguments: Sequence[str], *, name: str) -> dict[str, Any]:
    """Return the Job's manifest.

    Args:
        run: the CheckpointRun.
        pod: injected spec of one of its pods or of its template.
        arguments: the command and its arguments, without store and run.
        name: prefix of the Job's name.

    Raises:
        UserError: the pod has no sidecar.
    """
    sidecar = next((each for each in pod.get("initContainers") or () if each["name"] == SIDECAR), None)
    if sidecar is None:
        raise UserError(
            "there is no deltashard-sidecar container", where=f"the pod template of {run['metadata']['name']}"
        )
    namespace = run["metadata"]["namespace"]
    wanted = {each["name"] for each in sidecar.get("volumeMounts") or ()}
    volumes = [
        kept
        for each in pod.get("volumes") or ()
        if each["name"] in wanted and (kept := _of_store(each)) is not None
    ]
    there = {each["name"] for each in volumes}
    mounts = [each for each in sidecar.get("volumeMounts") or () if each["name"] in there]
    container = {
        "name": "deltashard",
        "image": sidecar["image"],
        "command": [
            "deltashard",
            arguments[0],
            f"$({URL})",
            "--run",
            f"{namespace}/{run['spec']['runId']}",
            *arguments[1:],
        ],
        "env": [
            each
            for each in sidecar.get("env") or ()
            if each["name"] == URL or not each["name"].startswith(NON_STORE_PREFIXES)
        ],
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    }
    for key in ("imagePullPolicy", "securityContext"):
        if key in sidecar:
            container[key] = sidecar[key]
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
        **{key: pod[key] for key in POD_FIELDS if key in pod},
    }
    labels = {
        "app.kubernetes.io/part-of": "deltashard",
        "app.kubernetes.io/component": f"store-{arguments[0]}",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": f"{name[:40].rstrip('-.')}-", "namespace": namespace, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": DEADLINE_S,
            "ttlSecondsAfterFinished": TTL_S,
            "template": {"metadata": {**NO_MESH, "labels": labels | NO_MESH["labels"]}, "spec": spec},
        },
    }


def _of_store(volume: Document) -> Document | None:
    """Return a volume of the sidecar, reduced to its store credentials; None if it has none."""
    if volume["name"] == MEMORY:
        return None
    if volume["name"] != TOKENS:
        return volume
    projected = volume["projected"]
    sources = [
        each for each in projected["sources"] if each.get("serviceAccountToken", {}).get("path") != FLEET
    ]
    return {**volume, "projected": {**projected, "sources": sources}} if sources else None
