"""Kubernetes Events: what happened to a run, told at the CheckpointRun and at the workload.

An Event's name is made of what it tells, so that who tells the same again, perhaps another controller, finds it there
(409) and knows that it is recorded. A sidecar's incident has a natural key (`Notice.key`); anything else is the same if
its text is and it is told within ten minutes. What waits is bounded: an incident for which there is no room is not
recorded, so its sidecar brings it again. One whose Event the API refuses is: nobody could tell it later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import structlog

from deltashard_operator.controller.write_queue import Rank, WriteQueue
from deltashard_operator.kube.call import Caller
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.run_record import API_VERSION, KIND
from deltashard_operator.run.watched_run import Notice, Run

SAME_S = 600.0
MAX_WAITING = 1000
MAX_RECORDED = 16384
MAX_MESSAGE = 1024
OUTCOMES = ("told", "repeated", "refused", "dropped")
_log = structlog.get_logger("deltashard.events")


class Events:
    """Tells notices, by the queue of writes."""

    def __init__(
        self, call: Caller, queue: WriteQueue, count: Callable[[str], None], wall: Callable[[], float]
    ) -> None:
        self._call, self._queue, self._count, self._wall = call, queue, count, wall
        self._waiting: set[str] = set()
        self._recorded: dict[str, None] = {}

    @property
    def recorded(self) -> Container[str]:
        """Keys of the newest incidents that need not be told any more."""
        return self._recorded

    def tell(self, run: Run, run_uid: str, notice: Notice) -> None:
        """Tell what happened to a run, whose CheckpointRun has this UID."""
        key = notice.key or f"{run_uid}/{notice.reason}/{notice.message}/{self._wall() // SAME_S:.0f}"
        if key in self._waiting or key in self._recorded:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped")
            return
        self._waiting.add(key)
        self._queue.offer(("event", key), Rank.EVENT, partial(self._tell, run, run_uid, notice, key))

    async def _tell(self, run: Run, run_uid: str, notice: Notice, key: str) -> None:
        mine = run.workload
        for kind, version, name, uid in (
            (KIND, API_VERSION, run.name, run_uid),
            (mine.kind, mine.api_version or "v1", mine.name, mine.uid),
        ):
            about = {
                "kind": kind,
                "apiVersion": version,
                "namespace": mine.namespace,
                "name": name,
                "uid": uid,
            }
            digest = hashlib.sha256(f"{run_uid}/{uid}/{key}".encode()).hexdigest()[:16]
            document = event(about, notice, digest, self._wall())
            path = f"/api/v1/namespaces/{mine.namespace}/events"
            answer = await self._call("POST", path, document, tries=2)
            self._count("told" if answer.ok else "repeated" if answer.status == 409 else "refused")
            if not answer.ok and answer.status != 409:
                _log.warning("events.refused", reason=notice.reason, error=answer.sentence)
        self._waiting.discard(key)
        self._queue.forget(("event", key))
        self._recorded[key] = None
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]


def event(about: Mapping[str, str], notice: Notice, digest: str, now_s: float) -> Mapping[str, Any]:
    """The Event of an object that tells a notice; its name is the object's, and a hash of what is told."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about['name'][:200]}.{digest}", "namespace": about["namespace"]},
        "involvedObject": about,
        "reason": notice.reason,
        "message": notice.message[:MAX_MESSAGE],
        "type": "Warning" if notice.warning else "Normal",
        "source": {"component": "deltashard-controller"},
        "count": 1,
        "firstTimestamp": timestamp(now_s),
        "lastTimestamp": timestamp(now_s),
    }
