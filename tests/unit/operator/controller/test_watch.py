"""Pods that are seen before their Job: waiting, rate of API requests, and release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.watch import ABSENT_JOB_TTL_S, RESOLVE_INTERVAL_S
from deltashard_operator.kube.call import ApiResponse, ApiUnavailable
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_operator.run import run_record
from deltashard_operator.run.observed_object import ABSENT_S

from tests.support.async_test import async_test
from tests.support.operator.controller_api import Document, FakeApi, controller_of, job, pod

KEEP_S = 86400.0
BEGIN_S = 1_800_000_000.0


class JobListing(FakeApi):
    """Serves Jobs by name; reading a Job in `broken` fails."""

    def __init__(self, *jobs: Document) -> None:
        super().__init__()
        self.jobs = {each["metadata"]["name"]: each for each in jobs}
        self.broken: set[str] = set()

    async def __call__(self, method: str, path: str, *more: Any, **others: Any) -> ApiResponse:
        if not path.startswith("/apis/batch/"):
            return await super().__call__(method, path, *more, **others)
        name = path.rsplit("/", 1)[1]
        self.requests.append(name)
        if name in self.broken:
            raise ApiUnavailable("no answer", where=path)
        found = self.jobs.get(name)
        return ApiResponse(status=404 if found is None else 200, document=found or {})


def make_job(name: str, *, ended_s_ago: float | None = None) -> Document:
    found = job()
    found["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    if ended_s_ago is not None:
        at = run_record.timestamp(BEGIN_S - ended_s_ago)
        found["status"] = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": at}]}
    return found


def make_pod(name: str, phase: str = "Succeeded") -> Document:
    found = pod()
    owner = {**found["metadata"]["ownerReferences"][0], "name": name, "uid": f"uid-{name}"}
    found["metadata"] |= {"name": f"{name}-x", "uid": f"pod-{name}", "ownerReferences": [owner]}
    found["status"] = {"phase": phase}
    return found


def controller_and_clock(api: FakeApi) -> tuple[Controller, SimpleNamespace]:
    clock = SimpleNamespace(now_s=BEGIN_S)
    controller = controller_of(api, keep_finished_s=KEEP_S, wall=lambda: clock.now_s)
    controller.watches.on_list()
    return controller, clock


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@async_test
async def test_pods_of_a_long_finished_job_are_released_when_listed(order: tuple[int]) -> None:
    api = JobListing(old := make_job("old", ended_s_ago=2 * KEEP_S))
    controller, _ = controller_and_clock(api)
    for which in order:
        if which:
            controller.watches.on_job(old)
        else:
            controller.watches.on_pod(make_pod("old"))
    await controller.watches.resolve_waiting()
    assert (api.requests, list(controller.runs()), controller.synced) == ([], [], True)


@async_test
async def test_long_finished_job_is_requested_once_in_ten_minutes() -> None:
    """Its CheckpointRun was removed, but the Job and its pods remain and still produce events."""
    api = JobListing(make_job("old", ended_s_ago=2 * KEEP_S))
    controller, clock = controller_and_clock(api)
    for _ in range(10):
        controller.watches.on_pod(make_pod("old"))
        await controller.watches.resolve_waiting()
        clock.now_s += RESOLVE_INTERVAL_S
    assert (api.requests, list(controller.runs())) == (["old"], [])
    clock.now_s += ABSENT_JOB_TTL_S
    controller.watches.on_pod(make_pod("old"))
    await controller.watches.resolve_waiting()
    assert api.requests == ["old", "old"]


@async_test
async def test_only_live_orphan_pods_are_kept() -> None:
    """A Job that cannot be read does not delay others."""
    api = JobListing()
    api.broken = {"odd"}
    controller, _ = controller_and_clock(api)
    for name, phase in (("odd", "Running"), ("ended", "Succeeded"), ("live", "Running")):
        controller.watches.on_pod(make_pod(name, phase))
    await controller.watches.resolve_waiting()
    assert (sorted(api.requests), controller.synced) == (["ended", "live", "odd"], True)
    assert [each.workload.name for each in controller.runs()] == ["live"]
    api.broken = set()
    await controller.watches.resolve_waiting()
    assert [each.workload.name for each in controller.runs()] == ["live", "odd"]
    assert api.requests.count("live") == 1


@async_test
async def test_late_job_adopts_its_pods() -> None:
    late = make_job("late", ended_s_ago=60.0)
    api = JobListing(late)
    controller, _ = controller_and_clock(api)
    controller.watches.on_pod(make_pod("late"))
    await controller.watches.resolve_waiting()
    assert (api.requests, list(controller.runs())) == (["late"], [])
    controller.watches.on_job(late)
    assert [list(each.pods) for each in controller.runs()] == [["pod-late"]]


@async_test
async def test_run_without_pods_ends_at_start_and_later_after_a_delay() -> None:
    """An unwatched Job has no pod for a moment while its pod is replaced."""
    api = JobListing()
    controller, clock = controller_and_clock(api)
    await controller.watches.resolve_waiting()
    document = make_pod("bare", phase="Running")
    controller.watches.on_pod(document)
    await controller.watches.resolve_waiting()
    metadata = document["metadata"]
    controller.watches.on_pod_deleted(ObjectKey("n", metadata["name"], metadata["uid"]), document)
    for seconds, reason in ((RESOLVE_INTERVAL_S, ""), (ABSENT_S, "Deleted")):
        clock.now_s += seconds
        await controller.watches.resolve_waiting()
        assert [each.finished for each in controller.runs()] == [reason]
