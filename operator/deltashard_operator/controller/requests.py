"""CheckpointRequests: orders their saves, writes their results and removes old ones.

`run.request` has the lifecycle. An order stays open in `run.order` until the status with its result is written, so that
a sidecar repeats the result to a new controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator.controller import status
from deltashard_operator.controller.run_store import RunEntry, RunStore
from deltashard_operator.controller.status import ROOT, ObjectVersion
from deltashard_operator.controller.write_queue import Priority
from deltashard_operator.fleet.report import RunKey, SaveResult
from deltashard_operator.kube.object_watch import ObjectKey, WatchedKind
from deltashard_operator.run import request as requests
from deltashard_operator.run import run_record
from deltashard_operator.run.request import CheckpointRequest, RequestFacts, RequestPhase

PLURAL = "checkpointrequests"
Document = Mapping[str, Any]


@dataclass(slots=True)
class _TrackedRequest:
    """Request and its state in the API."""

    request: CheckpointRequest
    object_version: ObjectVersion
    written: Document
    ordered: RunKey | None = None
    """Run whose sidecars have the order."""
    save_results: dict[RunKey, SaveResult] = field(default_factory=dict)
    """Reported results of the save by run."""


class CheckpointRequests:
    """All requests of a controller. Used on its loop."""

    def __init__(self, run_store: RunStore, *, keep_finished_s: float) -> None:
        """`keep_finished_s`: time after its end at which a request is deleted."""
        self._run_store = run_store
        self._keep_finished_s = keep_finished_s
        self._known: dict[str, _TrackedRequest] = {}
        self.kind = WatchedKind("requests", f"{ROOT}/{PLURAL}", self.on_request, self.on_request_deleted)

    def on_request(self, document: Document) -> None:
        """Handle a new request. The spec is immutable, and the status is written only here."""
        uid = document["metadata"]["uid"]
        if uid not in self._known:
            self._known[uid] = _TrackedRequest(*_read(document))

    def on_request_deleted(self, key: ObjectKey, _last: Document | None) -> None:
        self._known.pop(key.uid, None)
        self._run_store.orders.close(key.uid)
        self._run_store.queue.forget((PLURAL, key.uid))

    def on_save_result(self, run_key: RunKey, outcome: SaveResult) -> None:
        """Handle the reported result of an order, of a request or a drain."""
        known = self._known.get(outcome.id)
        if known is None:
            self._run_store.orders.close(outcome.id, run_key)
        elif known.request.open and known.request.namespace == run_key[0]:
            known.save_results[run_key] = outcome

    def reconcile(self, now_s: float) -> None:
        """Reconcile all requests. Call it only after the initial lists are complete."""
        if not self._known:
            return
        named = self._run_store.newest_by_id()
        named |= {(each.run.workload.namespace, each.run.name): each for each in self._run_store}
        for known in self._known.values():
            if known.request.open:
                entry = named.get((known.request.namespace, known.request.run))
                self._reconcile(known, self._run_store.holder(entry) if entry is not None else None, now_s)
            self._offer(known, now_s)

    def _reconcile(self, known: _TrackedRequest, entry: RunEntry | None, now_s: float) -> None:
        request, orders, facts = known.request, self._run_store.orders, RequestFacts(now_s=now_s)
        if entry is not None:
            facts = RequestFacts(
                now_s=now_s,
                run=entry.run.name,
                finished=entry.run.finished,
                per_pod=entry.run.requested.runs == RUN_PER_POD,
                room=orders.has_room(entry.run.key, request.uid),
                save_result=known.save_results.get(entry.run.key),
            )
        known.request = found = requests.reconcile(request, facts)
        if entry is not None and found.phase is RequestPhase.ORDERED and known.ordered != entry.run.key:
            orders.close(found.uid)
            known.ordered = entry.run.key
            orders.open(entry.run.key, found.order, found.until_s)
            self._run_store.nudge(entry)

    def _offer(self, known: _TrackedRequest, now_s: float) -> None:
        key, request = (PLURAL, known.request.uid), known.request
        if requests.status(request) != known.written:
            self._run_store.queue.offer(key, Priority.ORDER, partial(self._write, known))
        elif not request.open:
            if known.ordered is not None:
                self._run_store.orders.close(request.uid)
                known.ordered = None
            if now_s - request.finished_s > self._keep_finished_s:
                remove = partial(status.remove, self._run_store.call, _path(request), request.uid)
                self._run_store.queue.offer(key, Priority.COMMIT, remove)

    async def _write(self, known: _TrackedRequest) -> None:
        wanted = requests.status(known.request)
        change = run_record.patch(known.written, wanted)
        after, done = await status.write(
            self._run_store.call, _path(known.request), known.object_version, change
        )
        if after is not None and done:
            known.written, known.object_version = wanted, status.object_version(after)
        elif after is not None:  # conflict: reconcile the request from its current state
            known.request, known.object_version, known.written = _read(after)


def _read(document: Document) -> tuple[CheckpointRequest, ObjectVersion, Document]:
    return requests.request_of(document), status.object_version(document), document.get("status") or {}


def _path(request: CheckpointRequest) -> str:
    return status.path_of(request.namespace, PLURAL, request.name)
