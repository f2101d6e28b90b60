"""What is written of runs: CheckpointRuns made, patched and removed, and Events told.

A write is offered to the queue whenever a run was judged, and made of what is true when its turn comes. A status that
somebody else has written meanwhile, as a controller that leads at the same time does, is read, and the run goes on from
what it counts: sidecars tell again what is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from deltashard_operator.controller import status
from deltashard_operator.controller.event import Teller, regarding
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.controller.status import Conflict, StatusRefused, served
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.cluster_name import RUN_ID
from deltashard_operator.run import condition, run_record, watched_run
from deltashard_operator.run.watched_run import Notice, Run

Document = Mapping[str, Any]


class Writes:
    """Writes of all runs."""

    def __init__(self, books: Entries, *, teller: Teller) -> None:
        self._books = books
        self._teller = teller
        self._metrics = books.metrics
        self._wall = books.wall

    def look(self, entry: Entry, now_s: float) -> None:
        """Offer what is to be written of a run, and tell what may be told."""
        key = entry.run.key
        if entry.served is None:
            self._books.queue.offer(key, Rank.NEW, partial(self._guarded, entry))
            return
        self._tell(entry)
        before = json.loads(entry.written)
        changed = run_record.patch(before, run_record.status(entry.run, now_s))
        if changed:
            self._books.queue.offer(key, rank_of(before, changed), partial(self._guarded, entry))
        else:
            self._books.queue.withdraw(key)

    def remove(self, entry: Entry) -> None:
        """Remove its CheckpointRun; the run goes with it."""
        self._books.queue.offer(entry.run.key, Rank.CONDITION, partial(self._remove, entry))

    async def _guarded(self, entry: Entry) -> None:
        try:
            await self._write(entry)
        except Exception as error:
            self._metrics.writes.labels("failed").inc()
            if entry.run.finished and entry.served is None and isinstance(error, StatusRefused):
                self._books.drop(entry.run.key)  # its namespace is going
                return
            self._books.mark(entry.run.key)
            raise

    async def _write(self, entry: Entry) -> None:
        begun_s = self._wall()
        if entry.served is None:
            document, new = await status.create(self._books.call, run_record.document(entry.run))
            self._adopt(entry, document, begun_s)
            entry.born = document["metadata"].get("creationTimestamp", "")
            if new:
                self._tell_replaced(entry)
                _tell_unknown_kind(entry)
        run = entry.run
        assert entry.served is not None
        change = run_record.patch(json.loads(entry.written), run_record.status(run, begun_s))
        if change:
            try:
                after = await status.write(self._books.call, _path(run), entry.served, change)
            except Conflict as conflict:
                self._metrics.writes.labels("conflict").inc()
                self._adopt(entry, conflict.document, begun_s)
                return
            if after is None:
                self._metrics.writes.labels("lost").inc()
                self._books.lost(entry)
                return
            entry.served, entry.written, entry.durable = served(after), compact(after), run.ledger
        self._metrics.writes.labels("written").inc()
        self._metrics.write_seconds.observe(max(self._wall() - begun_s, 0.0))
        self._tell(entry)

    def _adopt(self, entry: Entry, document: Document, now_s: float) -> None:
        """Go on from the CheckpointRun as the API has it."""
        found = document.get("status") or {}
        known, written = entry.written, compact(document)
        entry.served, entry.written = served(document), written
        if not found or written == known:  # it is new, or has another label
            pass
        elif not run_record.patch(found, run_record.status(entry.run, now_s)):
            entry.durable = entry.run.ledger  # our own write, whose answer was lost
        else:
            entry.durable = run_record.run_of(document).ledger
            run = watched_run.with_ledger(entry.run, entry.durable, self._books.nodes, self._wall())
            self._books.set(entry, run)
        self._books.mark(entry.run.key)

    async def _remove(self, entry: Entry) -> None:
        self._tell(entry)
        if entry.served is not None:
            await status.remove(self._books.call, _path(entry.run), entry.served.uid)
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


def compact(document: Document) -> bytes:
    """The status of a CheckpointRun, as it is kept."""
    return json.dumps(document.get("status") or {}, separators=(",", ":"), sort_keys=True).encode()


def _path(run: Run) -> str:
    return status.path_of(run.workload.namespace, run_record.PLURAL, run.name)


def rank_of(before: Document, changed: Document) -> Rank:
    """How soon a change of a status is to be written."""
    if "failures" in changed or _troubles(changed) - _troubles(before):
        return Rank.TROUBLE
    if changed.keys() & run_record.MATERIAL:
        return Rank.CONDITION
    return Rank.COMMIT if changed.keys() & run_record.COMMIT else Rank.QUIET


def _troubles(document: Document) -> set[str]:
    found = document.get("conditions") or ()
    return {each["type"] for each in found if each["status"] == "True" and each["type"] != condition.READY}


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
