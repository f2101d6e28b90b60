"""All runs and their state, shared by watches, reports, reconciliation and writes.

Runs are changed with `set`, which marks them for reconciliation. Everything runs on one asyncio loop without blocking.
A run id is held by the unfinished workload whose CheckpointRun was created first.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from deltashard_operator.api import annotation, workload_policy
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.status import ObjectVersion
from deltashard_operator.controller.write_queue import WriteQueue
from deltashard_operator.fleet.report import RunKey
from deltashard_operator.kube.call import Caller
from deltashard_operator.kube.cluster_name import POLICY
from deltashard_operator.run import schedule
from deltashard_operator.run.ledger import Ledger
from deltashard_operator.run.observed_object import NodeView, timestamp
from deltashard_operator.run.order import OpenOrders
from deltashard_operator.run.watched_run import RunEvent, WatchedRun

PolicyKey = tuple[str, str]
"""(namespace, name); see `workload_policy.key_of`. The namespace of cluster policies is empty."""
MAX_RUN_EVENTS = 64
"""Maximum number of events that wait for the creation of a run's CheckpointRun."""
MAX_CACHED_POLICIES = 10_000
_POD_NUMBER = re.compile(r"-(?:(?:master|worker|[0-9]+)-)?[0-9]+", re.ASCII)
_log = structlog.get_logger("deltashard.controller")


@dataclass(slots=True)
class RunEntry:
    """Run and the state of its CheckpointRun."""

    run: WatchedRun
    created_at: str
    """Creation time of the CheckpointRun, or time when the run was first seen. The oldest run holds a run id."""
    object_version: ObjectVersion | None = None
    written: bytes = b"{}"
    """Status in the API as JSON; a dict takes five times the memory."""
    durable: Ledger = field(default_factory=Ledger)
    events: deque[RunEvent] = field(default_factory=lambda: deque(maxlen=MAX_RUN_EVENTS))
    nudged: int = 0
    """Id of the directive for which the sidecars were nudged."""
    full_burst_at_s: float = 0.0
    """Time from which a full burst of events is allowed again."""

    @property
    def end_s(self) -> float:
        return self.run.finished_at_s if self.run.finished else math.inf


@dataclass(kw_only=True)
class RunStore:
    """State shared by all parts of the controller."""

    call: Caller
    defaults: Defaults
    metrics: ControllerMetrics
    queue: WriteQueue
    """Queue of all writes, keyed by run or by a key of the writer."""
    wall: Callable[[], float]
    nudger: Callable[[str], None] = lambda _address: None
    """Asks the sidecar at "ip:port" to report now. Best effort; never blocks."""
    orders: OpenOrders = field(default_factory=OpenOrders)
    by_key: dict[RunKey, RunEntry] = field(default_factory=dict)
    pods: dict[str, RunKey] = field(default_factory=dict)
    jobs: dict[str, RunKey] = field(default_factory=dict)
    nodes: dict[str, NodeView] = field(default_factory=dict)
    policies: dict[PolicyKey, Mapping[str, Any]] = field(default_factory=dict)
    """Policies as last seen by the watch."""
    marked: dict[RunKey, None] = field(default_factory=dict)
    """Marked runs in the order of marking, so that none is starved."""
    _by_id: dict[tuple[str, str], dict[RunKey, RunEntry]] = field(default_factory=dict)
    """Runs by namespace and run id, in the order in which they were seen."""
    _policy_cache: dict[Any, Policy | Refusal | None] = field(default_factory=dict)
    """Policies resolved with annotations. Cleared when a policy changes."""

    def __iter__(self) -> Iterator[RunEntry]:
        return iter(self.by_key.values())

    def mark(self, key: RunKey) -> None:
        self.marked[key] = None

    def mark_all(self) -> None:
        self.marked.update(dict.fromkeys(self.by_key))

    def add(self, run: WatchedRun) -> RunEntry:
        entry = self.by_key[run.key] = RunEntry(run, timestamp(self.wall()))
        self._by_id.setdefault((run.workload.namespace, run.run_id), {})[run.key] = entry
        return entry

    def _without_id(self, run: WatchedRun) -> None:
        entries = self._by_id[run.workload.namespace, run.run_id]
        del entries[run.key]
        if not entries:
            del self._by_id[run.workload.namespace, run.run_id]

    def drop(self, key: RunKey) -> None:
        entry = self.by_key.pop(key, None)
        if entry is None:
            return
        self.marked.pop(key, None)
        self._without_id(entry.run)
        for uid in entry.run.pods:
            self.pods.pop(uid, None)
            self.queue.forget(("pod", uid))
        for uid in entry.run.jobs:
            self.jobs.pop(uid, None)
        self.orders.forget(key)
        for queue_key in (key, ("reclaim", *key)):
            self.queue.forget(queue_key)

    def set(self, entry: RunEntry, run: WatchedRun) -> None:
        """Replace the run's state, and mark the run if it changed."""
        if run is entry.run or self.by_key.get(run.key) is not entry:  # unchanged, or dropped in the meantime
            return
        if run.run_id != entry.run.run_id:  # pods were seen before their Job
            self._without_id(entry.run)
            self._by_id.setdefault((run.workload.namespace, run.run_id), {})[run.key] = entry
        entry.run = run
        self.mark(run.key)

    def record_deleted(self, entry: RunEntry) -> None:
        """Handle a deleted CheckpointRun: it will be created again."""
        entry.object_version, entry.written, entry.durable = None, b"{}", Ledger()
        if self.by_key.get(entry.run.key) is entry:  # not dropped during the write that detected the deletion
            self.mark(entry.run.key)

    def reporters(self, entry: RunEntry) -> list[str]:
        """Return the UIDs of the pods whose live sidecars are reporters of the run."""
        now_s = self.wall()
        return [uid for uid in entry.run.last_reports if schedule.is_reporter(entry.run, uid, now_s)]

    def nudge(self, entry: RunEntry, *, every: bool = False, first: bool = False) -> None:
        """Ask the run's reporters to report now, or all sidecars if `every` or if no reporter is live.

        `first`: without a live reporter, ask only the pods with index 0, most of which have rank 0.
        """
        reporters = self.reporters(entry)
        for uid, pod in entry.run.pods.items():
            wanted = every or (uid in reporters if reporters else not first or pod.index in {"", "0"})
            if wanted and pod.alive and pod.report_address and not entry.run.finished:
                self.nudger(pod.report_address)

    def holder(self, entry: RunEntry) -> RunEntry:
        """Return the holder of the run id: the oldest unfinished run."""
        entries = self._by_id.get((entry.run.workload.namespace, entry.run.run_id), {})
        live = [each for each in entries.values() if not each.run.finished]
        return min(live, key=lambda each: each.created_at, default=entry)

    def newest_by_id(self) -> dict[tuple[str, str], RunEntry]:
        """Return one run per (namespace, run id): an unfinished one, or the one that finished last."""
        return {
            key: max(entries.values(), key=lambda each: each.end_s) for key, entries in self._by_id.items()
        }

    def is_continued(self, entry: RunEntry) -> bool:
        """Return whether another workload may continue this run or a per-pod run of it (suffix: the pod's index)."""
        namespace, run_id = entry.run.workload.namespace, entry.run.run_id
        return any(
            (each.run.run_id == run_id and each.end_s >= entry.end_s)
            or (
                not each.run.finished
                and each.run.run_id.startswith(run_id)
                and _POD_NUMBER.fullmatch(each.run.run_id, len(run_id))
            )
            for each in self
            if each is not entry and each.run.workload.namespace == namespace
        )

    def policy_key(self, run: WatchedRun) -> PolicyKey:
        return workload_policy.key_of(run.workload.namespace, run.requested.policy)

    def set_policy(self, key: PolicyKey, document: Mapping[str, Any] | None) -> None:
        """Set or remove a policy. Marks its runs if the spec changed."""
        before = self.spec_of(key)
        self.policies.pop(key, None)
        if document is None:
            self.queue.forget(("policy", *key))
        else:
            self.policies[key] = document
        if self.spec_of(key) != before:
            self._policy_cache.clear()
            for each in self:
                if self.policy_key(each.run) == key:
                    self.mark(each.run.key)

    def spec_of(self, key: PolicyKey) -> Mapping[str, Any] | None:
        """Return the current spec of a policy, to be merged with the chart's default, or None if it does not exist."""
        if key in self.policies:
            spec: Mapping[str, Any] = self.policies[key].get("spec") or {}
            return spec
        return {} if key[0] and key[1] == workload_policy.DEFAULT and self.defaults.has_store() else None

    def policy_of(self, run: WatchedRun) -> Policy | Refusal | None:
        """Return the run's current policy with its annotations, why it is unusable, or None if it does not exist."""
        name, key = run.requested.policy, (self.policy_key(run), run.requested.overrides)
        if key not in self._policy_cache:
            spec = self.spec_of(key[0])
            found: Policy | Refusal | None = None
            try:
                if spec is not None:
                    annotations = annotation.read({POLICY: name, **dict(run.requested.overrides)})
                    found = workload_policy.read(
                        name, workload_policy.merged(spec, self.defaults.spec()), annotations
                    )
            except Refusal as refusal:
                _log.warning(
                    "policy.unusable", namespace=run.workload.namespace, run=run.name, error=str(refusal)
                )
                found = refusal
            if len(self._policy_cache) >= MAX_CACHED_POLICIES:
                self._policy_cache.clear()
            self._policy_cache[key] = found
        return self._policy_cache[key]
