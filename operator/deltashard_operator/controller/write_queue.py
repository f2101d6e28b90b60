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
SOON_S = 1.0
QUIET_S = 300.0
NOTE_S = 60.0
MAX_BACKOFF_S = 60.0
AT_WORK = 8 * CONNECTIONS
"""Writes under way at once: so few that what is more urgent need not wait long."""
OUTCOMES = ("written", "failed")
Work = Callable[[], Coroutine[Any, Any, object]]
_log = structlog.get_logger("deltashard.controller")


class Rank(enum.IntEnum):
    """What goes first."""

    NEW = 0
    """An object is made, once for a workload."""
    TROUBLE = 1
    ORDER = 2
    """Somebody waits for it, as for a CheckpointRequest's status."""
    CONDITION = 3
    EVENT = 4
    COMMIT = 5
    QUIET = 6
    NOTE = 7
    """An annotation of a pod."""


RESERVE = {Rank.CONDITION: 200.0, Rank.COMMIT: 300.0, Rank.QUIET: 300.0, Rank.NOTE: 300.0}


@dataclass(slots=True)
class _Line:
    """What is known of a key; without `work` nothing is offered."""

    written_s: float
    not_before_s: float = 0.0
    failures: int = 0
    busy: bool = False
    rank: Rank = Rank.QUIET
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
        self._tokens, self._event_tokens, self._filled_s = BURST, EVENT_BURST, wall()
        self._apart_s = {
            Rank.TROUBLE: SOON_S,
            Rank.CONDITION: SOON_S,
            Rank.COMMIT: commit_s,
            Rank.QUIET: max(commit_s, QUIET_S),
            Rank.NOTE: NOTE_S,
        }
        self._lines: dict[Hashable, _Line] = {}
        self._behind = 0
        """Writes that were due at the newest tick and not begun."""
        self._hurried = False
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way."""

    def __len__(self) -> int:
        """How many writes are due or under way."""
        return self._behind + len(self.tasks)

    @property
    def idle(self) -> bool:
        """Whether nothing is offered and nothing is under way."""
        return not self.tasks and not any(each.work for each in self._lines.values())

    def offer(self, key: Hashable, rank: Rank, work: Work) -> None:
        """Have this written when its turn comes; it replaces what the key waits with.

        `work` makes the write of what is true when it is called. It raises when it is to be tried again.
        """
        # A new key that is quiet begins its pause now; one that is more has none yet.
        line = self._lines.setdefault(key, _Line(written_s=self._wall() - SOON_S))
        line.rank, line.work = rank, work

    def withdraw(self, key: Hashable) -> None:
        """There is nothing to write any more."""
        if key in self._lines:
            self._lines[key].work = None

    def forget(self, key: Hashable) -> None:
        """The key will not come again."""
        self._lines.pop(key, None)

    def hurry(self) -> None:
        """From now on everything is due, also what failed before: the process ends."""
        self._hurried = True
        for line in self._lines.values():
            line.not_before_s = 0.0

    def tick(self) -> None:
        """Begin the writes whose turn it is."""
        now_s = self._wall()
        if now_s < self._filled_s:  # the clock was set back
            for line in self._lines.values():
                line.written_s = line.not_before_s = now_s
        passed_s = max(now_s - self._filled_s, 0.0)
        self._tokens = min(BURST, self._tokens + passed_s * PER_S)
        self._event_tokens = min(EVENT_BURST, self._event_tokens + passed_s * EVENT_PER_S)
        self._filled_s = now_s
        due = sorted(
            (line.rank, due_s, number, key)
            for number, (key, line) in enumerate(self._lines.items())
            if line.work is not None and not line.busy and (due_s := self._due_s(line)) <= now_s
        )
        self._behind = len(due)
        for rank, _, _, key in due:
            cost = 0.0 if self._hurried or rank is Rank.NEW else 1.0
            kept = RESERVE.get(rank, 0.0) if cost else 0.0
            tokens = self._event_tokens if rank is Rank.EVENT else self._tokens
            if len(self.tasks) >= AT_WORK or tokens < cost + kept:
                continue
            if rank is Rank.EVENT:
                self._event_tokens -= cost
            else:
                self._tokens -= cost
            self._behind -= 1
            line = self._lines[key]
            task = asyncio.create_task(self._write(key, line, line.work))
            line.work, line.busy = None, True
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _due_s(self, line: _Line) -> float:
        if self._hurried:
            return line.not_before_s
        return max(line.written_s + self._apart_s.get(line.rank, 0.0), line.not_before_s)

    async def _write(self, key: Hashable, line: _Line, work: Work | None) -> None:
        assert work is not None
        line.failures += 1
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - one odd object must not stop the others
            line.not_before_s = self._wall() + min(MAX_BACKOFF_S, 2.0 ** min(line.failures, 6))
            line.work = line.work or work
            self._count("failed")
            fault = not isinstance(error, EnvironmentFault)
            _log.warning("write.failed", key=str(key), error=str(error), exc_info=fault)
        else:
            line.failures, line.not_before_s = 0, 0.0
            self._count("written")
        finally:
            line.written_s, line.busy = self._wall(), False
