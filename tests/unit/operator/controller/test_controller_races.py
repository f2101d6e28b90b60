"""Moments that a real API server does not show on demand: what comes between a write and its answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import yaml
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.watch import SETTLE_SOON_S
from deltashard_operator.fleet.sidecar_report import (
    Directive,
    Heartbeat,
    Hello,
    Phase,
    Rank,
    RunKey,
)
from deltashard_operator.kube.call import Answer
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_operator.run import run_record
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.operator import sample
from tests.support.operator.controller_api import UID, Api, checkpoint_run, controller_of, job, pod

DEADLINE_S = 60.0


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
        controller.watches.on_job(job())
        controller.watches.job_gone(ObjectKey("n", "train", UID), job())
        await ticked(controller, api.writing)
        controller.watches.run_gone(ObjectKey("n", "train-0b4f3c1e", "made"), checkpoint_run())
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
        metadata = {"namespace": "n", "name": "default", "uid": "q-1"}
        policy = {"metadata": metadata, "spec": {"interval": {"every": "77s"}}}
        api.let_go.set()
        await controller.load()
        controller.watches.on_job(job())
        controller.watches.on_pod(pod())
        hello = Hello(
            protocol_min=1, protocol_max=1, namespace="n", pod="train-x", pod_uid="p-1", process="p",
            workload_kind="Job", workload_name="train", workload_uid=UID,
        )  # fmt: skip
        controller.connected(hello)
        in_force = pb.Policy(every_s=77.0, encoding="q8", differential="intermittent", state_encoding="fp32")
        controller.reported(hello, Heartbeat(run="n/train", phase=Phase.TRAINING, attempt=1, policy=in_force))

        async def told_by_now() -> list[float]:
            controller.tick()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            return [each.policy.every_s for each in told.directives]

        await controller.watches.settle()
        assert not controller.synced
        assert await told_by_now() == []
        controller.watches.on_policy(policy)
        controller.watches.on_list()
        await controller.watches.settle()
        assert controller.synced
        assert await told_by_now() == []
        controller.watches.on_policy({**policy, "spec": {"interval": {"every": "60s"}}})
        assert await told_by_now() == [60.0]

    asyncio.run(scenario())


def test_failures_are_counted_by_node_once_and_go_with_it() -> None:
    """Also when the status is judged again and again."""

    async def scenario() -> None:
        now_s = time.time()
        api = Api()
        controller = controller_of(api, wall=lambda: now_s)
        api.let_go.set()
        await controller.load()
        watches = controller.watches
        watches.on_node({"metadata": {"name": "node-a"}, "status": {}})
        watches.on_job(job())
        document = pod()
        document["spec"] = {**document.get("spec", {}), "nodeName": "node-a"}
        watches.on_pod(document)

        async def failures() -> float | None:
            controller.tick()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            name = "deltashard_node_failures_total"
            return controller.metrics.registry.get_sample_value(name, {"node": "node-a"})

        assert await failures() is None
        ending = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": run_record.timestamp(now_s)}}
        container = {"name": "trainer", "restartCount": 1, "state": {"running": {}}, "lastState": ending}
        document["status"] = {"phase": "Running", "containerStatuses": [container]}
        watches.on_pod(document)
        assert [await failures() for _ in range(3)] == [1, 1, 1]
        watches.node_gone(ObjectKey("", "node-a", "u"), None)
        assert await failures() is None

    asyncio.run(scenario())


def test_failures_are_counted_and_the_charts_switch_ends_all_deciding(tmp_path: Path) -> None:
    """By one directive, without the goal that the pods were started with."""
    chart = tmp_path / "policy.yaml"
    chart.write_text(
        yaml.safe_dump(
            {**sample.DEFAULTS, "interval": {"goal": {"type": "Auto"}}, "deciding": {"enabled": False}}
        )
    )

    async def scenario() -> None:
        now_s = time.time()
        api = Api()
        controller = controller_of(api, default_policy=chart, wall=lambda: now_s)
        told = Told()
        controller.follow(told)
        api.let_go.set()
        await controller.load()
        controller.watches.on_job(job())
        controller.watches.on_pod(pod())
        controller.watches.on_list()
        await controller.watches.settle()
        hello = Hello(namespace="n", pod="train-x", pod_uid="p-1", process="p", workload_uid=UID)
        controller.connected(hello)
        in_force = pb.Policy(every_s=120.0, encoding="q8", differential="intermittent", goal="auto")
        attempt = 0

        async def beat(attempt: int) -> None:
            ranks = (Rank(rank=0, world_size=1, step=5),)
            said = Heartbeat(
                run="n/train",
                phase=Phase.TRAINING,
                attempt=attempt,
                openings=attempt,
                policy=in_force,
                ranks=ranks,
            )
            controller.reported(hello, said)
            controller.tick()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        await beat(1)
        assert [each.policy.goal for each in told.directives] == [""]
        for attempt in range(2, 9):
            for wait_s in (1.0, 30.0):
                now_s += wait_s
                await beat(attempt)
        (seen,) = (each.incidents.evidence for each in controller.runs())
        assert round(seen.lossy) == 7
        assert len(told.directives) == 1

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


def test_a_pod_waits_for_its_job_only_while_one_is_to_come() -> None:
    """The API says whether there is one that will be seen: of this UID, with our label."""

    async def scenario() -> None:
        asked: list[str] = []
        labelled = job()

        class Jobs(Api):
            async def __call__(self, method: str, path: str, *more: Any, **others: Any) -> Answer:
                if not path.startswith("/apis/batch/"):
                    return await super().__call__(method, path, *more, **others)
                asked.append(path)
                return Answer(status=200, document=labelled)

        now_s = time.time()
        controller = controller_of(Jobs(), wall=lambda: now_s)
        await controller.load()
        watches = controller.watches
        watches.on_pod(pod())
        await watches.settle()
        assert asked == []  # before the Jobs are listed one may come with them
        watches.on_list()
        await watches.settle()
        assert asked == ["/apis/batch/v1/namespaces/n/jobs/train"]
        assert len(controller) == 0
        labelled["metadata"]["labels"] = {}
        now_s += SETTLE_SOON_S
        await watches.settle()
        assert [(each.finished, len(each.pods)) for each in controller.runs()] == [("", 1)]
        watches.pod_gone(ObjectKey("n", "train-x", "p-1"), None)
        await watches.settle()
        assert [each.finished for each in controller.runs()] == ["Deleted"]

    asyncio.run(scenario())
