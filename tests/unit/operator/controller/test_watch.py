"""Pods that come before their Job: for whom they wait, how often the API is asked, and when they are let go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.watch import MAX_PAUSE_S, SETTLE_S, SETTLE_SOON_S
from deltashard_operator.kube.call import Answer, ApiUnavailable
from deltashard_operator.run import run_record

from tests.support.in_a_loop import in_a_loop
from tests.support.operator.controller_api import Api, Document, controller_of, job, pod

KEEP_S = 86400.0
BEGIN_S = 1_800_000_000.0


class Jobs(Api):
    """Serves Jobs by name; those in `broken` cannot be read."""

    def __init__(self, *jobs: Document) -> None:
        super().__init__()
        self.jobs = {each["metadata"]["name"]: each for each in jobs}
        self.broken: set[str] = set()

    async def __call__(self, method: str, path: str, *more: Any, **others: Any) -> Answer:
        if not path.startswith("/apis/batch/"):
            return await super().__call__(method, path, *more, **others)
        name = path.rsplit("/", 1)[1]
        self.asked.append(name)
        if name in self.broken:
            raise ApiUnavailable("no answer", where=path)
        found = self.jobs.get(name)
        return Answer(status=404 if found is None else 200, document=found or {})


class Clock:
    """A wall clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S

    def __call__(self) -> float:
        return self.now_s


class Held(dict[str, Any]):
    """A document, of which one sees whether it is let go."""


def a_job(name: str, *, ended_s_ago: float | None = None) -> Document:
    found = job()
    found["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    if ended_s_ago is not None:
        at = run_record.timestamp(BEGIN_S - ended_s_ago)
        found["status"] = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": at}]}
    return found


def a_pod(name: str, phase: str = "Succeeded") -> Held:
    """A pod of the Job of this name."""
    found = Held(pod())
    owner = {**found["metadata"]["ownerReferences"][0], "name": name, "uid": f"uid-{name}"}
    found["metadata"] |= {"name": f"{name}-x", "uid": f"pod-{name}", "ownerReferences": [owner]}
    found["status"] = {"phase": phase}
    return found


def watching(api: Api) -> tuple[Controller, Clock]:
    clock = Clock()
    controller = controller_of(api, keep_finished_s=KEEP_S, wall=clock)
    controller.watches.on_list()
    return controller, clock


@in_a_loop
async def test_the_pods_of_a_job_that_ended_long_ago_are_let_go_when_it_is_listed() -> None:
    old = a_job("old", ended_s_ago=2 * KEEP_S)
    api = Jobs(old)
    controller, _ = watching(api)
    for order in ((0, 1), (1, 0)):
        one = a_pod("old")
        left = weakref.ref(one)
        for which in order:
            if which:
                controller.watches.on_job(old)
            else:
                controller.watches.on_pod(one)
        await controller.watches.settle()
        del one
        gc.collect()
        assert left() is None
    assert (api.asked, len(list(controller.runs())), controller.synced) == ([], 0, True)


@in_a_loop
async def test_a_job_that_ended_long_ago_is_asked_for_once_and_its_pods_are_let_go() -> None:
    """As of a run whose CheckpointRun was removed: the Job and its pods stay, and say something now and then."""
    api = Jobs(a_job("old", ended_s_ago=2 * KEEP_S))
    controller, clock = watching(api)
    one = a_pod("old")
    left = weakref.ref(one)
    controller.watches.on_pod(one)
    del one
    for _ in range(10):
        await controller.watches.settle()
        gc.collect()
        assert left() is None
        controller.watches.on_pod(a_pod("old"))
        clock.now_s += SETTLE_SOON_S
    assert (api.asked, len(list(controller.runs()))) == (["old"], 0)
    clock.now_s += SETTLE_S
    controller.watches.on_pod(a_pod("old"))
    await controller.watches.settle()
    assert api.asked == ["old", "old"]


@in_a_loop
async def test_of_the_pods_that_nobody_comes_for_only_the_living_are_kept() -> None:
    api = Jobs()
    controller, _ = watching(api)
    controller.watches.on_pod(a_pod("dead"))
    controller.watches.on_pod(a_pod("living", phase="Running"))
    await controller.watches.settle()
    assert sorted(api.asked) == ["dead", "living"]
    assert [each.workload.name for each in controller.runs()] == ["living"]


@in_a_loop
async def test_a_job_that_cannot_be_read_stops_no_other_and_is_asked_for_again_after_pauses_that_grow() -> (
    None
):
    api = Jobs()
    api.broken = {"odd"}
    controller, clock = watching(api)
    for name in ("odd", "other"):
        controller.watches.on_pod(a_pod(name, phase="Running"))
    await controller.watches.settle()
    assert api.asked == ["odd", "other"]
    assert [each.workload.name for each in controller.runs()] == ["other"]
    assert controller.synced
    pause_s, asked = SETTLE_SOON_S, 1
    while pause_s < MAX_PAUSE_S:
        clock.now_s += pause_s - 1.0
        await controller.watches.settle()
        assert api.asked.count("odd") == asked
        clock.now_s += 1.0
        await controller.watches.settle()
        asked += 1
        assert api.asked.count("odd") == asked
        pause_s *= 2
    api.broken = set()
    clock.now_s += MAX_PAUSE_S
    await controller.watches.settle()
    assert [each.workload.name for each in controller.runs()] == ["other", "odd"]
    assert api.asked.count("other") == 1


@in_a_loop
async def test_a_job_that_is_to_come_takes_its_pods() -> None:
    young = a_job("young", ended_s_ago=60.0)
    api = Jobs(young)
    controller, _ = watching(api)
    controller.watches.on_pod(a_pod("young"))
    await controller.watches.settle()
    assert (api.asked, len(list(controller.runs()))) == (["young"], 0)
    controller.watches.on_job(young)
    assert [list(each.pods) for each in controller.runs()] == [["pod-young"]]
