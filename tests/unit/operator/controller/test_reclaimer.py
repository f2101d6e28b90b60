"""The controller's part in removals, on an API that answers from memory and by a clock of the test's own."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_operator.api.duration import text_of
from deltashard_operator.controller.run_book import Entry
from deltashard_operator.kube.call import Answer
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_operator.run import run_record, watched_run
from deltashard_operator.run.reclaim import MAX_TRIES, ReclaimState

from tests.support.operator import sample
from tests.support.operator.controller_api import UID, Api, checkpoint_run, controller_of, job, pod

NAME = "deltashard-reclaim-" + UID.replace("-", "")[:12]
BEGAN_S = 1_700_000_000.0
DAY_S = 86400.0
STORE = {
    "url": "s3://checkpoints/team-a",
    "endpoint": "http://minio:9000",
    "secretRef": {"name": "deltashard-store"},
}
URL = "s3://checkpoints/team-a?endpoint=http://minio:9000"
WORD = {"runs": 1, "stay": 0, "kept": [], "objects": 5, "bytes": 50}
Document = dict[str, Any]


def merged(before: Document, patch: Document) -> Document:
    """As the API server merges (RFC 7386)."""
    found = dict(before)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key) or {}, value) if isinstance(value, dict) else value
    return found


class Jobs(Api):
    """Keeps the Jobs that are made; statuses are written at once."""

    def __init__(self, stored: list[Document] | None = None) -> None:
        super().__init__(stored)
        self.jobs: dict[str, Document] = {}
        self.pods: list[Document] = []
        self.statuses: list[Document] = []
        self._merged: dict[str, Document] = {}
        self.on_get: Callable[[], object] = lambda: None
        """Happens while a Job is asked for."""

    def made(self, place: str = "") -> int:
        """Jobs that were made, in a namespace."""
        return sum(each.startswith("POST") and each.endswith(f"{place}/jobs") for each in self.asked)

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **more: Any
    ) -> Answer:
        await asyncio.sleep(0)
        if "/jobs" in path:
            self.asked.append(f"{method} {path}")
            name = path.rpartition("/")[2]
            if method == "GET":
                if name == NAME:
                    self.on_get()
                known = self.jobs.get(name)
                return (
                    Answer(status=404, document={}) if known is None else Answer(status=200, document=known)
                )
            assert method == "POST", method
            assert body is not None
            self.jobs[body["metadata"]["name"]] = {**body, "status": {}}
            return Answer(status=201, document=dict(body))
        if method == "PATCH" and path.endswith("/status") and body is not None:
            self.asked.append(f"{method} {path}")
            self._merged[path] = merged(self._merged.get(path, {}), body["status"])
            self.statuses.append({key: self._merged[path].get(key) for key in body["status"]})
            metadata = {"uid": body["metadata"]["uid"]}
            return Answer(status=200, document={"metadata": metadata, "status": self._merged[path]})
        return await super().__call__(method, path, body, **more)

    async def every(self, path: str, **more: Any) -> list[Document]:
        return self.pods if path.endswith("/pods") else await super().every(path, **more)


class Bench:
    """A controller whose policy removes at once; `go` lets time pass."""

    def __init__(
        self,
        folder: Path,
        *,
        stored: list[Document] | None = None,
        defaults: Document | None = None,
        after_s: int = 0,
    ) -> None:
        self.now_s = BEGAN_S
        self.api = Jobs(stored)
        file = folder / "policy.yaml"
        file.write_text(
            yaml.safe_dump({**sample.DEFAULTS, "reclaiming": {"enabled": True}, **(defaults or {})})
        )
        self.controller = controller_of(
            self.api, keep_finished_s=7 * DAY_S, default_policy=file, wall=lambda: self.now_s
        )
        self.controller.watches.synced = True
        self.say(after=text_of(after_s))

    def say(self, namespace: str = "n", interval: Document | None = None, **reclaim: Any) -> None:
        """The namespace's policy is this."""
        whole = {"store": STORE, "reclaim": {"policy": "Delete", **reclaim}, "interval": interval or {}}
        metadata = {"namespace": namespace, "name": "default", "uid": f"q-{namespace}"}
        self.controller.watches.on_policy({"metadata": metadata, "spec": whole})

    def see(self, document: Document) -> Entry:
        """A Job is there, whose sidecars said where its checkpoints are."""
        self.controller.watches.on_job(document)
        metadata = document["metadata"]
        entry = self.controller._books.by_key[metadata["namespace"], metadata["uid"]]
        self.controller._books.set(entry, replace(entry.run, store=URL))
        return entry

    async def go(self, seconds: float = 8.0, step_s: float = 0.5) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            self.controller.tick()
            for _ in range(30):
                await asyncio.sleep(0)
            self.now_s += step_s

    def end(self, said: Document | None) -> None:
        """The Job that removes has succeeded; its pod said this, or is gone."""
        self.api.jobs[NAME]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        state = {"terminated": {"message": json.dumps(said), "finishedAt": "2026-01-01T00:00:00Z"}}
        pod = {"status": {"containerStatuses": [{"name": "reclaim", "state": state}]}}
        self.api.pods = [] if said is None else [pod]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def ended_job(*, at_s: float = BEGAN_S, namespace: str = "n", number: int = 0, **notes: str) -> Document:
    document = job()
    uid = UID if not number else f"{number:08x}-0000-4000-8000-000000000001"
    document["metadata"] |= {"name": f"train{number or ''}", "namespace": namespace, "uid": uid}
    document["metadata"]["annotations"] = {**document["metadata"]["annotations"], **notes}
    condition = {"type": "Complete", "status": "True", "lastTransitionTime": run_record.timestamp(at_s)}
    document["status"] = {"conditions": [condition]}
    return document


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def told(bench: Bench) -> list[Document]:
    """What statuses said of removals."""
    return [each["reclaim"] for each in bench.api.statuses if each.get("reclaim")]


def state_of(entry: Entry) -> ReclaimState | None:
    return None if entry.run.reclaim is None else entry.run.reclaim.state


@in_a_loop
async def test_a_job_is_made_and_what_came_of_it_is_said(bench: Bench) -> None:
    entry = bench.see(ended_job())
    await bench.go()
    assert bench.api.made() == 1
    assert state_of(entry) is ReclaimState.REMOVING
    bench.end(WORD)
    await bench.go()
    assert state_of(entry) is ReclaimState.REMOVED
    assert told(bench)[-1]["message"] == "the bytes are removed: 1 runs, 5 objects, 50 bytes"


@in_a_loop
async def test_a_word_that_was_lost_is_not_taken_for_done(bench: Bench) -> None:
    entry = bench.see(ended_job())
    await bench.go()
    bench.end(None)
    await bench.go()
    assert state_of(entry) is ReclaimState.FAILED
    assert bench.api.made() == 1


@in_a_loop
async def test_retain_that_is_said_while_it_looks_counts(bench: Bench) -> None:
    bench.api.on_get = lambda: bench.say(policy="Retain")
    bench.see(ended_job())
    await bench.go()
    assert bench.api.made() == 0


@pytest.mark.parametrize("other", ["shared", "shared-0", "shared-1-2", "shared-worker-0"])
@in_a_loop
async def test_a_workload_that_goes_on_with_the_run_while_it_looks_counts(bench: Bench, other: str) -> None:
    """With the whole run, or with that of one of its pods."""
    newer = job()
    newer["metadata"] |= {"name": "newer", "uid": "1b4f3c1e-0000-4000-8000-000000000002"}
    newer["metadata"]["annotations"] = {**newer["metadata"]["annotations"], "deltashard.io/run-id": other}
    bench.api.on_get = lambda: bench.controller.watches.on_job(newer)
    bench.see(ended_job(**{"deltashard.io/run-id": "shared"}))
    await bench.go()
    assert bench.api.made() == 0


@in_a_loop
async def test_a_checkpointrun_that_is_deleted_while_it_looks_ends_it(bench: Bench) -> None:
    entry = bench.see(ended_job())

    def gone() -> None:
        assert entry.served is not None
        bench.controller.watches.run_gone(ObjectKey("n", entry.run.name, entry.served.uid), None)

    bench.api.on_get = gone
    await bench.go()
    assert bench.api.made() == 0
    assert len(bench.controller) == 0


@in_a_loop
async def test_a_job_that_somebody_deletes_is_not_made_again_at_once_nor_for_ever(bench: Bench) -> None:
    entry = bench.see(ended_job())
    await bench.go()
    bench.api.jobs.clear()
    await bench.go()
    assert state_of(entry) is ReclaimState.FAILED
    await bench.go(3600, step_s=60)
    assert bench.api.made() == 1
    for _ in range(2 * MAX_TRIES):
        bench.now_s += 6 * 3600
        await bench.go()
        bench.api.jobs.clear()
    assert bench.api.made() == MAX_TRIES


@in_a_loop
async def test_a_job_that_vanished_is_not_made_again_after_retain(bench: Bench) -> None:
    entry = bench.see(ended_job())
    await bench.go()
    bench.say(policy="Retain")
    bench.api.jobs.clear()
    await bench.go()
    bench.now_s += DAY_S
    await bench.go()
    assert bench.api.made() == 1
    assert state_of(entry) is None


@in_a_loop
async def test_a_policy_that_cannot_be_used_keeps_nobody_else_from_theirs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defaults={"interval": {"atMost": "10m"}}, after_s=60)
    entries = [bench.see(ended_job(number=n)) for n in range(1, 30)]
    await bench.go()
    bench.say(after="60s", interval={"atLeast": "15m"})  # refused where it is laid over the default
    bench.say("other", after="60s")
    bench.see(ended_job(at_s=BEGAN_S + 1, namespace="other", number=99))
    await bench.go(120)
    assert bench.api.made("/n") == 0
    assert bench.api.made("/other") == 1
    assert {state_of(each) for each in entries} == {ReclaimState.KEPT}


@in_a_loop
async def test_a_namespace_whose_jobs_hang_keeps_nobody_else_from_theirs(bench: Bench) -> None:
    for n in range(1, 30):
        bench.see(ended_job(number=n))
    bench.say("other", after="0s")
    bench.see(ended_job(at_s=BEGAN_S + 1, namespace="other", number=99))
    await bench.go(60)
    assert bench.api.made("/other") == 1
    assert bench.api.made("/n") == 4, "at once"


@in_a_loop
async def test_what_came_of_it_is_read_before_the_checkpointrun_goes(tmp_path: Path) -> None:
    """The chart's own numbers: a grace of 7 days, and CheckpointRuns that are kept for 7."""
    bench = Bench(tmp_path, after_s=int(7 * DAY_S))
    entry = bench.see(ended_job())
    await bench.go()
    bench.now_s = BEGAN_S + 7 * DAY_S + 5
    await bench.go()
    bench.end(WORD)
    await bench.go()
    assert state_of(entry) is ReclaimState.REMOVED
    assert told(bench)[-1]["state"] == "Removed"
    assert not any(each.startswith("DELETE") for each in bench.api.asked)
    bench.now_s += 8 * DAY_S
    await bench.go()
    assert any(each.startswith("DELETE") for each in bench.api.asked), "in its time"


@in_a_loop
async def test_the_job_of_an_earlier_end_is_not_this_end_s(bench: Bench) -> None:
    """A JobSet ends, comes back, and ends again while the first Job is still there."""
    entry = bench.see(ended_job())
    await bench.go()
    bench.end(WORD)
    await bench.go()
    again = watched_run.finished(entry.run, "Completed", bench.now_s)
    bench.controller._books.set(entry, replace(again, reclaim=None))  # as when it began anew meanwhile
    await bench.go()
    assert state_of(entry) is ReclaimState.FAILED
    assert entry.run.reclaim is not None
    assert "not made for this end" in entry.run.reclaim.message


@in_a_loop
async def test_a_job_without_our_label_that_lives_is_not_gone(bench: Bench) -> None:
    """Made before the webhook: its pods are injected, and it is not watched. Its pod was evicted, the next is to come."""
    bare = job()
    del bare["metadata"]["labels"]
    bench.api.jobs["train"] = bare
    watches = bench.controller.watches
    watches.on_list()
    watches.on_pod(pod())
    bench.now_s += 2
    await watches.settle()
    await bench.go()
    (entry,) = bench.controller._books
    bench.controller._books.set(entry, replace(entry.run, store=URL))
    watches.pod_gone(ObjectKey("n", "train-x", "p-1"), pod())
    bench.now_s += 1
    await watches.settle()
    await bench.go(300, step_s=5)
    assert entry.run.finished == "Deleted", "so it seems"
    assert bench.api.made() == 0
    assert entry.run.reclaim is not None
    assert "Job train is there and has not ended" in entry.run.reclaim.message
    assert len(told(bench)) <= 3, told(bench)
    bench.api.jobs.pop("train")
    await bench.go(120, step_s=2)
    assert bench.api.made() == 1, "once it is gone"


@in_a_loop
async def test_a_label_that_is_taken_off_a_living_job_is_no_end(bench: Bench) -> None:
    bench.api.jobs["train"] = job()
    bench.see(job())
    await bench.go()
    bench.controller.watches.job_gone(ObjectKey("n", "train", UID), job())
    await bench.go()
    assert bench.api.made() == 0


@in_a_loop
async def test_a_job_that_is_seen_to_live_is_not_over(tmp_path: Path) -> None:
    """Its list was refused when this controller began, so it was taken for deleted; then it is seen, suspended."""
    at = run_record.timestamp(BEGAN_S)
    bench = Bench(
        tmp_path, stored=[checkpoint_run(phase="Training", observedTime=at, startedAt=at, store=URL)]
    )
    await bench.controller.load()
    bench.controller.watches.on_list()
    await bench.controller.watches.settle()
    suspended = job()
    suspended["spec"]["suspend"] = True
    bench.see(suspended)
    await bench.go()
    assert bench.api.made() == 0


@in_a_loop
async def test_many_runs_of_one_id_are_looked_at_once_each(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CronJob whose Jobs go on with one run leaves a thousand CheckpointRuns of its id in a week."""
    for n in range(1, 300):
        bench.see(ended_job(number=n, at_s=BEGAN_S + n, **{"deltashard.io/run-id": "nightly"}))
    looks = 0
    books = type(bench.controller._books)
    whole = books.is_continued

    def counted(self: Any, entry: Entry) -> bool:
        nonlocal looks
        looks += 1
        return whole(self, entry)

    monkeypatch.setattr(books, "is_continued", counted)
    bench.now_s += 400
    await bench.go(60)
    assert bench.api.made() == 1, "of the last of them"
    assert looks == 1
