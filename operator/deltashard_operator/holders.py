"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held by another workload that lives, as the API has it now:

- a Job with the label of this run id (every injected Job with a `run-id` has it) that has not ended, whether a
  controller ever saw it or not;
- the workload of a CheckpointRun of this run id that is not Finished. Of a Job and a pod the API itself is asked
  whether it ended or is gone, because Finished is the controller's word and comes late, or not at all while there is
  no controller. Of other kinds the controller's word counts, and the refusal says how to overrule it.

When the API cannot be asked the workload is admitted: the log's fencing decides in the end, as it does for two that are
created in the same instant.
"""

from __future__ import annotations

from typing import Any

import urllib3
from kubernetes import client

from deltashard_operator import views
from deltashard_operator.deadlines import Deadline
from deltashard_operator.names import RUN_ID
from deltashard_operator.records import GROUP, PLURAL, VERSION, run_label
from deltashard_operator.refusals import Refusal

UNKNOWN = (client.ApiException, urllib3.exceptions.HTTPError, OSError)


class Holders:
    """Looks at Jobs, CheckpointRuns and their workloads. Thread-safe; blocks."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._pods = client.CoreV1Api(api)

    def refusal(self, namespace: str, run_id: str, workload_uid: str, deadline: Deadline) -> Refusal | None:
        """Why a workload (of this UID; empty: a new one) may not have this run, or None when it may.

        Raises one of `UNKNOWN` when the API cannot be asked.
        """
        for found in self._list("batch", "v1", namespace, "jobs", run_id, deadline):
            job = views.job_of(found)
            if not job.outcome and job.workload.uid != workload_uid:
                return _taken(run_id, job.workload.kind, job.workload.name)
        for found in self._list(GROUP, VERSION, namespace, PLURAL, run_id, deadline):
            spec, phase = found["spec"], (found.get("status") or {}).get("phase")
            workload = spec["workload"]
            if spec["runId"] != run_id or phase == "Finished" or workload["uid"] == workload_uid:
                continue
            kind, name = workload["kind"], workload["name"]
            if kind not in {"Job", "Pod"}:
                return _taken(run_id, kind, name, record=found["metadata"]["name"])
            if self._lives(namespace, kind, name, workload["uid"], deadline):
                return _taken(run_id, kind, name)
        return None

    def _list(
        self, group: str, version: str, namespace: str, plural: str, run_id: str, deadline: Deadline
    ) -> list[dict[str, Any]]:
        found: Any = self._objects.list_namespaced_custom_object(
            group,
            version,
            namespace,
            plural,
            label_selector=f"{RUN_ID}={run_label(run_id)}",
            _request_timeout=deadline.left_s(),
        )
        return list(found["items"])

    def _lives(self, namespace: str, kind: str, name: str, uid: str, deadline: Deadline) -> bool:
        """Whether this very Job or pod is there and has not ended."""
        timeout_s = deadline.left_s()
        try:
            if kind == "Pod":
                pod: Any = self._pods.read_namespaced_pod(name, namespace, _request_timeout=timeout_s)
                return pod.metadata.uid == uid and pod.status.phase not in {"Succeeded", "Failed"}
            found: Any = self._objects.get_namespaced_custom_object(
                "batch", "v1", namespace, "jobs", name, _request_timeout=timeout_s
            )
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        job = views.job_of(found)
        return job.uid == uid and not job.outcome


def _taken(run_id: str, kind: str, name: str, *, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal(
        "RunIdTaken",
        f"run {run_id!r} is held by {kind} {name}, which is not finished",
        where=RUN_ID,
        remedy=f"wait for its end, delete it, or choose another id{gone}",
    )
