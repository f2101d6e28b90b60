"""What is written of runs: CheckpointRuns made, patched and removed, and Events told.

A write is a task of its own, one at a time for each run, when it is due (see `status.Pace`). An incident of a sidecar
is in good hands when the status that counts it is written (`Entry.durable`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from deltashard_operator.controller.event import Teller, regarding
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.controller.status import Statuses, StatusRefused
from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.call import THREADS, ApiUnavailable
from deltashard_operator.kube.cluster_name import RUN_ID
from deltashard_operator.run import run_record
from deltashard_operator.run.watched_run import Notice

CROWD = 2 * THREADS
"""Writes under way: more wait for one another."""
_log = structlog.get_logger("deltashard.controller")


class Writes:
    """Writes of all runs."""

    def __init__(
        self,
        books: Entries,
        *,
        statuses: Statuses,
        teller: Teller,
        metrics: ControllerMetrics,
        wall: Callable[[], float],
    ) -> None:
        self._books = books
        self._statuses = statuses
        self._teller = teller
        self._metrics = metrics
        self._wall = wall
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way."""

    def wait_s(self, entry: Entry, now_s: float) -> float:
        """How long until something of it is to be written: 0 is now, infinity is nothing."""
        if entry.served is None:
            return max(0.0, entry.pace.not_before_s - now_s)
        self._tell(entry)
        changed = run_record.patch(entry.written, run_record.status(entry.run, now_s))
        crowded = len(self.tasks) >= CROWD
        return entry.pace.wait_s(changed, now_s, crowded=crowded) if changed else math.inf

    def write(self, entry: Entry) -> None:
        self._start(self._write(entry), entry)

    def remove(self, entry: Entry) -> None:
        """Begin to remove its CheckpointRun; the run goes with it."""
        self._start(self._remove(entry), entry)

    def _start(self, work: Coroutine[Any, Any, None], entry: Entry) -> None:
        entry.busy = True
        task = asyncio.create_task(self._guarded(work, entry))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None], entry: Entry) -> None:
        key = entry.run.key
        try:
            await work
        except (ApiUnavailable, StatusRefused) as error:
            self._metrics.writes.labels("failed").inc()
            entry.pace.failed(self._wall())
            _log.warning("run.not_written", namespace=key[0], run=entry.run.name, error=str(error))
            if entry.run.finished and entry.served is None and isinstance(error, StatusRefused):
                self._books.drop(key)  # its namespace is going
        except Exception:  # noqa: BLE001 - the same
            self._metrics.writes.labels("failed").inc()
            entry.pace.failed(self._wall())
            _log.exception("run.not_written", namespace=key[0], run=entry.run.name)
        finally:
            entry.busy = False
            if self._books.by_key.get(key) is entry:
                self._books.mark(key)

    async def _write(self, entry: Entry) -> None:
        begun_s = self._wall()
        if entry.served is None:
            entry.served, new = await self._statuses.create(run_record.document(entry.run))
            entry.written = entry.served.status
            entry.born = entry.served.created
            if new:
                self._tell_replaced(entry)
                _tell_unknown_kind(entry)
        run = entry.run
        change = run_record.patch(entry.written, run_record.status(run, begun_s))
        if change:
            after = await self._statuses.write(run.workload.namespace, run.name, entry.served.uid, change)
            if after is None:
                self._metrics.writes.labels("lost").inc()
                self._books.lost(entry)
                return
            entry.written, entry.durable = after, run.taken
        self._metrics.writes.labels("written").inc()
        self._metrics.write_seconds.observe(max(self._wall() - begun_s, 0.0))
        entry.pace.written(self._wall())
        self._tell(entry)

    async def _remove(self, entry: Entry) -> None:
        self._tell(entry)
        if entry.served is not None:
            await self._statuses.remove(entry.run.workload.namespace, entry.run.name, entry.served.uid)
        self._metrics.removed.inc()
        self._books.drop(entry.run.key)

    def _tell(self, entry: Entry) -> None:
        if entry.served is None:
            return
        about = regarding(entry.run, entry.served.uid)
        while entry.notices:
            self._teller.tell(about, entry.notices.popleft())

    def _tell_replaced(self, entry: Entry) -> None:
        """A new UID under an old name: say how the older run is continued."""
        mine = entry.run.workload
        older = [
            each
            for each in self._books
            if each is not entry
            and (each.run.workload.namespace, each.run.workload.called) == (mine.namespace, mine.called)
            and each.run.run_id != entry.run.run_id
        ]
        if not older:
            return
        last = max(older, key=lambda each: each.born).run
        step = (
            f", whose newest checkpoint is of step {last.progress.last_step}"
            if last.progress.last_seq
            else ""
        )
        how = (
            f"create it with the annotation {RUN_ID}: {last.run_id}"
            if len(last.run_id) <= 63 and "." not in last.run_id
            else "start training with from_run of that name"
        )
        text = (
            f"{mine.kind} {mine.name} is a new run, {entry.run.run_id}. An earlier {mine.kind} of this name was run "
            f"{last.run_id}{step}. To go on with that one, {how}"
        )
        entry.notices.append(Notice(reason="RunReplaced", message=text, warning=False))


def _tell_unknown_kind(entry: Entry) -> None:
    """A warning at admission reaches only who made the pod, and that was a controller."""
    mine = entry.run.workload
    if mine.native or mine.group_kind in owner_reference.KNOWN:
        return
    text = (
        f"{mine.called}: this kind is not supported. If it makes its pods anew they may not go on with their run, and "
        f"several of its pods would fence one another; use {RUN_ID}, and one pod"
    )
    entry.notices.append(Notice(reason="UnsupportedKind", message=text))
