"""What is written of runs: CheckpointRuns made, patched and removed, and Kubernetes Events of what happened.

A write is offered to the queue whenever a run was judged, and made of what is true when its turn comes. A status that
somebody else has written meanwhile, as a controller that leads at the same time does, is read, and the run goes on from
what it counts: sidecars tell again what is not in it.

An Event's name is made of what it tells, so that who tells the same again, perhaps another controller, finds it there
(409). A sidecar's incident has a natural key (`Notice.key`); anything else is the same if its text is and it is told
within ten minutes. What waits is bounded: an incident for which there is no room is brought again by its sidecar. What
one run may tell is limited (`BURST` at once, then one in `REFILL_S`): an incident over that counts as told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog

from deltashard_operator.controller import status
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.controller.status import StatusRefused, served
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.cluster_name import RESTORE_FROM, RUN_ID
from deltashard_operator.run import condition, run_record, watched_run
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import Notice, Run

SAME_S = 600.0
BURST = 25
REFILL_S = 60.0
MAX_WAITING = 1000
MAX_RECORDED = 16384
MAX_MESSAGE = 1024
Document = Mapping[str, Any]
_log = structlog.get_logger("deltashard.events")


class Writes:
    """Writes of all runs."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._waiting: set[str] = set()
        self.recorded: dict[str, None] = {}
        """Keys of the newest incidents that need not be told any more."""

    def adopt(self, entry: Entry, document: Document) -> None:
        """Know a CheckpointRun as the API has it."""
        entry.served, entry.written = served(document), _compact(document)

    def look(self, entry: Entry, now_s: float) -> None:
        """Offer what is to be written of a run, and tell what may be told."""
        key, write = entry.run.key, partial(self._write, entry)
        if entry.served is None:
            self._books.queue.offer(key, Rank.NEW, write)
            return
        self._tell(entry)
        before = json.loads(entry.written)
        changed = run_record.patch(before, run_record.status(entry.run, now_s))
        if changed:
            self._books.queue.offer(key, rank_of(before, changed), write)
        else:
            self._books.queue.withdraw(key)

    def remove(self, entry: Entry) -> None:
        """Remove its CheckpointRun; the run goes with it."""
        self._books.queue.offer(entry.run.key, Rank.CONDITION, partial(self._remove, entry))

    async def _write(self, entry: Entry) -> None:
        if entry.served is None and not await self._make(entry):
            return
        run = entry.run
        assert entry.served is not None
        change = run_record.patch(json.loads(entry.written), run_record.status(run, self._books.wall()))
        if not change:
            return
        after, done = await status.write(self._books.call, _path(run), entry.served, change)
        if after is None:
            self._books.lost(entry)
        elif done:
            self.adopt(entry, after)
            entry.durable = run.ledger
            self._tell(entry)
        else:
            self._go_on_from(entry, after)

    async def _make(self, entry: Entry) -> bool:
        """Make its CheckpointRun; False: its namespace is going, and the run with it."""
        try:
            document, new = await status.create(self._books.call, run_record.document(entry.run))
        except StatusRefused:
            if not entry.run.finished:
                raise
            self._books.drop(entry.run.key)
            return False
        self._go_on_from(entry, document)
        entry.born = document["metadata"].get("creationTimestamp", "")
        if new:
            entry.notices.extend(filter(None, (self._replaced(entry), _unknown_kind(entry.run))))
        return True

    def _go_on_from(self, entry: Entry, document: Document) -> None:
        """Go on from a CheckpointRun that somebody else made or wrote."""
        before, found = entry.written, run_record.run_of(document)
        self.adopt(entry, document)  # not before it could be read: what cannot is not written over
        if document.get("status") and entry.written != before:
            entry.durable = found.ledger
            run = watched_run.with_counts_of(entry.run, found, self._books.nodes, self._books.wall())
            self._books.set(entry, run)
        self._books.mark(entry.run.key)

    async def _remove(self, entry: Entry) -> None:
        self._tell(entry)
        if entry.served is not None:
            await status.remove(self._books.call, _path(entry.run), entry.served["uid"])
        self._books.drop(entry.run.key)

    def _tell(self, entry: Entry) -> None:
        """Offer what happened to a run, once it has its CheckpointRun."""
        while entry.served is not None and entry.notices:
            notice, uid = entry.notices.popleft(), entry.served["uid"]
            key = notice.key or f"{uid}/{notice.reason}/{notice.message}/{self._books.wall() // SAME_S:.0f}"
            if key in self._waiting or key in self.recorded:
                continue
            if len(self._waiting) >= MAX_WAITING:
                self._books.metrics.events.labels("dropped").inc()
                continue
            now_s = self._books.wall()
            spent_s = min(max(entry.whole_s - now_s, 0.0), BURST * REFILL_S)
            if round(spent_s) > (BURST - 1) * REFILL_S:  # the difference of two times is not exact
                self._books.metrics.events.labels("limited").inc()
                self._record(key)
                continue
            entry.whole_s = now_s + spent_s + REFILL_S
            self._waiting.add(key)
            self._books.queue.offer(
                ("event", key), Rank.EVENT, partial(self._write_events, entry.run, uid, notice, key)
            )

    async def _write_events(self, run: Run, run_uid: str, notice: Notice, key: str) -> None:
        mine, counted = run.workload, self._books.metrics.events
        for kind, version, name, uid in (
            (run_record.KIND, run_record.API_VERSION, run.name, run_uid),
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
            document = event(about, notice, digest, self._books.wall())
            path = f"/api/v1/namespaces/{mine.namespace}/events"
            answer = await self._books.call("POST", path, document, tries=2)
            counted.labels("told" if answer.ok else "repeated" if answer.status == 409 else "refused").inc()
            if not answer.ok and answer.status != 409:
                _log.warning("events.refused", reason=notice.reason, error=answer.sentence)
        self._waiting.discard(key)
        self._books.queue.forget(("event", key))
        self._record(key)

    def _record(self, key: str) -> None:
        self.recorded[key] = None
        if len(self.recorded) > MAX_RECORDED:
            del self.recorded[next(iter(self.recorded))]

    def _replaced(self, entry: Entry) -> Notice | None:
        """A new UID under an old name: how the older run is continued."""
        mine = entry.run.workload
        older = [
            each
            for each in self._books
            if each.run.run_id != entry.run.run_id
            and (each.run.workload.namespace, each.run.workload.called) == (mine.namespace, mine.called)
        ]
        if not older:
            return None
        last = max(older, key=lambda each: each.born).run
        how = RUN_ID if len(last.run_id) <= 63 and "." not in last.run_id else RESTORE_FROM
        text = (
            f"{mine.called} is a new run, {entry.run.run_id}. An earlier one of this name was run {last.run_id} (last "
            f"committed step: {last.progress.last_step}). To go on from there, create it with the annotation "
            f"{how}: {last.run_id}"
        )
        return Notice(reason="RunReplaced", message=text, warning=False)


def _compact(document: Document) -> bytes:
    """The status of a CheckpointRun, as it is kept."""
    return json.dumps(document.get("status") or {}, separators=(",", ":"), sort_keys=True).encode()


def _path(run: Run) -> str:
    return status.path_of(run.workload.namespace, run_record.PLURAL, run.name)


def rank_of(before: Document, changed: Document) -> Rank:
    """How soon a change of a status is to be written."""
    if "losses" in changed or _troubles(changed) - _troubles(before):
        return Rank.TROUBLE
    fields = changed.keys() - run_record.QUIET
    if fields - run_record.COMMIT:
        return Rank.CONDITION
    return Rank.COMMIT if fields else Rank.QUIET


def _troubles(document: Document) -> set[str]:
    found = document.get("conditions") or ()
    return {each["type"] for each in found if each["status"] == "True" and each["type"] != condition.READY}


def _unknown_kind(run: Run) -> Notice | None:
    """A warning at admission reaches only who made the pod, and that was a controller."""
    mine = run.workload
    if mine.native or mine.group_kind in owner_reference.KNOWN:
        return None
    text = (
        f"{mine.called}: this kind is not supported. If it makes its pods anew they may not go on with their run, and "
        f"several of its pods would fence one another; use {RUN_ID}, and one pod"
    )
    return Notice(reason="UnsupportedKind", message=text)


def event(about: Mapping[str, str], notice: Notice, digest: str, now_s: float) -> Document:
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
