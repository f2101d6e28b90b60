"""Processing of CheckpointRequests with an API in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.requests import CheckpointRequests
from deltashard_operator.controller.run_store import RunStore
from deltashard_operator.controller.write_queue import WriteQueue
from deltashard_operator.fleet.report import Outcome, SaveResult
from deltashard_operator.kube.call import ApiResponse, ApiUnavailable, Caller
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.async_test import async_test
from tests.unit.operator.run.observed import TRAIN, pod

BASE_TIME_S = 1_700_000_000.0
KEY = TRAIN.key
COMMITTED_RESULT = SaveResult(id="q-1", outcome=Outcome.COMMITTED, step=12, seq=2)
Document = dict[str, Any]


class RequestApi:
    """One CheckpointRequest; a write must name its current version."""

    def __init__(self) -> None:
        metadata = {"namespace": "team", "name": "now", "uid": "q-1", "resourceVersion": "1", "generation": 1}
        self.document: Document = {
            "metadata": {**metadata, "creationTimestamp": timestamp(BASE_TIME_S)},
            "spec": {"runRef": {"name": "train-u-1"}, "deadline": "5m"},
        }
        self.lost_replies = 0
        self.deleted = False

    def modify(self) -> None:
        metadata = self.document["metadata"]
        version = str(int(metadata["resourceVersion"]) + 1)
        self.document = {**self.document, "metadata": {**metadata, "resourceVersion": version}}

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **_: Any
    ) -> ApiResponse:
        self.deleted = self.deleted or method == "DELETE"
        if method == "PATCH":
            if (body or {})["metadata"]["resourceVersion"] != self.document["metadata"]["resourceVersion"]:
                return ApiResponse(status=409, document={})
            self.document = {
                **self.document,
                "status": {**self.document.get("status", {}), **(body or {})["status"]},
            }
            self.modify()
            if self.lost_replies:
                self.lost_replies -= 1
                raise ApiUnavailable("no reply", where=path)
        return ApiResponse(status=200, document=self.document)


class RequestsBench:
    """A controller's processing of requests; `advance` moves the clock."""

    def __init__(self, api: RequestApi, now_s: float = BASE_TIME_S) -> None:
        self.api, self.now_s = api, now_s

        def wall() -> float:
            return self.now_s

        call = cast(Caller, api)
        self.run_store = RunStore(
            call=call,
            defaults=Defaults(None, None),
            metrics=ControllerMetrics(),
            queue=WriteQueue(commit_s=1.0, wall=wall),
            wall=wall,
        )
        self.entry = self.run_store.add(WatchedRun(workload=TRAIN, pods={"p-1": pod()}))
        self.run_store.pods["p-1"] = KEY
        self.requests = CheckpointRequests(self.run_store, keep_finished_s=3600.0)
        self.requests.on_request(api.document)

    async def advance(self, seconds: float = 3.0) -> None:
        for _ in range(round(seconds)):
            self.requests.reconcile(self.now_s)
            self.run_store.queue.tick()
            if self.run_store.queue.tasks:
                await asyncio.wait(self.run_store.queue.tasks)
            self.now_s += 1

    def ordered(self) -> list[str]:
        return [each.id for each in self.run_store.orders.of(KEY, self.now_s)]

    def phase(self) -> str:
        return str(self.api.document.get("status", {}).get("phase", ""))


@async_test
async def test_order_is_open_until_its_outcome_is_written() -> None:
    bench = RequestsBench(RequestApi())
    await bench.advance(1)
    assert (bench.ordered(), bench.phase()) == (["q-1"], "Ordered")
    bench.api.modify()
    bench.api.lost_replies = 1
    bench.requests.on_save_result(("team", "another"), COMMITTED_RESULT)
    await bench.advance(3)
    assert bench.phase() == "Ordered", "a result of another run is ignored"
    bench.requests.on_save_result(KEY, COMMITTED_RESULT)
    bench.requests.reconcile(bench.now_s)
    assert bench.ordered() == ["q-1"]
    restarted = RequestsBench(bench.api, bench.now_s)
    await restarted.advance(1)
    assert restarted.ordered() == ["q-1"], "the next controller orders the save again"
    await bench.advance(9)
    assert (bench.ordered(), bench.phase(), bench.api.document["status"]["step"]) == ([], "Completed", 12)
    restarted.requests.on_save_result(KEY, replace(COMMITTED_RESULT, outcome=Outcome.FAILED))
    await restarted.advance(9)
    assert (restarted.ordered(), restarted.phase()) == ([], "Completed"), (
        "the written outcome holds for both controllers"
    )
    assert not bench.api.deleted
    await bench.advance(3600)
    assert bench.api.deleted


@async_test
async def test_order_of_a_withdrawn_request_is_closed() -> None:
    bench = RequestsBench(RequestApi())
    await bench.advance(1)
    bench.requests.on_request_deleted(ObjectKey("team", "now", "q-1"), None)
    assert bench.ordered() == []
