"""Moments that a real API server does not show on demand: what comes between a write and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.event import Teller
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.status import ALL
from deltashard_operator.controller.watch import JOBS, PODS, POLICIES
from deltashard_operator.fleet.sidecar_report import Directive, Heartbeat, Hello, Phase, PolicyInForce, RunKey
from deltashard_operator.kube import cluster_name
from deltashard_operator.kube.call import Answer, Caller
from deltashard_operator.policy.chart_defaults import Defaults
from deltashard_operator.run import run_record

from tests.support.operator import sample

Document = dict[str, Any]
UID = "0b4f3c1e-0000-4000-8000-000000000001"
DEADLINE_S = 60.0


class Api:
    """Answers as an API server would; status writes wait for `let_go` and then find the object gone.

    `stored` are the CheckpointRuns, `listed` other objects by their collection's path.
    """

    def __init__(self, stored: list[Document] | None = None) -> None:
        self.asked: list[str] = []
        self.stored = stored or []
        self.listed: dict[str, list[Document]] = {}
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

    async def every(self, path: str, **_: Any) -> list[Document]:
        return self.stored if path == ALL else self.listed.get(path, [])


def controller_of(
    api: Api,
    *,
    keep_finished_s: float = 86400.0,
    default_policy: Path | None = None,
    wall: Callable[[], float] = time.time,
    leads: Callable[[], bool] = lambda: True,
) -> Controller:
    call = cast(Caller, api)
    return Controller(
        call=call,
        teller=Teller(call),
        defaults=Defaults(default_policy, None),
        metrics=ControllerMetrics(),
        keep_finished_s=keep_finished_s,
        status_interval_s=1.0,
        wall=wall,
        leads=leads,
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
    """A pod of the Job."""
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


class Told:
    """Who carries directives, and only writes them down."""

    def __init__(self) -> None:
        self.directives: list[Directive] = []

    def direct(self, run_key: RunKey, directive: Directive) -> None:
        self.directives.append(directive)

    def forget(self, run_key: RunKey) -> None:
        pass

    def save_now(self, run_key: RunKey, reason: str, urgent: bool, deadline_s: float) -> int:
        return 0


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
        controller.watches.on_job("ADDED", job())
        controller.watches.on_job("DELETED", job())
        await ticked(controller, api.writing)
        controller.watches.on_run("DELETED", checkpoint_run())
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
        now_s = time.time()
        over = run_record.timestamp(now_s - 1000)
        status = {
            "phase": "Finished",
            "finishedReason": "Completed",
            "finishedAt": over,
            "observedTime": over,
        }
        api = Api([checkpoint_run(**status)])
        controller = controller_of(api, keep_finished_s=10.0, wall=lambda: now_s)
        await controller.load()
        controller.watches.synced = True

        async def tries() -> int:
            for _ in range(50):
                controller.tick()
                await asyncio.sleep(0)
            return sum(each.startswith("DELETE") for each in api.asked)

        assert await tries() == 1
        now_s += 60.0
        assert await tries() == 2

    asyncio.run(scenario())


def test_a_policy_that_is_not_seen_yet_is_not_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    """A new controller: sidecars and pods may come before the namespace's own `default` does. No directive of the chart's."""
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(sample.DEFAULTS))

    async def scenario() -> None:
        api = Api()
        controller = controller_of(api, default_policy=tmp_path / "policy.yaml")
        told = Told()
        controller.follow(told)
        policy = {"metadata": {"namespace": "n", "name": "default"}, "spec": {"intervalSeconds": 77}}
        api.listed = {
            JOBS: [{"metadata": {"uid": UID}}],
            PODS: [{"metadata": {"uid": "p-1"}}],
            POLICIES: [{"metadata": policy["metadata"]}],
        }
        api.let_go.set()
        await controller.load()
        controller.watches.on_job("ADDED", job())
        controller.watches.on_pod("ADDED", pod())
        hello = Hello(
            protocol_min=1, protocol_max=1, namespace="n", pod="train-x", pod_uid="p-1", process="p",
            workload_kind="Job", workload_name="train", workload_uid=UID,
        )  # fmt: skip
        controller.connected(hello)
        in_force = PolicyInForce(
            every_s=77.0, encoding="q8", differential="intermittent", state_encoding="fp32"
        )
        controller.reported(hello, Heartbeat(run="n/train", phase=Phase.TRAINING, attempt=1, policy=in_force))

        async def told_by_now() -> list[float]:
            controller.tick()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            return [each.policy.every_s for each in told.directives]

        await controller.watches.sweep()
        assert not controller.synced
        assert await told_by_now() == []
        controller.watches.on_policy("ADDED", policy)
        await controller.watches.sweep()
        assert controller.synced
        assert await told_by_now() == []
        controller.watches.on_policy("MODIFIED", {**policy, "spec": {"intervalSeconds": 60}})
        assert await told_by_now() == [60.0]

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
