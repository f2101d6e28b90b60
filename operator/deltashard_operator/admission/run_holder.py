"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held by another workload that lives, as the API has it now:

- a Job with the label of this run id (every injected Job with a `run-id` has it) that has not ended, whether a
  controller ever saw it or not;
- the workload of a CheckpointRun of this run id that is not Finished. Of a Job and a pod the API itself is asked
  whether it ended or is gone, because Finished is the controller's word and comes late, or not at all while there is
  no controller. Of other kinds the controller's word counts, and the refusal says how to overrule it.

A numbered pod's run has its number at the end (`numbering`), so `exp-1` is held, too, by a workload of run id `exp`
with a pod 1, and the other way round.

When the API cannot be asked the workload is admitted: the log's fencing decides in the end, as it does for two that are
created in the same instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import urllib3
from kubernetes import client

from deltashard_operator.admission import numbering as numberings
from deltashard_operator.admission.numbering import Numbering
from deltashard_operator.admission.review import Asked
from deltashard_operator.kube.cluster_name import RUN_ID
from deltashard_operator.policy.admission_deadline import Deadline
from deltashard_operator.policy.refusal import Refusal
from deltashard_operator.run import observed_object
from deltashard_operator.run.run_record import GROUP, PLURAL, VERSION, run_label

UNKNOWN = (client.ApiException, urllib3.exceptions.HTTPError, OSError)


class Holders:
    """Looks at Jobs, CheckpointRuns and their workloads. Thread-safe; blocks."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._pods = client.CoreV1Api(api)

    def refusal(self, asked: Asked, deadline: Deadline) -> Refusal | None:
        """Why a workload may not have the run it asks for, or None when it may.

        Raises one of `UNKNOWN` when the API cannot be asked.
        """
        own, namespace = asked.workload_uid, asked.namespace
        for found in self._list("batch", "v1", namespace, "jobs", asked, deadline):
            job = observed_object.job_of(found)
            if job.outcome or job.workload.uid == own:
                continue
            run_id = (found["metadata"].get("labels") or {}).get(RUN_ID, "")
            if run_id == asked.run_id:
                return _taken(run_id, job.workload.called)
            if (shared := _shared(asked, run_id, numberings.of_job(found))) is not None:
                return _shares(shared, run_id, asked, job.workload.called)
        for found in self._list(GROUP, VERSION, namespace, PLURAL, asked, deadline):
            spec, phase = found["spec"], (found.get("status") or {}).get("phase")
            run_id, reference = spec["runId"], spec["workload"]
            workload = observed_object.Workload(
                namespace=namespace,
                kind=reference["kind"],
                name=reference["name"],
                uid=reference["uid"],
                api_version=reference.get("apiVersion", ""),
            )
            same = run_id == asked.run_id
            numbering = numberings.of_kind(workload.group_kind)
            if phase == "Finished" or workload.uid == own:
                continue
            if workload.native == "Job" and not same:
                numbering = Numbering()  # until its Job says otherwise
            shared = _shared(asked, run_id, numbering)
            if not same and shared is None:
                continue
            record = found["metadata"]["name"]
            if workload.native:
                live = self._live(namespace, workload, deadline)
                if live is None:
                    continue
                record = ""
                if workload.native == "Job" and not same:
                    shared = _shared(asked, run_id, numberings.of_job(live))
            if same:
                return _taken(run_id, workload.called, record=record)
            if shared is not None:
                return _shares(shared, run_id, asked, workload.called, record=record)
        return None

    def _list(
        self, group: str, version: str, namespace: str, plural: str, asked: Asked, deadline: Deadline
    ) -> list[dict[str, Any]]:
        """Objects whose run may be the one that is asked for; of numbered pods any may."""
        ids = ",".join(map(run_label, (asked.run_id, *numberings.bases(asked.run_id))))
        found: Any = self._objects.list_namespaced_custom_object(
            group,
            version,
            namespace,
            plural,
            label_selector=RUN_ID if asked.numbering is not None else f"{RUN_ID} in ({ids})",
            _request_timeout=deadline.left_s(),
        )
        return list(found["items"])

    def _live(
        self, namespace: str, workload: observed_object.Workload, deadline: Deadline
    ) -> Mapping[str, Any] | None:
        """This very Job (or {} for a pod) where it is there and has not ended."""
        name, timeout_s = workload.name, deadline.left_s()
        try:
            if workload.native == "Pod":
                pod: Any = self._pods.read_namespaced_pod(name, namespace, _request_timeout=timeout_s)
                lives = pod.metadata.uid == workload.uid and pod.status.phase not in {"Succeeded", "Failed"}
                return {} if lives else None
            found: Any = self._objects.get_namespaced_custom_object(
                "batch", "v1", namespace, "jobs", name, _request_timeout=timeout_s
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        job = observed_object.job_of(found)
        return found if job.uid == workload.uid and not job.outcome else None


def _shared(asked: Asked, run_id: str, numbering: Numbering | None) -> str | None:
    """A run that one of the workload's pods and one of another's would both train; None when there is none."""
    if numbering is not None and numbering.holds(run_id, asked.run_id):
        return asked.run_id
    if asked.numbering is not None and asked.numbering.holds(asked.run_id, run_id):
        return run_id
    return None


def _taken(run_id: str, called: str, *, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal(
        "RunIdTaken",
        f"run {run_id!r} is held by {called}, which is not finished",
        where=RUN_ID,
        remedy=f"wait for its end, delete it, or choose another id{gone}",
    )


def _shares(shared: str, run_id: str, asked: Asked, called: str, *, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    numbered = run_id if shared == asked.run_id else asked.run_id
    return Refusal(
        "RunIdTaken",
        f"run {shared!r} would be shared with {called}, which is not finished: the pods of run {numbered!r} are "
        "numbered, and each is a run of its own",
        where=RUN_ID,
        remedy=f"wait for its end, delete it, or choose an id that does not end with a number{gone}",
    )
