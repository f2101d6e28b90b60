"""Writes of runs: creation, update and deletion of CheckpointRuns, and Kubernetes events.

After each reconciliation of a run a write is queued, which writes the state at the time of its execution. On a
conflict, e.g. with another active controller, the status is read, and the run continues from its counters: sidecars
repeat the incidents that are missing in it.

The name of an event is a hash of its content, so that a repeated event, also of another controller, already exists
(409). Incidents have a natural key (`RunEvent.key`); other events are equal if their text is and they occur within the
same ten minutes. The number of pending events is bounded: an incident that does not fit is repeated by its sidecar. The
rate per run is limited (`RUN_EVENT_BURST` at once, then one per `EVENT_REFILL_S`): an incident over the limit counts as
recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog

from deltashard_operator.controller import status
from deltashard_operator.controller.run_store import RunEntry, RunStore
from deltashard_operator.controller.status import StatusRefused, object_version
from deltashard_operator.controller.write_queue import Priority
from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.cluster_name import RESTORE_FROM, RUN_ID
from deltashard_operator.run import condition, run_record, watched_run
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import RunEvent, WatchedRun

EVENT_DEDUP_S = 600.0
RUN_EVENT_BURST = 25
EVENT_REFILL_S = 60.0
MAX_PENDING_EVENTS = 1000
MAX_RECORDED = 16384
MAX_MESSAGE = 1024
Document = Mapping[str, Any]
_log = structlog.get_logger("deltashard.events")


class RunWriter:
    """Writer for all runs."""

    def __init__(self, run_store: RunStore) -> None:
        self._run_store = run_store
        self._waiting: set[str] = set()
        self.recorded: dict[str, None] = {}
        """Keys of the newest recorded incidents."""

    def adopt(self, entry: RunEntry, document: Document) -> None:
        entry.object_version, entry.written = object_version(document), _compact(document)

    def reconcile(self, entry: RunEntry, now_s: float) -> None:
        """Queue changed state and new events of a run."""
        key, write = entry.run.key, partial(self._write, entry)
        if entry.object_version is None:
            self._run_store.queue.offer(key, Priority.NEW, write)
            return
        self._record_events(entry)
        before = json.loads(entry.written)
        changed = run_record.patch(before, run_record.status(entry.run, now_s))
        if changed:
            self._run_store.queue.offer(key, priority_of(before, changed), write)
        else:
            self._run_store.queue.withdraw(key)

    def remove(self, entry: RunEntry) -> None:
        """Delete the CheckpointRun and drop the run."""
        self._run_store.queue.offer(entry.run.key, Priority.CONDITION, partial(self._remove, entry))

    async def _write(self, entry: RunEntry) -> None:
        if entry.object_version is None and not await self._make(entry):
            return
        run = entry.run
        assert entry.object_version is not None
        change = run_record.patch(json.loads(entry.written), run_record.status(run, self._run_store.wall()))
        if not change:
            return
        after, done = await status.write(self._run_store.call, _path(run), entry.object_version, change)
        if after is None:
            self._run_store.record_deleted(entry)
        elif done:
            self.adopt(entry, after)
            entry.durable = run.ledger
            self._record_events(entry)
        else:
            self._resume_from(entry, after)

    async def _make(self, entry: RunEntry) -> bool:
        """Create the CheckpointRun. Returns False if the namespace is being deleted, and drops the run."""
        try:
            document, new = await status.create(self._run_store.call, run_record.document(entry.run))
        except StatusRefused:
            if not entry.run.finished:
                raise
            self._run_store.drop(entry.run.key)
            return False
        self._resume_from(entry, document)
        entry.created_at = document["metadata"].get("creationTimestamp", "")
        if new:
            entry.events.extend(
                filter(None, (self._replaced_event(entry), _unsupported_kind_event(entry.run)))
            )
        return True

    def _resume_from(self, entry: RunEntry, document: Document) -> None:
        """Continue from a CheckpointRun that another process created or wrote."""
        before, found = entry.written, run_record.run_of(document)
        self.adopt(entry, document)  # only after it was parsed: an unreadable status is not overwritten
        if document.get("status") and entry.written != before:
            entry.durable = found.ledger
            run = watched_run.with_persisted_counts(
                entry.run, found, self._run_store.nodes, self._run_store.wall()
            )
            self._run_store.set(entry, run)
        self._run_store.mark(entry.run.key)

    async def _remove(self, entry: RunEntry) -> None:
        self._record_events(entry)
        if entry.object_version is not None:
            await status.remove(self._run_store.call, _path(entry.run), entry.object_version["uid"])
        self._run_store.drop(entry.run.key)

    def _record_events(self, entry: RunEntry) -> None:
        """Queue the events of a run once its CheckpointRun exists."""
        while entry.object_version is not None and entry.events:
            run_event, uid = entry.events.popleft(), entry.object_version["uid"]
            key = (
                run_event.key
                or f"{uid}/{run_event.reason}/{run_event.message}/{self._run_store.wall() // EVENT_DEDUP_S:.0f}"
            )
            if key in self._waiting or key in self.recorded:
                continue
            if len(self._waiting) >= MAX_PENDING_EVENTS:
                self._run_store.metrics.events.labels("dropped").inc()
                continue
            now_s = self._run_store.wall()
            spent_s = min(max(entry.full_burst_at_s - now_s, 0.0), RUN_EVENT_BURST * EVENT_REFILL_S)
            if (
                round(spent_s) > (RUN_EVENT_BURST - 1) * EVENT_REFILL_S
            ):  # rounded, because a time difference is inexact
                self._run_store.metrics.events.labels("rate_limited").inc()
                self._mark_recorded(key)
                continue
            entry.full_burst_at_s = now_s + spent_s + EVENT_REFILL_S
            self._waiting.add(key)
            self._run_store.queue.offer(
                ("event", key), Priority.EVENT, partial(self._write_events, entry.run, uid, run_event, key)
            )

    async def _write_events(self, run: WatchedRun, run_uid: str, run_event: RunEvent, key: str) -> None:
        mine, counted = run.workload, self._run_store.metrics.events
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
            document = event(about, run_event, digest, self._run_store.wall())
            path = f"/api/v1/namespaces/{mine.namespace}/events"
            answer = await self._run_store.call("POST", path, document, tries=2)
            counted.labels(
                "recorded" if answer.ok else "duplicate" if answer.status == 409 else "refused"
            ).inc()
            if not answer.ok and answer.status != 409:
                _log.warning("events.refused", reason=run_event.reason, error=answer.sentence)
        self._waiting.discard(key)
        self._run_store.queue.forget(("event", key))
        self._mark_recorded(key)

    def _mark_recorded(self, key: str) -> None:
        self.recorded[key] = None
        if len(self.recorded) > MAX_RECORDED:
            del self.recorded[next(iter(self.recorded))]

    def _replaced_event(self, entry: RunEntry) -> RunEvent | None:
        """Return an event for a new UID under a known name, with the way to continue the older run."""
        mine = entry.run.workload
        older = [
            each
            for each in self._run_store
            if each.run.run_id != entry.run.run_id
            and (each.run.workload.namespace, each.run.workload.display_name)
            == (mine.namespace, mine.display_name)
        ]
        if not older:
            return None
        last = max(older, key=lambda each: each.created_at).run
        how = RUN_ID if len(last.run_id) <= 63 and "." not in last.run_id else RESTORE_FROM
        text = (
            f"{mine.display_name} is a new run, {entry.run.run_id}. An earlier one of this name was run {last.run_id} "
            f"(last committed step: {last.progress.last_step}). To continue it, create the workload with annotation "
            f"{how}: {last.run_id}"
        )
        return RunEvent(reason="RunReplaced", message=text, warning=False)


def _compact(document: Document) -> bytes:
    return json.dumps(document.get("status") or {}, separators=(",", ":"), sort_keys=True).encode()


def _path(run: WatchedRun) -> str:
    return status.path_of(run.workload.namespace, run_record.PLURAL, run.name)


def priority_of(before: Document, changed: Document) -> Priority:
    if "losses" in changed or _problems(changed) - _problems(before):
        return Priority.PROBLEM
    fields = changed.keys() - run_record.LOW_PRIORITY_FIELDS
    if fields - run_record.COMMIT_FIELDS:
        return Priority.CONDITION
    return Priority.COMMIT if fields else Priority.LOW


def _problems(document: Document) -> set[str]:
    found = document.get("conditions") or ()
    return {each["type"] for each in found if each["status"] == "True" and each["type"] != condition.READY}


def _unsupported_kind_event(run: WatchedRun) -> RunEvent | None:
    """Return a warning event, because an admission warning reaches only the pod's creator, which is a controller."""
    mine = run.workload
    if mine.native or mine.group_kind in owner_reference.KNOWN:
        return None
    text = (
        f"{mine.display_name}: this kind is not supported. Recreated pods may not continue their run, and several of "
        f"its pods would fence one another; use {RUN_ID}, and one pod"
    )
    return RunEvent(reason="UnsupportedKind", message=text)


def event(about: Mapping[str, str], run_event: RunEvent, digest: str, now_s: float) -> Document:
    """Return the Kubernetes event for an object. Its name is the object's name and a hash of the content."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about['name'][:200]}.{digest}", "namespace": about["namespace"]},
        "involvedObject": about,
        "reason": run_event.reason,
        "message": run_event.message[:MAX_MESSAGE],
        "type": "Warning" if run_event.warning else "Normal",
        "source": {"component": "deltashard-controller"},
        "count": 1,
        "firstTimestamp": timestamp(now_s),
        "lastTimestamp": timestamp(now_s),
    }
