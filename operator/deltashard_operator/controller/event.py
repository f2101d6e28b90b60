"""Kubernetes Events: what happened to a run, told at the CheckpointRun and at the workload. Both find it.

An Event is an object of its own in the workload's namespace: telling it writes nothing of the user's. The same thing
told again within ten minutes raises the count of the Event that is there. What one run may tell is limited (25 at
once, then one a minute), and what waits to be told is bounded; what is over is counted and dropped. Telling is best
effort: a failed try is not repeated for ever, since the condition stays to be read.

Two lanes tell side by side, and all about one object goes through one of them: a count is raised in order, and never
on an Event that another worker is only about to create.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from deltashard_operator.kube.call import MERGE, ApiUnavailable, Caller
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.run_record import API_VERSION, KIND
from deltashard_operator.run.watched_run import Notice, Run

AGGREGATE_S = 600.0
BURST = 25
REFILL_S = 60.0
LANES = 2
MAX_WAITING = 1000  # in each lane
MAX_KNOWN = 4096
COMPONENT = "deltashard-controller"
MAX_MESSAGE = 1024
OUTCOMES = ("told", "repeated", "limited", "dropped", "failed")
_log = structlog.get_logger("deltashard.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Regarding:
    """What an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    def document(self) -> dict[str, str]:
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
        }


@dataclass(slots=True)
class _Known:
    name: str
    count: int
    last_s: float


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


_Lane = asyncio.Queue[tuple[Regarding, Notice]]


def regarding(run: Run, uid: str) -> tuple[Regarding, ...]:
    """The CheckpointRun (of this UID) and the workload."""
    workload = run.workload
    return (
        Regarding(api_version=API_VERSION, kind=KIND, namespace=workload.namespace, name=run.name, uid=uid),
        Regarding(
            api_version=workload.api_version or "v1",
            kind=workload.kind,
            namespace=workload.namespace,
            name=workload.name,
            uid=workload.uid,
        ),
    )


class Teller:
    """Tells notices in the background. `run` it as a task; `tell` never waits."""

    def __init__(
        self,
        call: Caller,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._call = call
        self._count = count
        self._wall = wall
        self._lanes: tuple[_Lane, ...] = tuple(asyncio.Queue(MAX_WAITING) for _ in range(LANES))
        self._known: OrderedDict[tuple[str, str, str], _Known] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._instance = uuid.uuid4().hex[:8]

    def __len__(self) -> int:
        return sum(lane.qsize() for lane in self._lanes)

    def tell(self, about: tuple[Regarding, ...], notice: Notice) -> None:
        if not self._allowed(about[0].uid):
            self._count("limited")
            return
        for each in about:
            try:
                self._lanes[hash(each.uid) % LANES].put_nowait((each, notice))
            except asyncio.QueueFull:
                self._count("dropped")

    def _allowed(self, uid: str) -> bool:
        now_s = self._wall()
        bucket = self._buckets.pop(uid, None) or _Bucket(tokens=BURST, at_s=now_s)
        bucket.tokens = min(BURST, bucket.tokens + max(now_s - bucket.at_s, 0.0) / REFILL_S)
        bucket.at_s = now_s
        self._buckets[uid] = bucket
        while len(self._buckets) > MAX_KNOWN:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._work(lane))

    async def drain(self, timeout_s: float) -> None:
        """Wait until all is told, or so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(lane.join() for lane in self._lanes))
        except TimeoutError:
            _log.warning("events.not_told", waiting=len(self))

    async def _work(self, lane: _Lane) -> None:
        while True:
            about, notice = await lane.get()
            try:
                self._count(await self._tell(about, notice))
            except ApiUnavailable as error:
                self._count("failed")
                _log.warning("events.failed", reason=notice.reason, error=str(error))
            except Exception:  # noqa: BLE001 - one odd Event must not keep the others from being told
                self._count("failed")
                _log.exception("events.failed", reason=notice.reason)
            finally:
                lane.task_done()

    async def _tell(self, about: Regarding, notice: Notice) -> str:
        now_s = self._wall()
        path = f"/api/v1/namespaces/{about.namespace}/events"
        key = (about.uid, notice.reason, "Warning" if notice.warning else "Normal")
        known = self._known.get(key)
        if known is not None and now_s - known.last_s < AGGREGATE_S:
            known.count, known.last_s = known.count + 1, now_s
            change = {
                "count": known.count,
                "lastTimestamp": timestamp(now_s),
                "message": notice.message[:MAX_MESSAGE],
            }
            answer = await self._call("PATCH", f"{path}/{known.name}", change, content=MERGE, tries=2)
            if answer.ok:
                return "repeated"
            if answer.status != 404:
                return self._refused(notice, answer.sentence)
        name = f"{about.name[:200]}.{uuid.uuid4().hex[:16]}"
        document = _event(about, notice, name, now_s, self._instance)
        answer = await self._call("POST", path, document, tries=2)
        # The name is ours alone: 409 says that the first of two tries had reached the API after all.
        if not answer.ok and answer.status != 409:
            return self._refused(notice, answer.sentence)
        self._known[key] = _Known(name=name, count=1, last_s=now_s)
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return "told"

    def _refused(self, notice: Notice, sentence: str) -> str:
        _log.warning("events.refused", reason=notice.reason, error=sentence)
        return "failed"


def _event(about: Regarding, notice: Notice, name: str, now_s: float, instance: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.namespace},
        "involvedObject": about.document(),
        "reason": notice.reason,
        "message": notice.message[:MAX_MESSAGE],
        "type": "Warning" if notice.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": "deltashard.io/controller",
        "reportingInstance": instance,
        "count": 1,
        "firstTimestamp": timestamp(now_s),
        "lastTimestamp": timestamp(now_s),
    }
