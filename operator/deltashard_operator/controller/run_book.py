"""All runs and what is known of them: the books that watches, sidecars, judgements and writes keep together.

An `Entry` is a run with what is known of its CheckpointRun. Whoever changes a run does it by `set`, which marks it, so
that conclusions are drawn again. Everything is on one asyncio loop and nothing waits.

A run id is held by the workload whose CheckpointRun was made first, as long as it is not Finished.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api import workload_policy
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.status import Served
from deltashard_operator.controller.write_queue import WriteQueue
from deltashard_operator.fleet.report import RunKey
from deltashard_operator.kube.call import Caller
from deltashard_operator.run import observed_object, schedule
from deltashard_operator.run.ledger import Ledger
from deltashard_operator.run.observed_object import NodeView, Wish
from deltashard_operator.run.order import OpenOrders
from deltashard_operator.run.watched_run import Notice, Run

MAX_NOTICES = 64
"""Waiting for a run's CheckpointRun to be made."""


@dataclass(slots=True)
class Entry:
    """A run and what is known of its CheckpointRun."""

    run: Run
    served: Served | None = None
    written: bytes = b"{}"
    """Status as the API has it, as JSON: a dict of one is five times as large."""
    durable: Ledger = field(default_factory=Ledger)
    """What the written status counts."""
    born: str = ""
    """Creation time of the CheckpointRun, or of the first sight: older ones hold a run id."""
    number: int = 0
    """Of the order of first sight, for those born in the same second."""
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=MAX_NOTICES))
    decided: tuple[int, Wish, pb.Policy | None] | None = None
    """What it shall do, by which policies and wishes."""
    nudged: int = 0
    """Id of the directive for which its sidecars were nudged."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Failures by node that are in the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPolicy:
    """A CheckpointPolicy as the watch brought it last."""

    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]


class Entries:
    """The books."""

    def __init__(
        self,
        *,
        call: Caller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        queue: WriteQueue,
        wall: Callable[[], float],
    ) -> None:
        """What is given is what all parts of the controller work with."""
        self.call, self.defaults, self.metrics, self.wall = call, defaults, metrics, wall
        self.queue = queue
        """Where all that is to be written is offered: by the run's key, or by another one of the writer's own."""
        self.nudger: Callable[[str], None] | None = None
        """Asks the sidecar at an "ip:port" to report now; it is best effort, and never waits."""
        self.orders = OpenOrders()
        self.by_key: dict[RunKey, Entry] = {}
        self._by_id: dict[tuple[str, str], set[RunKey]] = {}
        self.pods: dict[str, RunKey] = {}
        """Pod UID -> its run."""
        self.jobs: dict[str, RunKey] = {}
        self.nodes: dict[str, NodeView] = {}
        self.policies: dict[tuple[str, str], SeenPolicy] = {}
        """By namespace and name; the cluster's have no namespace."""
        self.serial = 0
        """Counts changes of policies' specs."""
        self.marked: dict[RunKey, None] = {}
        """In the order they were marked, so that none waits for ever."""
        self._entered = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.by_key.values())

    def mark(self, key: RunKey) -> None:
        self.marked[key] = None

    def enter(self, run: Run) -> Entry:
        entry = Entry(
            run=run,
            born=observed_object.timestamp(self.wall()),
            number=self._entered,
        )
        self._entered += 1
        self.by_key[run.key] = entry
        self._by_id.setdefault((run.workload.namespace, run.run_id), set()).add(run.key)
        return entry

    def drop(self, key: RunKey) -> None:
        entry = self.by_key.pop(key, None)
        if entry is None:
            return
        self.marked.pop(key, None)
        run_id = (key[0], entry.run.run_id)
        self._by_id[run_id].discard(key)
        if not self._by_id[run_id]:
            del self._by_id[run_id]
        for uid in entry.run.pods:
            self.pods.pop(uid, None)
        for uid in entry.run.jobs:
            self.jobs.pop(uid, None)
        self.orders.forget(key)
        self.queue.forget(key)

    def set(self, entry: Entry, run: Run) -> None:
        """The run is this now; marked when that is a change."""
        if run is entry.run or self.by_key.get(run.key) is not entry:  # it was let go of meanwhile
            return
        if run.run_id != entry.run.run_id:  # pods were seen before their Job
            before = self._by_id.get((run.workload.namespace, entry.run.run_id), set())
            before.discard(run.key)
            self._by_id.setdefault((run.workload.namespace, run.run_id), set()).add(run.key)
        entry.run = run
        self.mark(run.key)

    def lost(self, entry: Entry) -> None:
        """Its CheckpointRun is gone: make it anew."""
        entry.served, entry.written, entry.durable = None, b"{}", Ledger()
        if self.by_key.get(entry.run.key) is entry:  # not let go while the write that found out was under way
            self.mark(entry.run.key)

    def speakers(self, entry: Entry) -> list[str]:
        """UIDs of the pods whose sidecars are heard and speak for the run."""
        now_s = self.wall()
        return [uid for uid in entry.run.heard if schedule.speaks(entry.run, uid, now_s)]

    def nudge(self, entry: Entry, *, every: bool = False) -> None:
        """Have those who speak for the run report now; all of its sidecars if asked, or if no speaker is heard."""
        if self.nudger is None or entry.run.finished:
            return
        run = entry.run
        speakers = self.speakers(entry)
        for uid, pod in run.pods.items():
            if pod.alive and pod.report_address and (every or uid in speakers or not speakers):
                self.nudger(pod.report_address)

    def holder(self, entry: Entry) -> Entry:
        """Who holds the run id: the oldest that is not finished."""
        keys = self._by_id.get((entry.run.workload.namespace, entry.run.run_id), ())
        live = [self.by_key[key] for key in keys if not self.by_key[key].run.finished]
        return min(live, key=lambda each: (each.born, each.number), default=entry)

    def newest_by_id(self) -> dict[tuple[str, str], Entry]:
        """Of all runs of an id, by (namespace, id): one that is not finished, or the one that finished last."""
        found: dict[tuple[str, str], Entry] = {}
        for entry in self.by_key.values():
            key = entry.run.workload.namespace, entry.run.run_id
            if key not in found or _end_of(found[key]) < _end_of(entry):
                found[key] = entry
        return found

    def is_continued(self, entry: Entry) -> bool:
        """Whether another workload has the run, or that of one of its pods: it is not finished, or finished later.

        Where each pod trains a run of its own its number stands at the end of the id. Looks at all ids.
        """
        namespace, run_id = entry.run.workload.namespace, entry.run.run_id
        for (place, other), keys in self._by_id.items():
            if place != namespace or not other.startswith(run_id):
                continue
            if other != run_id and _POD_NUMBER.fullmatch(other[len(run_id) :]) is None:
                continue
            for each in (self.by_key[key] for key in keys if key != entry.run.key):
                if not each.run.finished or (other == run_id and _end_of(each) > _end_of(entry)):
                    return True
        return False

    def spec_of(self, run: Run) -> Mapping[str, Any] | None:
        """Spec of the run's policy as it is now, to be laid over the chart's; None: there is no such policy."""
        seen = self.policies.get(workload_policy.key_of(run.workload.namespace, run.wish.policy))
        if seen is not None:
            return seen.spec
        return {} if run.wish.policy == workload_policy.DEFAULT and self.defaults.has_store() else None


_POD_NUMBER = re.compile(r"-(?:(?:master|worker|[0-9]+)-)?[0-9]+", re.ASCII)


def _end_of(entry: Entry) -> tuple[float, int]:
    """For the order of ends; what is not finished comes last."""
    return (entry.run.finished_at_s if entry.run.finished else math.inf), entry.number
