"""Queue of all writes of the controller, which bounds the load on the API.

Writers offer work by key, as often as needed: the newest offer of a key replaces the previous one, and only one write
per key is in flight. Due writes are ordered by priority, then by age. They share a token bucket (`PER_S` sustained,
`BURST` at once), of which each priority leaves its `RESERVE` to higher ones: after the loss of many pods there is room
for the next loss, and later changes are merged into one write. Events have a separate bucket, so that neither starves
the other. Failed writes are retried with exponential back-off.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import CONNECTIONS

PER_S = 20.0
BURST = 400.0
EVENT_PER_S = 10.0
EVENT_BURST = 200.0
FAST_INTERVAL_S = 1.0
LOW_INTERVAL_S = 300.0
ANNOTATION_INTERVAL_S = 60.0
MAX_BACKOFF_S = 60.0
MAX_IN_FLIGHT = 8 * CONNECTIONS
"""Maximum number of writes in flight, small enough that urgent writes do not wait long."""
OUTCOMES = ("written", "failed")
Work = Callable[[], Coroutine[Any, Any, object]]
_log = structlog.get_logger("deltashard.controller")


class Priority(enum.IntEnum):
    """Priority of a write; lower values go first."""

    NEW = 0
    """Creation of an object, once for a workload."""
    PROBLEM = 1
    ORDER = 2
    """Awaited by a user, e.g. the status of a CheckpointRequest."""
    CONDITION = 3
    EVENT = 4
    COMMIT = 5
    LOW = 6
    ANNOTATION = 7
    """Annotation of a pod."""


RESERVE = {Priority.CONDITION: 200.0, Priority.COMMIT: 300.0, Priority.LOW: 300.0, Priority.ANNOTATION: 300.0}


@dataclass(slots=True)
class _Item:
    """State of a key. Without `work` nothing is pending."""

    written_s: float
    not_before_s: float = 0.0
    failures: int = 0
    busy: bool = False
    priority: Priority = Priority.LOW
    work: Work | None = None


class WriteQueue:
    """Write queue on the controller's loop. Call `tick` several times a second."""

    def __init__(
        self,
        *,
        commit_s: float,
        wall: Callable[[], float],
        count: Callable[[str], object] = lambda _outcome: None,
    ) -> None:
        """`commit_s`: minimum time between writes of new commits of a run."""
        self._wall, self._count = wall, count
        self._tokens, self._event_tokens, self._refilled_s = BURST, EVENT_BURST, wall()
        self._min_interval_s = {
            Priority.PROBLEM: FAST_INTERVAL_S,
            Priority.CONDITION: FAST_INTERVAL_S,
            Priority.COMMIT: commit_s,
            Priority.LOW: max(commit_s, LOW_INTERVAL_S),
            Priority.ANNOTATION: ANNOTATION_INTERVAL_S,
        }
        self._items: dict[Hashable, _Item] = {}
        self._overdue = 0
        """Due writes that were not started at the last tick."""
        self._flushing = False
        self.tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return self._overdue + len(self.tasks)

    @property
    def idle(self) -> bool:
        return not self.tasks and not any(each.work for each in self._items.values())

    def offer(self, key: Hashable, priority: Priority, work: Work) -> None:
        """Queue `work`, which writes the state at its call, in place of the key's pending write. Errors are retried."""
        # A low-priority write of a new key waits from now on, an urgent one is due immediately.
        item = self._items.setdefault(key, _Item(written_s=self._wall() - FAST_INTERVAL_S))
        item.priority, item.work = priority, work

    def withdraw(self, key: Hashable) -> None:
        if key in self._items:
            self._items[key].work = None

    def forget(self, key: Hashable) -> None:
        self._items.pop(key, None)

    def flush(self) -> None:
        """Make all writes due, including failed ones, before the process exits."""
        self._flushing = True
        for item in self._items.values():
            item.not_before_s = 0.0

    def tick(self) -> None:
        now_s = self._wall()
        if now_s < self._refilled_s:  # the clock was set back
            for item in self._items.values():
                item.written_s = item.not_before_s = now_s
        passed_s = max(now_s - self._refilled_s, 0.0)
        self._tokens = min(BURST, self._tokens + passed_s * PER_S)
        self._event_tokens = min(EVENT_BURST, self._event_tokens + passed_s * EVENT_PER_S)
        self._refilled_s = now_s
        due = sorted(
            (item.priority, due_s, number, key)
            for number, (key, item) in enumerate(self._items.items())
            if item.work is not None and not item.busy and (due_s := self._due_s(item)) <= now_s
        )
        self._overdue = len(due)
        for priority, _, _, key in due:
            cost = 0.0 if self._flushing or priority is Priority.NEW else 1.0
            reserved = RESERVE.get(priority, 0.0) if cost else 0.0
            tokens = self._event_tokens if priority is Priority.EVENT else self._tokens
            if len(self.tasks) >= MAX_IN_FLIGHT or tokens < cost + reserved:
                continue
            if priority is Priority.EVENT:
                self._event_tokens -= cost
            else:
                self._tokens -= cost
            self._overdue -= 1
            item = self._items[key]
            task = asyncio.create_task(self._write(key, item, item.work))
            item.work, item.busy = None, True
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _due_s(self, item: _Item) -> float:
        if self._flushing:
            return item.not_before_s
        return max(item.written_s + self._min_interval_s.get(item.priority, 0.0), item.not_before_s)

    async def _write(self, key: Hashable, item: _Item, work: Work | None) -> None:
        assert work is not None
        item.failures += 1
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - one invalid object must not stop the others
            item.not_before_s = self._wall() + min(MAX_BACKOFF_S, 2.0 ** min(item.failures, 6))
            item.work = item.work or work
            self._count("failed")
            fault = not isinstance(error, EnvironmentFault)
            _log.warning("write.failed", key=str(key), error=str(error), exc_info=fault)
        else:
            item.failures, item.not_before_s = 0, 0.0
            self._count("written")
        finally:
            item.written_s, item.busy = self._wall(), False
