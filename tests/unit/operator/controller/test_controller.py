"""Races that a real API server does not produce on demand: events between a count, its write and the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_operator.controller import writer
from deltashard_operator.controller.controller import Controller
from deltashard_operator.fleet.report import (
    Incident,
    IncidentKind,
    PodState,
    Rank,
    Reply,
    Report,
    RunReport,
    SidecarIdentity,
    SidecarPhase,
)
from deltashard_operator.kube.call import ApiResponse
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.async_test import async_test
from tests.support.operator import sample
from tests.support.operator.controller_api import (
    UID,
    Document,
    FakeApi,
    checkpoint_run,
    controller_of,
    job,
    pod,
)

ADDRESS = "10.0.0.7:9464"
IN_FORCE = pb.Policy(every_s=77.0, encoding="q8", differential="intermittent", state_encoding="fp32")


class RunApi(FakeApi):
    """Stores a CheckpointRun and Events as an API server does."""

    def __init__(self, stored: list[Document] | None = None) -> None:
        super().__init__(stored)
        self.run: Document = {}
        self.events: dict[str, Mapping[str, Any]] = {}
        self.refuses = False

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **more: Any
    ) -> ApiResponse:
        await asyncio.sleep(0)
        if path.endswith("/events") and body is not None:
            if self.refuses:
                return ApiResponse(status=403, document={})
            name = body["metadata"]["name"]
            known = name in self.events
            self.events[name] = body
            return ApiResponse(status=409 if known else 201, document={})
        if method == "POST" and path.endswith("/checkpointruns") and body is not None:
            self.run = {**body, "metadata": {**body["metadata"], "uid": "made"}}
            return ApiResponse(status=201, document=self.run)
        if method == "PATCH" and "/checkpointruns/" not in path:
            return ApiResponse(status=404, document={})
        if method == "PATCH" and body is not None:
            merged = self.run.get("status", {}) | body["status"]
            status = {key: value for key, value in merged.items() if value is not None}
            self.run = {**self.run, "status": status}
            return ApiResponse(status=200, document=self.run)
        return await super().__call__(method, path, body, **more)


class ControllerBench:
    """A controller with one Job and its pod, driven by a fake clock."""

    def __init__(self, api: FakeApi | None = None, **options: Any) -> None:
        self.api = api or RunApi()
        self.now_s = time.time()
        self.controller: Controller = controller_of(self.api, wall=lambda: self.now_s, **options)
        self.nudged: list[str] = []
        self.controller.set_nudger(self.nudged.append)
        self._sequence = 0

    @property
    def store(self) -> RunApi:
        assert isinstance(self.api, RunApi)
        return self.api

    async def begin(self, *, synced: bool = True) -> None:
        await self.controller.load()
        self.controller.watches.on_job(job())
        found = pod()
        env = [{"name": "DELTASHARD_METRICS_PORT", "value": "9464"}]
        found["spec"]["initContainers"] = [{"name": "deltashard-sidecar", "env": env}]
        found["status"]["podIP"] = "10.0.0.7"
        self.controller.watches.on_pod(found)
        if synced:
            self.controller.watches.on_list()
            await self.controller.watches.resolve_waiting()

    async def advance(self, seconds: float = 0.0) -> None:
        """Advance the clock and finish all due writes."""
        self.now_s += seconds
        for _ in range(3):
            self.controller.tick()
            while self.controller.queue.tasks:
                await asyncio.gather(*self.controller.queue.tasks)

    def report(self, *incidents: Incident, attempt: int = 1, **more: Any) -> Reply:
        self._sequence += 1
        state = {
            "run": f"n/train-{UID}",
            "phase": SidecarPhase.TRAINING,
            "attempt": attempt,
            "ranks": (Rank(rank=0, world_size=1, step=5),),
        }
        return self.controller.report(
            Report(
                identity=SidecarIdentity(namespace="n", pod="train-x", pod_uid="p-1", workload_uid=UID),
                process="p",
                sequence=self._sequence,
                pod=PodState(**state | more),
                run=RunReport(attempts_opened=attempt, policy=IN_FORCE),
                incidents=incidents,
            )
        )

    def metric(self, name: str, **labels: str) -> float | None:
        return self.controller.metrics.registry.get_sample_value(f"deltashard_{name}", labels)


@async_test
async def test_unlisted_policy_is_not_treated_as_missing(tmp_path: Path) -> None:
    """After the controller starts, pods may be listed before the namespace's policy `default`."""
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(sample.DEFAULTS))
    bench = ControllerBench(default_policy=tmp_path / "policy.yaml")
    metadata = {"namespace": "n", "name": "default", "uid": "q-1"}
    policy = {"metadata": metadata, "spec": {"interval": {"every": "77s"}}}
    await bench.begin(synced=False)
    await bench.controller.watches.resolve_waiting()
    await bench.advance(1)
    assert bench.nudged == []
    bench.controller.watches.on_policy(policy)
    bench.controller.watches.on_list()
    await bench.controller.watches.resolve_waiting()
    await bench.advance(1)
    assert bench.nudged == [ADDRESS], "every sidecar is nudged once all objects are listed"
    reply = bench.report()
    assert (reply.HasField("directive"), reply.next_s, reply.report_run) == (False, 60.0, True)
    bench.controller.watches.on_policy({**policy, "spec": {"interval": {"every": "60s"}}})
    for _ in range(3):
        await bench.advance(1)
    assert bench.nudged == [ADDRESS] * 2, "one more nudge for the new directive"
    directive = bench.report().directive
    assert directive.policy.every_s == 60.0
    assert not bench.report(directive=directive.id).HasField("directive")
    bench.now_s += 200.0
    assert bench.report(directive=directive.id).next_s == 60.0


@async_test
async def test_run_deleted_during_its_write_is_released() -> None:
    """Deleting a namespace can remove Job and CheckpointRun during one write. The write queue must survive."""
    bench = ControllerBench(FakeApi())
    bench.controller.watches.on_job(job())
    bench.controller.watches.on_job_deleted(ObjectKey("n", "train", UID), job())
    bench.controller.tick()
    await bench.api.writing.wait()
    bench.controller.watches.on_run_deleted(ObjectKey("n", "train-0b4f3c1e", "made"), checkpoint_run())
    assert not list(bench.controller.runs())
    bench.api.release_writes.set()
    await bench.advance()
    assert bench.controller.queue.idle


@async_test
async def test_unreadable_checkpointrun_does_not_affect_others() -> None:
    """After a rollback, a status has a phase of a newer version. Other runs and removals continue."""
    odd = checkpoint_run("odd-00000000", uid="00000000-1", phase="Hibernating")
    old = checkpoint_run(
        uid="00000000-2", ledger="odd", finishedAt="2026-01-01T00:00:00Z", finishedReason="Failed"
    )
    bench = ControllerBench(FakeApi([odd, old, checkpoint_run(phase="Training")]))
    await bench.controller.load()
    assert [each.finished for each in bench.controller.runs()] == ["Failed", ""]
    assert bench.metric("controller_reconcile_errors_total") == 2


@async_test
async def test_unreadable_counters_are_not_overwritten() -> None:
    """Another controller of a newer version wrote the counters."""
    bench = ControllerBench()
    await bench.begin()
    await bench.advance(1)
    (entry,) = bench.controller._run_store
    before = entry.object_version
    newer = {**bench.store.run, "status": {"ledger": "odd"}}
    with pytest.raises(ValueError, match="padding"):
        bench.controller._writer._resume_from(entry, newer)
    assert entry.object_version is before


@async_test
async def test_pending_events_are_bounded_and_refused_ones_are_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING_EVENTS", 3)
    bench = ControllerBench()
    await bench.begin()
    many = [Incident(id=n, kind=IncidentKind.SAVE_FAILED, message=f"{n}") for n in range(1, 6)]
    bench.report(*many)
    await bench.advance(1)
    assert bench.metric("controller_events_total", outcome="dropped") == 2
    assert bench.report(*many).acknowledged_incident == 3, "the sidecar sends the others again"
    bench.store.refuses = True
    await bench.advance(1)
    assert bench.report(*many).acknowledged_incident == 5
    assert bench.metric("controller_events_total", outcome="refused") == 4
    assert len([each for each in bench.store.events.values() if each["reason"] == "SaveFailed"]) == 6
    monkeypatch.setattr(writer, "MAX_PENDING_EVENTS", 1000)
    bench.store.refuses = False
    more = [Incident(id=n, kind=IncidentKind.SAVE_FAILED, message=f"{n}") for n in range(6, 40)]
    bench.report(*more)
    await bench.advance(1)
    limited = 34 - (writer.RUN_EVENT_BURST - 5)
    assert bench.metric("controller_events_total", outcome="rate_limited") == limited
    assert bench.report(*more).acknowledged_incident == 39
    bench.report(Incident(id=40, kind=IncidentKind.SAVE_FAILED, message="a minute later"))
    await bench.advance(60)
    assert bench.metric("controller_events_total", outcome="rate_limited") == limited
