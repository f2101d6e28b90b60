"""Moments that a real API server does not show on demand: what comes between a write and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

from deltashard_operator import names, records
from deltashard_operator.calls import Answer, Caller
from deltashard_operator.controller_metrics import ControllerMetrics
from deltashard_operator.controllers import Controller
from deltashard_operator.defaults import Defaults
from deltashard_operator.events import Teller

Document = dict[str, Any]
UID = "0b4f3c1e-0000-4000-8000-000000000001"
DEADLINE_S = 60.0


class Api:
    """Answers as an API server would; status writes wait for `let_go` and then find the object gone."""

    def __init__(self, stored: list[Document] | None = None) -> None:
        self.asked: list[str] = []
        self.stored = stored or []
        self.writing, self.let_go = asyncio.Event(), asyncio.Event()

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **_: Any
    ) -> Answer:
        self.asked.append(f"{method} {path}")
        if method == "POST" and path.endswith("/checkpointruns") and body is not None:
            metadata = {**body["metadata"], "uid": "made", "creationTimestamp": "2026-01-01T00:00:00Z"}
            return Answer(status=201, document={**body, "metadata": metadata})
        if method == "PATCH" and path.endswith("/status"):
            self.writing.set()
            await self.let_go.wait()
            return Answer(status=404, document={})
        if method == "DELETE":
            return Answer(status=403, document={"reason": "Forbidden"})
        return Answer(status=200, document={})

    async def every(self, _path: str, **_: Any) -> list[Document]:
        return self.stored


def controller_of(api: Api, *, keep_finished_s: float = 86400.0) -> Controller:
    call = cast(Caller, api)
    return Controller(
        call=call,
        teller=Teller(call),
        defaults=Defaults(None, None),
        metrics=ControllerMetrics(),
        keep_finished_s=keep_finished_s,
        status_interval_s=1.0,
    )


def job() -> Document:
    labels = {names.MANAGED_BY: names.MANAGED_BY_VALUE}
    notes = {names.POLICY: "default"}
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


async def ticked(controller: Controller, event: asyncio.Event) -> None:
    """Tick until it happens."""
    async with asyncio.timeout(DEADLINE_S):
        while not event.is_set():
            controller.tick()
            await asyncio.sleep(0.01)


def test_a_finished_run_whose_checkpointrun_goes_while_it_is_written_is_let_go() -> None:
    """As when a namespace is deleted: Job and CheckpointRun go within one write. The pump must outlive it."""

    async def scenario() -> None:
        api = Api()
        controller = controller_of(api)
        controller.on_job("ADDED", job())
        controller.on_job("DELETED", job())
        await ticked(controller, api.writing)
        controller.on_run("DELETED", checkpoint_run())
        assert len(controller) == 0
        api.let_go.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        lost = controller.metrics.registry.get_sample_value(
            "deltashard_controller_status_writes_total", {"outcome": "lost"}
        )
        assert lost == 1
        controller.tick()
        assert controller.unwritten() == 0

    asyncio.run(scenario())


def test_a_removal_that_is_refused_is_tried_again_after_a_pause() -> None:
    """A right that is missing does not become a request with every tick."""

    async def scenario() -> None:
        over = records.timestamp(time.time() - 1000)
        status = {
            "phase": "Finished",
            "finishedReason": "Completed",
            "finishedAt": over,
            "observedTime": over,
        }
        api = Api([checkpoint_run(**status)])
        controller = controller_of(api, keep_finished_s=10.0)
        await controller.load()
        controller.synced = True
        for _ in range(50):
            controller.tick()
            await asyncio.sleep(0.005)
        assert sum(each.startswith("DELETE") for each in api.asked) == 1

    asyncio.run(scenario())


def test_a_checkpointrun_that_cannot_be_read_stops_no_other() -> None:
    """A phase of a newer version, after a rollback: that run begins anew, the others are known."""

    async def scenario() -> None:
        odd = checkpoint_run("odd-00000000", uid="00000000-1", phase="Hibernating")
        controller = controller_of(Api([odd, checkpoint_run(phase="Training")]))
        await controller.load()
        assert [each.name for each in controller.runs()] == ["train-0b4f3c1e"]
        assert controller.metrics.registry.get_sample_value("deltashard_controller_judge_errors_total") == 1

    asyncio.run(scenario())
