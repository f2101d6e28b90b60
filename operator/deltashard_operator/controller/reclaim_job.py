"""The Job that removes a finished run's bytes. Pure.

It runs `deltashard reclaim` in the run's namespace, with the credentials of the run's policy. It is fit for PSA
*restricted* and has no token of the API. It belongs to nobody: a removal that is begun is to end, also when the
CheckpointRun is deleted meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deltashard_operator.api import store_access
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import restricted
from deltashard_operator.kube.cluster_name import (
    CACHE_PATH,
    CACHE_VOLUME,
    FINISHED_AT,
    USER_ID,
    WORKLOAD_UID,
)
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.watched_run import Run

CONTAINER = "reclaim"
SAID = "/dev/termination-log"
"""Where the kubelet finds the container's last word, and the pod's status has it."""
SCRATCH = "256Mi"
TRIES = 3
DEADLINE_S = 6 * 3600
KEPT_S = 3600
"""The ended Job stays so long for its log's readers; the next one is never made before."""
Document = dict[str, Any]


def job_name(run: Run) -> str:
    """Name of the run's Job: the same for every try."""
    return f"deltashard-reclaim-{run.workload.uid.replace('-', '')[:12].lower()}"


def manifest(run: Run, policy: Policy) -> Document:
    namespace = run.workload.namespace
    files = store_access.files(policy)
    settings = store_access.settings(policy) | restricted.HOME
    environment = [(key, value) for key, value in settings.items() if value] + list(policy.extension.env)
    run_of = ["--run", f"{namespace}/{run.run_id}", "--workload", run.workload.uid]
    container: Document = {
        "name": CONTAINER,
        "image": policy.image,
        "imagePullPolicy": policy.image_pull_policy,
        "command": ["deltashard", "reclaim", policy.url],
        "args": [*run_of, "--said", SAID, "--json"],
        "env": [{"name": key, "value": value} for key, value in environment],
        "resources": {  # a quota of the namespace may want all four
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": f"{max(policy.cpu_limit_millis, 100)}m", "memory": "1Gi"},
        },
        "securityContext": restricted.security_context(policy.run_as_user, USER_ID),
        "terminationMessagePath": SAID,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": CACHE_VOLUME, "mountPath": CACHE_PATH}, *files.mounts],
    }
    pod: Document = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [{"name": CACHE_VOLUME, "emptyDir": {"sizeLimit": SCRATCH}}, *files.volumes],
    }
    if policy.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in policy.image_pull_secrets]
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
        "metadata": {
            "name": job_name(run),
            "namespace": namespace,
            "labels": labels,
            "annotations": {FINISHED_AT: timestamp(run.finished_at_s)},
        },
        "spec": {
            "backoffLimit": TRIES,
            "activeDeadlineSeconds": DEADLINE_S,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {
                "metadata": {**restricted.NO_MESH, "labels": labels | restricted.NO_MESH["labels"]},
                "spec": pod,
            },
        },
    }


def is_ours(job: Mapping[str, Any], run: Run) -> bool:
    """Whether a Job of this name was made for this run, and for this end of it: a JobSet may end more than once."""
    metadata = job["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    mine = run.workload.uid, timestamp(run.finished_at_s)
    return (labels.get(WORKLOAD_UID), notes.get(FINISHED_AT)) == mine


def outcome(job: Mapping[str, Any]) -> str | None:
    """Why a Job failed; empty: it did not; None: it is at work."""
    for each in (job.get("status") or {}).get("conditions") or ():
        if each.get("status") == "True" and each.get("type") in {"Complete", "Failed"}:
            if each["type"] == "Complete":
                return ""
            return str(each.get("message") or each.get("reason") or "it failed")
    return None


def last_word(pods: list[Document]) -> str:
    """What the newest of a Job's pods said at its end; empty where none did."""
    found = []
    for pod in pods:
        for each in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (each.get("state") or {}).get("terminated") or {}
            if each["name"] == CONTAINER and ended.get("message"):
                found.append((ended.get("finishedAt") or "", ended["message"].strip()))
    return max(found, default=("", ""))[1]


def read(said: str) -> tuple[ReclaimState, str]:
    """What came of a Job that succeeded, by its last word: see `deltashard reclaim --said`."""
    try:
        found = json.loads(said)
        runs, objects, size = (int(found[key]) for key in ("runs", "objects", "bytes"))
        stay = int(found["stay"])
        why = "; ".join(f"{each['run']}: {each['why']}" for each in found["kept"])
    except (ValueError, TypeError, KeyError):
        return ReclaimState.FAILED, "the Job ended well, and what it did could not be read"
    gone = f"{runs} runs, {objects} objects, {size} bytes"
    if stay:
        more = f"; removed: {gone}" if runs else ""
        return ReclaimState.KEPT, f"the bytes of {stay} runs stay: {why}{more}"
    if not runs:
        return ReclaimState.REMOVED, "there was nothing of it in the store"
    return ReclaimState.REMOVED, f"the bytes are removed: {gone}"
