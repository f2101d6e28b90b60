"""One queue for all that the controller writes, so that the API's cost is bounded.

Who has something to write offers it by a key, as often as he likes: the newest offer of a key replaces the one before,
and is begun when its turn comes, never two of a key at once. The writes that are due go by rank, then by age. All of
them share a token bucket (`PER_S` sustained, `BURST` at once), of which each rank leaves its `RESERVE` to those before
it: after the loss of many pods there is room for the next loss, and what follows the first is put together. Events have
a bucket of their own, so that neither starves the other. A write that fails is tried again, after a pause that grows.
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
"""Writes under way at once: so few that what is more urgent need not wait long."""
OUTCOMES = ("written", "failed")
Work = Callable[[], Coroutine[Any, Any, object]]
_log = structlog.get_logger("deltashard.controller")


class Priority(enum.IntEnum):
    """What goes first."""

    NEW = 0
    """An object is made, once for a workload."""
    PROBLEM = 1
    ORDER = 2
    """Somebody waits for it, as for a CheckpointRequest's status."""
    CONDITION = 3
    EVENT = 4
    COMMIT = 5
    LOW = 6
    ANNOTATION = 7
    """An annotation of a pod."""


RESERVE = {Priority.CONDITION: 200.0, Priority.COMMIT: 300.0, Priority.LOW: 300.0, Priority.ANNOTATION: 300.0}


@dataclass(slots=True)
class _Item:
    """What is known of a key; without `work` nothing is offered."""

    written_s: float
    not_before_s: float = 0.0
    failures: int = 0
    busy: bool = False
    priority: Priority = Priority.LOW
    work: Work | None = None


class WriteQueue:
    """The queue; on the controller's loop. `tick` it a few times a second."""

    def __init__(
        self,
        *,
        commit_s: float,
        wall: Callable[[], float],
        count: Callable[[str], object] = lambda _outcome: None,
    ) -> None:
        """`commit_s`: writes of commits of one run are so far apart."""
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
        """Writes that were due at the newest tick and not begun."""
        self._flushing = False
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way."""

    def __len__(self) -> int:
        """How many writes are due or under way."""
        return self._overdue + len(self.tasks)

    @property
    def idle(self) -> bool:
        """Whether nothing is offered and nothing is under way."""
        return not self.tasks and not any(each.work for each in self._items.values())

    def offer(self, key: Hashable, priority: Priority, work: Work) -> None:
        """Have this written when its turn comes; it replaces what the key waits with.

        `work` makes the write of what is true when it is called. It raises when it is to be tried again.
        """
        # A new key that is quiet begins its pause now; one that is more has none yet.
        item = self._items.setdefault(key, _Item(written_s=self._wall() - FAST_INTERVAL_S))
        item.priority, item.work = priority, work

    def withdraw(self, key: Hashable) -> None:
        """There is nothing to write any more."""
        if key in self._items:
            self._items[key].work = None

    def forget(self, key: Hashable) -> None:
        """The key will not come again."""
        self._items.pop(key, None)

    def flush(self) -> None:
        """From now on everything is due, also what failed before: the process ends."""
        self._flushing = True
        for item in self._items.values():
            item.not_before_s = 0.0

    def tick(self) -> None:
        """Begin the writes whose turn it is."""
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
        except Exception as error:  # noqa: BLE001 - one odd object must not stop the others
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
