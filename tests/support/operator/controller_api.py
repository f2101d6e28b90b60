"""A controller on an API that answers from memory: test objects, and writes that wait until the test releases them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.status import ALL
from deltashard_operator.kube import cluster_name
from deltashard_operator.kube.call import ApiResponse, Caller

Document = dict[str, Any]


UID = "0b4f3c1e-0000-4000-8000-000000000001"


class FakeApi:
    """Answers as an API server would; status writes wait for `release_writes` and then find the object deleted.

    `stored` are the CheckpointRuns.
    """

    def __init__(self, stored: list[Document] | None = None) -> None:
        self.requests: list[str] = []
        self.stored = stored or []
        self.writing, self.release_writes = asyncio.Event(), asyncio.Event()

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **_: Any
    ) -> ApiResponse:
        self.requests.append(f"{method} {path}")
        if method == "POST" and path.endswith("/checkpointruns") and body is not None:
            metadata = {**body["metadata"], "uid": "made", "creationTimestamp": "2026-01-01T00:00:00Z"}
            return ApiResponse(status=201, document={**body, "metadata": metadata})
        if method == "PATCH" and path.endswith("/status"):
            self.writing.set()
            await self.release_writes.wait()
            return ApiResponse(status=404, document={})
        if method == "DELETE":
            return ApiResponse(status=403, document={"reason": "Forbidden"})
        return ApiResponse(status=404 if method == "GET" else 200, document={})

    async def list_all(self, path: str, **_: Any) -> list[Document]:
        assert path == ALL
        return self.stored


def controller_of(
    api: FakeApi,
    *,
    keep_finished_s: float = 86400.0,
    default_policy: Path | None = None,
    annotate_pods: bool = False,
    wall: Callable[[], float] = time.time,
) -> Controller:
    call = cast(Caller, api)
    return Controller(
        call=call,
        defaults=Defaults(default_policy, None),
        metrics=ControllerMetrics(),
        keep_finished_s=keep_finished_s,
        status_interval_s=1.0,
        annotate_pods=annotate_pods,
        wall=wall,
    )


def job() -> Document:
    labels = {cluster_name.MANAGED_BY: cluster_name.MANAGED_BY_VALUE}
    notes = {cluster_name.POLICY: "default"}
    return {
        "metadata": {"name": "train", "namespace": "n", "uid": UID, "labels": labels, "annotations": notes},
        "spec": {"template": {"metadata": {"annotations": notes}, "spec": {"containers": [{"name": "t"}]}}},
        "status": {},
    }


def checkpoint_run(name: str = "train-0b4f3c1e", uid: str = UID, **status: Any) -> Document:
    workload = {"kind": "Job", "name": "train", "uid": uid}
    return {
        "metadata": {"name": name, "namespace": "n", "uid": "made"},
        "spec": {"runId": f"train-{uid}", "policy": "default", "workload": workload},
        "status": status,
    }


def pod() -> Document:
    labels = {
        cluster_name.MANAGED_BY: cluster_name.MANAGED_BY_VALUE,
        cluster_name.JOB_NAME_LABEL: "train",
        cluster_name.JOB_UID_LABEL: UID,
    }
    notes = {cluster_name.POLICY: "default", cluster_name.INJECTED: "1"}
    return {
        "metadata": {
            "name": "train-x",
            "namespace": "n",
            "uid": "p-1",
            "labels": labels,
            "annotations": notes,
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": UID, "controller": True}
            ],
        },
        "spec": {"nodeName": "node-a"},
        "status": {"phase": "Running"},
    }
