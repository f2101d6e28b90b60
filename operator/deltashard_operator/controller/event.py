"""Kubernetes Events: what happened to a run, told at the CheckpointRun and at the workload. Both find it.

An Event is an object of its own in the workload's namespace: telling it writes nothing of the user's. Its name is made
of what it tells, so that who tells the same again, perhaps another controller, finds it there (409) and knows that it
is recorded. A sidecar's incident has a natural key (`Notice.key`); anything else is the same if its text is and it is
told within ten minutes.

What one run may tell is limited (25 at once, then one a minute), and what waits to be told is bounded. An incident that
is over the limit, or whose Event the API refuses, counts as recorded: nobody would tell it later. One that could not be
told for a passing reason does not, so its sidecar brings it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any

import structlog

from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.run_record import API_VERSION, KIND
from deltashard_operator.run.watched_run import Notice, Run

SAME_S = 600.0
BURST = 25
REFILL_S = 60.0
WORKERS = 2
MAX_WAITING = 1000
MAX_KNOWN = 4096
MAX_RECORDED = 16384
COMPONENT = "deltashard-controller"
MAX_MESSAGE = 1024
OUTCOMES = ("told", "repeated", "limited", "dropped", "failed")
_log = structlog.get_logger("deltashard.events")


Regarding = Mapping[str, str]
"""What an Event is about: an ObjectReference."""


def regarding(run: Run, uid: str) -> tuple[Regarding, ...]:
    """The CheckpointRun (of this UID) and the workload."""
    mine, namespace = run.workload, run.workload.namespace
    version = mine.api_version or "v1"
    return (
        {"apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": run.name, "uid": uid},
        {
            "apiVersion": version,
            "kind": mine.kind,
            "namespace": namespace,
            "name": mine.name,
            "uid": mine.uid,
        },
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
        self._waiting: asyncio.Queue[tuple[tuple[Regarding, ...], Notice]] = asyncio.Queue(MAX_WAITING)
        self._keys: set[str] = set()
        """Keys of those that wait."""
        self._recorded: OrderedDict[str, None] = OrderedDict()
        self._whole_s: OrderedDict[str, float] = OrderedDict()
        """When a run may tell `BURST` at once again, by the UID of its CheckpointRun."""
        self._instance = uuid.uuid4().hex[:8]

    def __len__(self) -> int:
        return self._waiting.qsize()

    @property
    def recorded(self) -> Container[str]:
        """Keys of the newest incidents that need not be told any more."""
        return self._recorded

    def tell(self, about: tuple[Regarding, ...], notice: Notice) -> None:
        key = notice.key
        if key and (key in self._keys or key in self._recorded):
            return
        if not self._allowed(about[0]["uid"]):
            self._count("limited")
            self._record(key)
            return
        try:
            self._waiting.put_nowait((about, notice))
        except asyncio.QueueFull:
            self._count("dropped")
        else:
            self._keys.add(key)

    def _record(self, key: str) -> None:
        if key:
            self._recorded[key] = None
            if len(self._recorded) > MAX_RECORDED:
                self._recorded.popitem(last=False)

    def _allowed(self, uid: str) -> bool:
        now_s = self._wall()
        spent_s = min(max(self._whole_s.pop(uid, 0.0) - now_s, 0.0), BURST * REFILL_S)
        allowed = round(spent_s) <= (BURST - 1) * REFILL_S  # the difference of two times is not exact
        self._whole_s[uid] = now_s + spent_s + (REFILL_S if allowed else 0.0)
        if len(self._whole_s) > MAX_KNOWN:
            self._whole_s.popitem(last=False)
        return allowed

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def drain(self, timeout_s: float) -> None:
        """Wait until all is told, or so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiting.join()
        except TimeoutError:
            _log.warning("events.not_told", waiting=len(self))

    async def _work(self) -> None:
        while True:
            about, notice = await self._waiting.get()
            try:
                for each in about:
                    self._count(await self._tell(about[0]["uid"], each, notice))
                self._record(notice.key)
            except ApiUnavailable as error:
                self._count("failed")
                _log.warning("events.failed", reason=notice.reason, error=str(error))
            except Exception:  # noqa: BLE001 - one odd Event must not keep the others from being told
                self._count("failed")
                _log.exception("events.failed", reason=notice.reason)
            finally:
                self._keys.discard(notice.key)
                self._waiting.task_done()

    async def _tell(self, run_uid: str, about: Regarding, notice: Notice) -> str:
        now_s = self._wall()
        key = notice.key or f"{notice.reason}/{notice.message}/{now_s // SAME_S:.0f}"
        digest = hashlib.sha256(f"{run_uid}/{about['uid']}/{key}".encode()).hexdigest()
        document = _event(about, notice, f"{about['name'][:200]}.{digest[:16]}", now_s, self._instance)
        answer = await self._call(
            "POST", f"/api/v1/namespaces/{about['namespace']}/events", document, tries=2
        )
        if answer.ok:
            return "told"
        if answer.status == 409:
            return "repeated"
        _log.warning("events.refused", reason=notice.reason, error=answer.sentence)
        return "failed"


def _event(about: Regarding, notice: Notice, name: str, now_s: float, instance: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about["namespace"]},
        "involvedObject": about,
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
