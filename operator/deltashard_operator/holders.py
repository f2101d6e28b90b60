"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held while a CheckpointRun with its id in the namespace is not Finished and is of another workload. That is the
controller's word, read live, one LIST by label. A workload that was deleted a moment ago is given `PATIENCE_S` to be
seen Finished, since deleting a Job and making it anew is one motion for people. With the controller away it stays held
until somebody deletes the CheckpointRun, and the refusal says so. When the API cannot be asked the workload is
admitted: the controller refuses its sidecar, and the log's fencing decides in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
import urllib3
from kubernetes import client

from deltashard_operator.names import RUN_ID
from deltashard_operator.records import GROUP, PLURAL, VERSION, run_label
from deltashard_operator.refusals import Refusal

PATIENCE_S = 2.5
PAUSE_S = 0.25
LOOK_S = 1.0
"""A look, within an admission's 5 s."""
_log = structlog.get_logger("deltashard.holders")


class Holders:
    """Looks at CheckpointRuns. Thread-safe; blocks."""

    def __init__(
        self,
        api: client.ApiClient,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._monotonic = monotonic
        self._pause = pause

    def refusal(self, namespace: str, run_id: str, workload_uid: str) -> Refusal | None:
        """Why a workload (of this UID; empty: a new one) may not have this run, or None when it may."""
        until_s = self._monotonic() + PATIENCE_S
        while True:
            try:
                holder = self._holder(namespace, run_id, workload_uid)
            except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
                _log.warning("holders.unknown", namespace=namespace, run_id=run_id, error=str(error)[:300])
                return None
            if holder is None:
                return None
            if self._monotonic() >= until_s:
                return _refusal(run_id, holder)
            self._pause(PAUSE_S)

    def _holder(self, namespace: str, run_id: str, workload_uid: str) -> dict[str, Any] | None:
        found: Any = self._objects.list_namespaced_custom_object(
            GROUP,
            VERSION,
            namespace,
            PLURAL,
            label_selector=f"{RUN_ID}={run_label(run_id)}",
            _request_timeout=(LOOK_S, LOOK_S),
        )
        for each in found["items"]:
            spec, phase = each["spec"], (each.get("status") or {}).get("phase")
            if spec["runId"] == run_id and phase != "Finished" and spec["workload"]["uid"] != workload_uid:
                return dict(each)
        return None


def _refusal(run_id: str, holder: dict[str, Any]) -> Refusal:
    workload, name = holder["spec"]["workload"], holder["metadata"]["name"]
    return Refusal(
        "RunIdTaken",
        f"run {run_id!r} is held by {workload['kind']} {workload['name']}, which is not finished",
        where=RUN_ID,
        remedy=f"wait for its end, delete it, or choose another id; if it is gone, delete CheckpointRun {name}",
    )
