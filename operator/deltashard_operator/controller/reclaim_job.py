"""Job that removes the bytes of a finished run. Pure.

It runs `deltashard reclaim` in the run's namespace with the credentials of the run's policy, complies with PSA
*restricted* and has no API token. It has no owner, so that a started removal finishes even if the CheckpointRun is
deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from deltashard_operator.api import store_access
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import restricted
from deltashard_operator.kube.cluster_name import CACHE_PATH, CACHE_VOLUME, USER_ID, WORKLOAD_UID
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.watched_run import WatchedRun

CONTAINER = "reclaim"
RESULT_PATH = "/dev/termination-log"
"""File from which the kubelet copies the termination message into the pod's status."""
Document = dict[str, Any]


def job_name(run: WatchedRun) -> str:
    """Return the name of the Job for this end of the run, equal for all tries. A JobSet can end more than once."""
    end = f"{run.workload.uid} {timestamp(run.finished_at_s)}"
    return f"deltashard-reclaim-{hashlib.sha256(end.encode()).hexdigest()[:12]}"


def manifest(run: WatchedRun, policy: Policy) -> Document:
    namespace = run.workload.namespace
    sidecar, (volumes, mounts) = policy.sidecar, store_access.files(policy)
    settings = store_access.settings(policy) | restricted.HOME
    environment = [{"name": key, "value": value} for key, value in settings.items()]
    run_of = ["--run", f"{namespace}/{run.run_id}", "--workload", run.workload.uid]
    container: Document = {
        "name": CONTAINER,
        "image": sidecar["image"],
        "imagePullPolicy": sidecar["imagePullPolicy"],
        "command": ["deltashard", "reclaim", policy.url],
        "args": [*run_of, "--result-file", RESULT_PATH, "--json"],
        "env": [*environment, *sidecar["env"]],
        "resources": {  # a quota of the namespace may require all four
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": sidecar["resources"]["limits"]["cpu"], "memory": "1Gi"},
        },
        "securityContext": restricted.security_context(sidecar["runAsUser"], USER_ID),
        "terminationMessagePath": RESULT_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": CACHE_VOLUME, "mountPath": CACHE_PATH}, *mounts],
    }
    pod: Document = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [{"name": CACHE_VOLUME, "emptyDir": {"sizeLimit": "256Mi"}}, *volumes],
    }
    if sidecar["imagePullSecrets"]:
        pod["imagePullSecrets"] = [{"name": each} for each in sidecar["imagePullSecrets"]]
    if policy.reclaim_account:
        pod["serviceAccountName"] = policy.reclaim_account
    labels = {
        **policy.reclaim_labels,
        "app.kubernetes.io/part-of": "deltashard",
        "app.kubernetes.io/component": "reclaim",
        WORKLOAD_UID: run.workload.uid,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(run), "namespace": namespace, "labels": labels},
        "spec": {
            "backoffLimit": 6,
            "activeDeadlineSeconds": 6 * 3600,
            "ttlSecondsAfterFinished": 24 * 3600,  # keeps the log; no new Job is created before
            "template": {
                "metadata": {**restricted.NO_MESH, "labels": labels | restricted.NO_MESH["labels"]},
                "spec": pod,
            },
        },
    }


def outcome(job: Mapping[str, Any]) -> str | None:
    """Return why a Job failed, an empty string if it completed, or None if it is running."""
    conditions = {
        each["type"]: each for each in job.get("status", {}).get("conditions", ()) if each["status"] == "True"
    }
    if failed := conditions.get("Failed"):
        return str(failed.get("message") or failed.get("reason") or "it failed")
    return "" if "Complete" in conditions else None


def termination_message(pods: list[Document]) -> str:
    """Return the termination message of the newest of a Job's pods, or an empty string."""
    ended = [
        each.get("state", {}).get("terminated", {})
        for pod in pods
        for each in pod.get("status", {}).get("containerStatuses", ())
        if each["name"] == CONTAINER
    ]
    return max(
        ((each.get("finishedAt", ""), each.get("message", "").strip()) for each in ended), default=("", "")
    )[1]


def read(message: str) -> tuple[ReclaimState, str]:
    """Parse the termination message of a successful Job: see `deltashard reclaim --result-file`."""
    try:
        found = json.loads(message)
        gone = f"{found['runs']:d} runs, {found['objects']:d} objects, {found['bytes']:d} bytes"
        stay = f"{found['retained']:d} runs"
        why = "; ".join(f"{each['run']}: {each['why']}" for each in found["kept"])
    except (ValueError, TypeError, KeyError):
        return ReclaimState.FAILED, "the Job completed, but its result cannot be parsed; see the Job's log"
    if found["retained"]:
        return ReclaimState.KEPT, f"the bytes of {stay} are kept: {why}; removed: {gone}"
    return ReclaimState.REMOVED, f"the bytes are removed: {gone}"
