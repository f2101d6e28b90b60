"""Removals with an API in memory and a fake clock, and the specification of their Job."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.reclaimer import Reclaimer
from deltashard_operator.controller.run_store import RunEntry, RunStore
from deltashard_operator.controller.watch import WatchHandlers
from deltashard_operator.controller.write_queue import WriteQueue
from deltashard_operator.kube.call import ApiResponse, ApiUnavailable, Caller
from deltashard_operator.kube.object_watch import ObjectKey
from deltashard_operator.run import reconcile, watched_run
from deltashard_operator.run.observed_object import ABSENT_S, Workload, timestamp
from deltashard_operator.run.reclaim import FAILED, KEPT, REMOVED, REMOVING, ReclaimState
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.async_test import async_test
from tests.support.operator import sample
from tests.support.operator.controller_api import UID, job, pod

BASE_TIME_S = 1_700_000_000.0
DAY_S = 86400.0
STORE = {"url": "s3://checkpoints/team-a", "endpoint": "http://minio:9000", "secretRef": {"name": "keys"}}
URL = "s3://checkpoints/team-a?endpoint=http://minio:9000"
JOBS = "/apis/batch/v1/namespaces/n/jobs"
Document = dict[str, Any]


class JobApi:
    """The API's Jobs, created by the reclaimer or by a test."""

    def __init__(self) -> None:
        self.jobs: dict[str, Document] = {}
        self.made: list[str] = []
        self.pods: list[Document] = []
        self.unreachable = self.refuses = False
        self.on_get: Callable[[], object] = lambda: None
        """Called during the request for the removal Job."""

    async def __call__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **_: Any
    ) -> ApiResponse:
        await asyncio.sleep(0)
        if self.unreachable:
            raise ApiUnavailable("no answer", where=path)
        if method == "GET":
            if "/deltashard-reclaim-" in path:
                self.on_get()
            known = self.jobs.get(path)
            return ApiResponse(status=404 if known is None else 200, document=known or {})
        assert (method, body is None) == ("POST", False)
        self.made.append(path)
        if self.refuses:
            return ApiResponse(status=403, document={})
        self.jobs[f"{path}/{(body or {})['metadata']['name']}"] = {**(body or {}), "status": {}}
        return ApiResponse(status=201, document=dict(body or {}))

    async def list_all(self, path: str, **_: Any) -> list[Document]:
        assert path.endswith("/pods")
        return self.pods


class ReclaimerBench:
    """A reclaimer, and watches with a policy that removes at once; `advance` moves the clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = BASE_TIME_S
        self.api = JobApi()
        file = folder / "policy.yaml"
        more = {"reclaiming": {"enabled": True}, "interval": {"max": "10m"}}
        file.write_text(yaml.safe_dump({**sample.DEFAULTS, **more}))
        call, defaults = cast(Caller, self.api), Defaults(file, None)

        def wall() -> float:
            return self.now_s

        self.queue = WriteQueue(commit_s=1.0, wall=wall)
        self.metrics = ControllerMetrics()
        self.run_store = RunStore(
            call=call, defaults=defaults, metrics=self.metrics, queue=self.queue, wall=wall
        )
        self.watches = WatchHandlers(self.run_store, keep_finished_s=7 * DAY_S)
        self.reclaimer = Reclaimer(self.run_store)
        self.set_policy()

    def set_policy(self, namespace: str = "n", interval: Document | None = None, **reclaim: Any) -> None:
        reclaim_spec = {"policy": "Delete", "after": "0s", **reclaim}
        spec = {"store": STORE, "reclaim": reclaim_spec, "interval": interval or {}}
        metadata = {"namespace": namespace, "name": "default", "uid": f"q-{namespace}"}
        self.watches.on_policy({"metadata": metadata, "spec": spec})

    def add_job(self, document: Document) -> RunEntry:
        """Add a Job with a CheckpointRun whose sidecars reported their store."""
        self.watches.on_job(document)
        metadata = document["metadata"]
        return self.kept(self.run_store.by_key[metadata["namespace"], metadata["uid"]])

    def kept(self, entry: RunEntry) -> RunEntry:
        run, _ = reconcile.reconcile(entry.run, {}, self.now_s)
        self.run_store.set(entry, replace(run, store=URL))
        entry.object_version, entry.written = {"uid": "made"}, b'{"finishedAt":"then"}'
        return entry

    async def advance(self, seconds: float = 30.0, step_s: float = 1.0) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            self.reclaimer.reconcile(self.now_s)
            self.queue.tick()
            if self.queue.tasks:
                await asyncio.wait(self.queue.tasks)
            self.now_s += step_s

    def end(self, output: str, how: str = "Complete") -> None:
        """End the removal Job with this message of its newest pod."""
        (job,) = self.api.jobs.values()
        job["status"] = {"conditions": [{"type": how, "status": "True", "reason": "BackoffLimitExceeded"}]}
        for message, second in ((output, 9), ("no connection", 0)):
            state = {"terminated": {"message": message, "finishedAt": f"2026-01-01T00:00:0{second}Z"}}
            ended = [{"name": "mesh", "state": {}}, {"name": "reclaim", "state": state}]
            self.api.pods.append({"status": {"containerStatuses": ended}})


@pytest.fixture
def bench(tmp_path: Path) -> ReclaimerBench:
    return ReclaimerBench(tmp_path)


def ended_job(
    *, at_s: float = BASE_TIME_S, namespace: str = "n", number: int = 0, run_id: str = ""
) -> Document:
    document = job()
    uid = UID if not number else f"{number:08x}-0000-4000-8000-000000000001"
    document["metadata"] |= {"name": f"train{number or ''}", "namespace": namespace, "uid": uid}
    if run_id:
        document["metadata"]["annotations"] |= {"deltashard.io/run-id": run_id}
    condition = {"type": "Complete", "status": "True", "lastTransitionTime": timestamp(at_s)}
    document["status"] = {"conditions": [condition]}
    return document


def state_of(entry: RunEntry) -> ReclaimState | None:
    return None if entry.run.reclaim is None else entry.run.reclaim.state


GONE = {"runs": 1, "retained": 0, "kept": [], "objects": 5, "bytes": 50}
STAYS = {**GONE, "retained": 9, "kept": [{"run": "t/a", "why": "a pin"}]}


@pytest.mark.parametrize(
    ("output", "how", "state", "message"),
    [
        (json.dumps(GONE), "Complete", REMOVED, "5 objects, 50 bytes"),
        (json.dumps(STAYS), "Complete", KEPT, "9 runs are kept: t/a: a pin; removed: 1 runs"),
        ("no JSON", "Complete", FAILED, "cannot be parsed"),
        ('{"runs": 5}', "Complete", FAILED, "cannot be parsed"),
        ("no keys", "Failed", FAILED, "failed: no keys"),
        ("", "Failed", FAILED, "failed: BackoffLimitExceeded"),
    ],
)
@async_test
async def test_removal_job_is_created_and_its_result_is_read(
    bench: ReclaimerBench, output: str, how: str, state: ReclaimState, message: str
) -> None:
    """The Job is created once, although the API was unreachable. A second Job removes what the first one left."""
    entry = bench.add_job(ended_job())
    bench.api.unreachable = True
    await bench.advance()
    bench.api.unreachable = False
    await bench.advance(90)
    assert (state_of(entry), bench.api.jobs.keys()) == (
        REMOVING,
        {f"{JOBS}/{reclaim_job.job_name(entry.run)}"},
    )
    bench.end(output, how)
    await bench.advance()
    assert (state_of(entry), len(bench.api.made)) == (state, 1)
    assert entry.run.reclaim is not None
    assert message in entry.run.reclaim.message
    await bench.advance(900)
    ends = {"outcome": state.value.lower()}
    assert bench.metrics.registry.get_sample_value("deltashard_controller_reclaims_total", ends) == 1
    (notice,) = entry.events
    assert notice.warning == (state is not REMOVED)
    bench.api.jobs.clear()
    await bench.advance(900)
    assert (state_of(entry), len(bench.api.made)) == ((REMOVED, 1) if state is REMOVED else (REMOVING, 2))
    bench.set_policy(policy="Retain")
    await bench.advance()
    assert state_of(entry) is (REMOVED if state is REMOVED else REMOVING), "a running removal continues"


@async_test
async def test_forbidden_job_is_reported_once_and_retried(bench: ReclaimerBench) -> None:
    entry = bench.add_job(ended_job())
    bench.api.refuses = True
    await bench.advance(1200)
    assert (state_of(entry), len(entry.events), 3 <= len(bench.api.made) <= 5) == (FAILED, 1, True)
    bench.api.refuses = False
    await bench.advance(400)
    assert state_of(entry) is REMOVING


def continued(bench: ReclaimerBench, run_id: str) -> None:
    newer = job()
    newer["metadata"] |= {"name": "newer", "uid": "1b4f3c1e-0000-4000-8000-000000000002"}
    newer["metadata"]["annotations"] |= {"deltashard.io/run-id": run_id}
    bench.watches.on_job(newer)


@pytest.mark.parametrize(
    "event",
    [
        lambda bench: bench.set_policy(policy="Retain"),
        lambda bench: bench.watches.on_run_deleted(ObjectKey("n", "train", "made"), None),
        *(
            functools.partial(continued, run_id=run_id)
            for run_id in ("shared", "shared-0", "shared-1-2", "shared-worker-0")
        ),
    ],
)
@async_test
async def test_changes_during_the_check_are_honored(
    bench: ReclaimerBench, event: Callable[[ReclaimerBench], None]
) -> None:
    """The policy retains, the CheckpointRun is deleted, or another workload holds the run or one of its parts."""
    bench.api.on_get = lambda: event(bench)
    bench.add_job(ended_job(run_id="shared"))
    await bench.advance()
    assert bench.api.made == []


@async_test
async def test_blocked_namespace_does_not_block_others(bench: ReclaimerBench) -> None:
    entries = [bench.add_job(ended_job(number=n)) for n in range(1, 30)]
    for namespace, number in (("other", 98), ("bad", 99)):
        bench.set_policy(namespace)
        entries.append(bench.add_job(ended_job(at_s=BASE_TIME_S + 1, namespace=namespace, number=number)))
    bench.reclaimer.reconcile(bench.now_s)
    bench.set_policy(
        "bad", interval={"min": "15m", "goal": {"type": "Auto"}}
    )  # refused when merged with the default
    await bench.advance(60)
    assert [sum(f"/{name}/" in each for each in bench.api.made) for name in ("n", "other")] == [4, 1]
    assert state_of(entries[-1]) is KEPT


@async_test
async def test_removal_job_of_an_earlier_end_is_ignored(bench: ReclaimerBench) -> None:
    """A JobSet ends, restarts and ends again while the first removal Job still exists."""
    entry = bench.add_job(ended_job())
    await bench.advance()
    bench.end(json.dumps(GONE))
    again = watched_run.finished(entry.run, "Completed", bench.now_s)
    bench.run_store.set(entry, replace(again, reclaim=None))  # as if the workload restarted meanwhile
    await bench.advance()
    assert (state_of(entry), len(bench.api.made)) == (REMOVING, 2)


@async_test
async def test_live_job_without_our_label_is_not_finished(bench: ReclaimerBench) -> None:
    """The Job is older than the webhook: its pods are injected, but it is not watched. Its pod was evicted."""
    bare, path = job(), f"{JOBS}/train"
    del bare["metadata"]["labels"]
    bench.api.jobs[path] = bare
    bench.watches.on_list()
    bench.watches.on_pod(pod())
    bench.now_s += 2
    await bench.watches.resolve_waiting()
    (entry,) = bench.run_store
    bench.kept(entry)
    bench.watches.on_pod_deleted(ObjectKey("n", "train-x", "p-1"), pod())
    bench.now_s += ABSENT_S
    await bench.watches.resolve_waiting()
    assert entry.run.finished == "Deleted", "as far as the watches show"
    await bench.advance(900)
    assert entry.run.reclaim is not None
    assert (bench.api.made, entry.run.reclaim.message) == ([], "Job train still exists and has not ended")
    assert len(entry.events) == 1, "the state does not change at each check"
    del bench.api.jobs[path]
    await bench.advance(400)
    assert len(bench.api.made) == 1, "only after the Job was deleted"


def test_removal_job_has_chart_labels_and_bypasses_mesh_and_quota() -> None:
    queue = {"kueue.x-k8s.io/queue-name": "chores"}
    run = WatchedRun(workload=Workload(namespace="team", kind="Job", name="train", uid=UID))
    found = reclaim_job.manifest(run, replace(sample.policy(), reclaim_labels=queue))
    pod = found["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert "ownerReferences" not in found["metadata"], "deleting the CheckpointRun must not stop the removal"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}, "a quota may require both"
    assert found["metadata"]["labels"].items() >= queue.items()
    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert pod["metadata"]["annotations"]["linkerd.io/inject"] == "disabled"
