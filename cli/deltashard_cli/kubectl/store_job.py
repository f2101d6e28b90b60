"""A Job that runs one command of `deltashard` on a run's store, with what its sidecar reaches the store by. Pure.

Who uses `kubectl` has no keys of the store; the sidecar's container has: image, variables and Secret are taken over
from it as injection wrote them, and nothing else of the pod is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_checkpoint.errors import UserError

SIDECAR = "deltashard-sidecar"
URL = "DELTASHARD_URL"
NON_STORE_PREFIXES = ("DELTASHARD_", "POD_", "NODE_")
"""How variables begin that are of the sidecar's own matters."""
MEMORY, TOKENS = "deltashard-shm", "deltashard-token"
FLEET = "fleet"
"""Path of the token that the controller wants; the others are for the store."""
POD_FIELDS = ("serviceAccountName", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations")
"""What the pod needs to be admitted and scheduled as the run's are."""
NO_MESH = {
    "labels": {"sidecar.istio.io/inject": "false"},
    "annotations": {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"},
}
"""Beside a proxy that does not end, no Job completes."""
DEADLINE_S = 600
TTL_S = 3600
Document = Mapping[str, Any]


def manifest(run: Document, pod: Document, arguments: Sequence[str], *, name: str) -> dict[str, Any]:
    """The Job.

    Args:
        run: the CheckpointRun.
        pod: spec of one of its pods or of its template, injected.
        words: the command and its arguments, without store and run.
        name: what the Job's name begins with.

    Raises:
        UserError: the pod has no sidecar.
    """
    sidecar = next((each for each in pod.get("initContainers") or () if each["name"] == SIDECAR), None)
    if sidecar is None:
        raise UserError(
            "there is no deltashard-sidecar in it", where=f"the pod template of {run['metadata']['name']}"
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
    """A volume of the sidecar's, as far as the store is reached by it; None: not at all."""
    if volume["name"] == MEMORY:
        return None
    if volume["name"] != TOKENS:
        return volume
    projected = volume["projected"]
    sources = [
        each for each in projected["sources"] if each.get("serviceAccountToken", {}).get("path") != FLEET
    ]
    return {**volume, "projected": {**projected, "sources": sources}} if sources else None
