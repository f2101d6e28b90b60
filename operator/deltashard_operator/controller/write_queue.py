"""One queue for all that the controller writes of runs, policies and requests, so that the API's cost is bounded.

Who has something to write offers it by a key, as often as he likes: the newest offer of a key replaces the one before,
and is begun when its turn comes, never two of a key at once. The writes that are due go by rank, then by age. All of
them share a token bucket (`PER_S` sustained, `BURST` at once), of which commits and what is quieter leave `RESERVE` to
the others; while more than half of it is gone, what follows the write of a trouble is put together for `LATER_S`, so
that the loss of many pods is one write for each run. A write that fails waits longer each time.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

import structlog

from deltashard_operator.kube.call import THREADS, ApiUnavailable

PER_S = 20.0
BURST = 400.0
RESERVE = 300.0
SOON_S = 1.0
LATER_S = 10.0
QUIET_S = 300.0
NOTE_S = 60.0
MAX_BACKOFF_S = 60.0
AT_WORK = 2 * THREADS
"""Writes under way at once; the API's caller has fewer threads, and none of them shall wait for work."""
Work = Callable[[], Coroutine[Any, Any, None]]
_log = structlog.get_logger("deltashard.controller")


class Rank(enum.IntEnum):
    """What goes first."""

    NEW = 0
    """An object is made: once for a workload, so it takes no token."""
    TROUBLE = 1
    ORDER = 2
    """Somebody waits for it, as for a CheckpointRequest's status."""
    CONDITION = 3
    COMMIT = 4
    QUIET = 5
    NOTE = 6
    """An annotation of a pod."""


@dataclass(slots=True)
class _Line:
    """What is known of a key."""

    written_s: float
    not_before_s: float = 0.0
    failures: int = 0
    busy: bool = False
    rank: Rank = Rank.QUIET
    work: Work | None = None
    """None: nothing is offered."""


class WriteQueue:
    """The queue; on the controller's loop. `tick` it a few times a second."""

    def __init__(self, *, commit_s: float, wall: Callable[[], float]) -> None:
        """`commit_s`: writes of commits of one run are so far apart."""
        self._wall = wall
        self._tokens, self._filled_s = BURST, wall()
        self._apart_s = {
            Rank.NEW: 0.0,
            Rank.TROUBLE: SOON_S,
            Rank.ORDER: 0.0,
            Rank.CONDITION: SOON_S,
            Rank.COMMIT: commit_s,
            Rank.QUIET: max(commit_s, QUIET_S),
            Rank.NOTE: NOTE_S,
        }
        self._lines: dict[Hashable, _Line] = {}
        self._ready: deque[Hashable] = deque()
        """Those that are due, as the newest tick found them."""
        self._hurried = False
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way."""

    def __len__(self) -> int:
        """How many writes are due or under way."""
        return len(self._ready) + len(self.tasks)

    @property
    def idle(self) -> bool:
        """Whether nothing is offered and nothing is under way."""
        return not self.tasks and not any(each.work for each in self._lines.values())

    def offer(self, key: Hashable, rank: Rank, work: Work) -> None:
        """Have this written when its turn comes; it replaces what the key waits with.

        `work` makes the write of what is true when it is called. It raises `ApiUnavailable` or another error when it
        is to be tried again, after a pause that grows.
        """
        line = self._lines.get(key)
        if line is None:
            # What is quiet begins its pause now; what is more has none yet.
            line = self._lines[key] = _Line(written_s=self._wall() - LATER_S)
        line.rank, line.work = rank, work

    def withdraw(self, key: Hashable) -> None:
        """There is nothing to write any more."""
        if key in self._lines:
            self._lines[key].work = None

    def forget(self, key: Hashable) -> None:
        """The key will not come again."""
        self._lines.pop(key, None)

    def hurry(self) -> None:
        """From now on everything is due: the process ends."""
        self._hurried = True

    def tick(self) -> None:
        """Begin the writes whose turn it is."""
        now_s = self._wall()
        if now_s < self._filled_s:  # the clock was set back
            for line in self._lines.values():
                line.written_s = line.not_before_s = now_s
        self._tokens = min(BURST, self._tokens + max(now_s - self._filled_s, 0.0) * PER_S)
        self._filled_s = now_s
        due = [
            (line.rank, due_s, number, key)
            for number, (key, line) in enumerate(self._lines.items())
            if line.work is not None and not line.busy and (due_s := self._due_s(line)) <= now_s
        ]
        self._ready = deque(key for *_, key in sorted(due))
        self._begin()

    def _due_s(self, line: _Line) -> float:
        if self._hurried:
            return 0.0
        apart_s = self._apart_s[line.rank]
        if line.rank is Rank.CONDITION and self._tokens < BURST / 2:
            apart_s = LATER_S
        return max(line.written_s + apart_s, line.not_before_s)

    def _begin(self) -> None:
        while self._ready and len(self.tasks) < AT_WORK:
            key = self._ready[0]
            line = self._lines.get(key)
            if line is None or line.work is None or line.busy:
                self._ready.popleft()
                continue
            cost = 0.0 if self._hurried or line.rank is Rank.NEW else 1.0
            kept = RESERVE if cost and line.rank >= Rank.COMMIT else 0.0
            if self._tokens < cost + kept:  # what comes after it is no more urgent
                return
            self._tokens -= cost
            self._ready.popleft()
            work, line.work, line.busy = line.work, None, True
            task = asyncio.create_task(self._written(key, line, work))
            self.tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._begin()

    async def _written(self, key: Hashable, line: _Line, work: Work) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - one odd object must not stop the others
            line.failures += 1
            line.not_before_s = self._wall() + min(MAX_BACKOFF_S, 2.0 ** min(line.failures, 6))
            if isinstance(error, ApiUnavailable):
                _log.warning("write.failed", key=str(key), error=str(error))
            else:
                _log.exception("write.failed", key=str(key))
        else:
            line.failures, line.not_before_s = 0, 0.0
        finally:
            line.written_s, line.busy = self._wall(), False
