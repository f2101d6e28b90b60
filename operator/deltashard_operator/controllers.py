"""The controller: what the watches and the sidecars say goes in, CheckpointRuns, Events and directives come out.

Everything here runs on one asyncio loop and nothing waits: handlers and the ledger put facts into the run they are of
and mark it; `pump` draws conclusions from marked runs a few times a second, writes what is due (see `statuses.Pace`)
in tasks of its own, and has Events told. So a burst of a thousand heartbeats costs a thousand small updates and as many
judgements as there are runs.

What was counted survives in the CheckpointRuns, which are read before anything else. An incident of a sidecar is
acknowledged when the status that counts it is written, so that a controller that dies in between hears it again.

A watch that begins anew shows what is there and not what went; so after every list, and every ten minutes, a `sweep`
asks for the names of all Jobs and pods and drops what is not among them. A new controller's first sweeps tell it, too,
when it has seen all that there is, policies included. Before, it judges no run of an earlier one's and directs none: a
policy that was not seen yet is not one that is not there.

The ledger refuses a sidecar whose pod is of another workload than it says, and one that asks for a run id that an
older workload holds: which is the one whose CheckpointRun was made first, as long as it is not Finished.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator import directives, judgements, policies, records, reports, runs, views
from deltashard_operator.calls import METADATA, ApiUnavailable, Caller
from deltashard_operator.controller_metrics import ControllerMetrics
from deltashard_operator.defaults import Defaults
from deltashard_operator.events import Teller, regarding
from deltashard_operator.names import MANAGED_BY, MANAGED_BY_VALUE, RUN_ID
from deltashard_operator.refusals import Refusal
from deltashard_operator.reports import Directive, Heartbeat, Hello, RunKey
from deltashard_operator.runs import Notice, Run, Taken
from deltashard_operator.statuses import Pace, Served, Statuses, StatusRefused, served
from deltashard_operator.views import NodeView, PodView, Wish

SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"
JOBS = "/apis/batch/v1/jobs"
PODS = "/api/v1/pods"
POLICIES = "/apis/deltashard.io/v1alpha1/checkpointpolicies"
TICK_S = 0.25
JUDGE_S = 5.0
"""Time alone changes a run (stale, stuck, settled): every run is judged so often."""
SLICE_S = 0.05
"""Judging keeps the loop from others no longer than this at once."""
SWEEP_S = 600.0
SWEEP_SOON_S = 1.5
SYNC_TRIES = 15
"""Sweeps after which a new controller judges although something listed was not seen."""
MAX_NOTICES = 64
"""Waiting for a run's CheckpointRun to be made."""
Document = Mapping[str, Any]
_log = structlog.get_logger("deltashard.controller")


class Director(Protocol):
    """Who carries directives to sidecars: the fleet service."""

    def direct(self, run_key: RunKey, directive: Directive) -> None:
        """From now on this is the run's directive."""

    def forget(self, run_key: RunKey) -> None:
        """The run is over."""

    def save_now(self, run_key: RunKey, reason: str, urgent: bool, deadline_s: float) -> int:
        """Ask for a save; returns how many are told."""


@dataclass(slots=True)
class Entry:
    """A run and what is known of its CheckpointRun."""

    run: Run
    pace: Pace
    served: Served | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    durable: Mapping[str, Taken] = field(default_factory=dict)
    """Incidents that are in the written status, by pod UID."""
    reloaded_s: float = 0.0
    """When the status it came from was written; 0: it came from none."""
    born: str = ""
    """Creation time of the CheckpointRun, or of the first sight: older ones hold a run id."""
    number: int = 0
    """Of the order of first sight, for those born in the same second."""
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=MAX_NOTICES))
    busy: bool = False
    again_s: float = 0.0
    """Not to be looked at before, unless something happens."""
    decided: tuple[int, Wish, reports.PolicyInForce | None] | None = None


class Controller:
    """All runs. Implements `reports.Ledger`."""

    def __init__(
        self,
        *,
        call: Caller,
        teller: Teller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        keep_finished_s: float,
        status_interval_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._call = call
        self._statuses = Statuses(call)
        self._teller = teller
        self._defaults = defaults
        self.metrics = metrics
        self._keep_finished_s = keep_finished_s
        self._status_interval_s = status_interval_s
        self._wall = wall
        self.fleet: Director | None = None
        self._entries: dict[RunKey, Entry] = {}
        self._by_id: dict[tuple[str, str], set[RunKey]] = {}
        self._pods: dict[str, tuple[RunKey, float]] = {}
        """Pod UID -> its run, and when it was last seen to change."""
        self._jobs: dict[str, tuple[RunKey, float]] = {}
        self._nodes: dict[str, NodeView] = {}
        self._specs: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._entered = 0
        self._serial = 0
        """Counts changes of policies."""
        self._marked: dict[RunKey, None] = {}
        """In the order they were marked, so that none waits for ever."""
        self._judged_all_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_at_s = 0.0
        self.loaded = False
        self.synced = False
        """Whether all that there is was seen: before, no run of an earlier controller's is judged and none directed."""
        self._sync_tries = 0
        metrics.follow(self)

    def __len__(self) -> int:
        return len(self._entries)

    def runs(self) -> Iterator[Run]:
        """Every run."""
        return (each.run for each in self._entries.values())

    def unwritten(self) -> int:
        """Runs of which something is not written yet."""
        return len(self._marked) + sum(each.busy for each in self._entries.values())

    # -- what was known before ---------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the CheckpointRuns; raises `ApiUnavailable`."""
        for found in await self._statuses.all():
            try:
                run = records.run_of(found)
            except Exception:  # noqa: BLE001 - of a newer version, say: that run begins anew, the others go on
                self.metrics.judge_errors.inc()
                _log.exception("run.not_read", name=(found.get("metadata") or {}).get("name", ""))
                continue
            entry = self._enter(run)
            entry.served = served(found)
            entry.written = entry.served.status
            entry.durable = run.taken
            entry.born = entry.served.created
            entry.reloaded_s = run.judged_s
            if run.directed is not None and not run.finished and self.fleet is not None:
                self.fleet.direct(run.key, Directive(generation=run.generation, policy=run.directed))
        self.loaded = True
        self._sweep_at_s = self._wall() + SWEEP_SOON_S
        _log.info("controller.loaded", runs=len(self._entries))

    def _enter(self, run: Run) -> Entry:
        entry = Entry(
            run=run,
            pace=Pace(interval_s=self._status_interval_s),
            born=views.timestamp(self._wall()),
            number=self._entered,
        )
        self._entered += 1
        self._entries[run.key] = entry
        self._by_id.setdefault((run.workload.namespace, run.run_id), set()).add(run.key)
        return entry

    def _drop(self, key: RunKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._marked.pop(key, None)
        run_id = (key[0], entry.run.run_id)
        self._by_id[run_id].discard(key)
        if not self._by_id[run_id]:
            del self._by_id[run_id]
        for uid in entry.run.pods:
            self._pods.pop(uid, None)
        for uid in entry.run.jobs:
            self._jobs.pop(uid, None)
        if self.fleet is not None:
            self.fleet.forget(key)

    def _set(self, entry: Entry, run: Run) -> None:
        if run is entry.run:
            return
        if run.run_id != entry.run.run_id:  # pods were seen before their Job
            before = self._by_id.get((run.workload.namespace, entry.run.run_id), set())
            before.discard(run.key)
            self._by_id.setdefault((run.workload.namespace, run.run_id), set()).add(run.key)
        entry.run = run
        entry.again_s = 0.0
        self._marked[run.key] = None

    # -- what the API says -------------------------------------------------------------------------------------------

    def on_job(self, kind: str | None, document: Document) -> None:
        """A Job came, changed or went (`DELETED`)."""
        now_s = self._wall()
        job = views.job_of(document)
        key = job.workload.key
        entry = self._entries.get(key)
        if kind == "DELETED":
            if entry is not None and job.uid in entry.run.jobs:  # the last word of it says how it ended
                self._set(entry, runs.with_job(entry.run, job, now_s))
            self._forget_job(job.uid, now_s)
            return
        if entry is None:
            if self._is_old(job.ended_at_s if job.outcome else now_s, now_s):
                return
            entry = self._enter(Run(workload=job.workload, wish=job.wish))
        self._jobs[job.uid] = key, now_s
        self._set(entry, runs.with_job(entry.run, job, now_s))

    def _forget_job(self, uid: str, now_s: float) -> None:
        known = self._jobs.pop(uid, None)
        entry = self._entries.get(known[0]) if known is not None else None
        if entry is not None:
            self._set(entry, runs.without_job(entry.run, uid, now_s))

    def _is_old(self, ended_at_s: float, now_s: float) -> bool:
        """Whether something that nobody knows ended so long ago that its CheckpointRun is removed already."""
        return now_s - ended_at_s > self._keep_finished_s

    def on_pod(self, kind: str | None, document: Document) -> None:
        """A pod came, changed or went."""
        now_s = self._wall()
        pod = views.pod_of(document)
        key = pod.workload.key
        entry = self._entries.get(key)
        if entry is None:
            ended_at_s = pod.ending.at_s if pod.ending is not None and not pod.alive else now_s
            if kind == "DELETED" or self._is_old(ended_at_s, now_s):
                return
            entry = self._enter(Run(workload=pod.workload, wish=pod.wish))
        ready = self._node_ready(pod)
        if entry.reloaded_s and pod.uid not in entry.run.pods:
            self._set(entry, _known_before(entry.run, pod, entry.reloaded_s))
        if kind == "DELETED":
            if pod.uid in entry.run.pods:  # the last word of it says how it went
                self._set(entry, runs.with_pod(entry.run, pod, node_ready=ready, now_s=now_s))
            self._forget_pod(pod.uid, now_s)
            return
        self._pods[pod.uid] = key, now_s
        self._set(entry, runs.with_pod(entry.run, pod, node_ready=ready, now_s=now_s))

    def _forget_pod(self, uid: str, now_s: float) -> None:
        known = self._pods.pop(uid, None)
        entry = self._entries.get(known[0]) if known is not None else None
        pod = entry.run.pods.get(uid) if entry is not None else None
        if entry is None or pod is None:
            return
        ready = self._node_ready(pod)
        self._set(entry, runs.without_pod(entry.run, uid, node_ready=ready, now_s=now_s))

    def _node_ready(self, pod: PodView) -> bool:
        node = self._nodes.get(pod.node)
        return node is not None and node.ready

    def on_node(self, kind: str | None, document: Document) -> None:
        """A node came, changed or went."""
        node = views.node_of(document)
        if kind == "DELETED":
            self._nodes.pop(node.name, None)
            return
        before = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if node.cordoned and before is not None and not before.cordoned:
            self._save_before_drain(node.name)

    def _save_before_drain(self, node: str) -> None:
        """Its evictions are to come: a checkpoint now leaves them less to save within the grace period."""
        for entry in self._entries.values():
            there = any(each.node == node and each.alive for each in entry.run.pods.values())
            if there and not entry.run.finished and self.fleet is not None:
                told = self.fleet.save_now(entry.run.key, "drain", urgent=False, deadline_s=0.0)
                _log.info(
                    "run.save_before_drain", namespace=entry.run.workload.namespace, node=node, told=told
                )

    def on_policy(self, kind: str | None, document: Document) -> None:
        """A CheckpointPolicy came, changed or went."""
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        spec = document.get("spec") or {}
        if kind == "DELETED":
            self._specs.pop(key, None)
        elif self._specs.get(key) != spec:
            self._specs[key] = spec
        else:
            return
        self._serial += 1
        for each in self._entries.values():
            if (each.run.workload.namespace, each.run.wish.policy) == key:
                self._marked[each.run.key] = None

    def on_run(self, kind: str | None, document: Document) -> None:
        """A CheckpointRun changed: of interest is only that somebody deleted one."""
        if kind != "DELETED":
            return
        run = records.run_of(document)
        entry = self._entries.get(run.key)
        if entry is None or entry.served is None or entry.served.uid != document["metadata"]["uid"]:
            return
        if entry.run.finished:
            self._drop(run.key)
        else:
            self._lost(entry)

    def _lost(self, entry: Entry) -> None:
        """Its CheckpointRun is gone: make it anew."""
        entry.served, entry.written, entry.durable = None, {}, {}
        if (
            self._entries.get(entry.run.key) is entry
        ):  # not let go while the write that found out was under way
            self._marked[entry.run.key] = None

    # -- what the sidecars say ---------------------------------------------------------------------------------------

    def connected(self, hello: Hello) -> None:
        """See `reports.Ledger`."""
        known = self._pods.get(hello.pod_uid)
        entry = self._entries.get(known[0]) if known is not None else None
        if known is None or entry is None:
            raise reports.Unknown("this pod is not known (yet)", where=f"{hello.namespace}/{hello.pod}")
        if known[0] != hello.run_key:
            raise reports.Refused(
                f"this pod is of workload {known[0][1]}, not {hello.workload_uid}",
                where=f"{hello.namespace}/{hello.pod}",
            )
        holder = self._holder(entry)
        if holder is not entry:
            sentence = _taken_sentence(holder.run)
            self._set(entry, replace(entry.run, taken_by=sentence))
            raise reports.Refused(sentence, where=f"{hello.namespace}/{hello.pod}")
        self._set(entry, runs.with_connected(entry.run, hello))

    def _holder(self, entry: Entry) -> Entry:
        """Who holds the run id: the oldest that is not finished."""
        keys = self._by_id.get((entry.run.workload.namespace, entry.run.run_id), ())
        live = [self._entries[key] for key in keys if not self._entries[key].run.finished]
        return min(live, key=lambda each: (each.born, each.number), default=entry)

    def reported(self, hello: Hello, heartbeat: Heartbeat) -> int:
        """See `reports.Ledger`."""
        entry = self._entries.get(hello.run_key)
        if entry is None:  # removed while it was connected
            return 0
        run, notices = runs.with_report(entry.run, hello, heartbeat, self._wall())
        entry.notices.extend(notices)
        self._set(entry, run)
        durable = entry.durable.get(hello.pod_uid)
        return durable.incident if durable is not None and durable.process == hello.process else 0

    def disconnected(self, hello: Hello) -> None:
        """See `reports.Ledger`."""
        entry = self._entries.get(hello.run_key)
        if entry is not None:
            self._set(entry, runs.without_connected(entry.run, hello))

    # -- conclusions -------------------------------------------------------------------------------------------------

    async def pump(self) -> None:
        """Judge and write for ever."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Judge what is marked (and everything now and then), and begin the writes that are due."""
        now_s = self._wall()
        if now_s - self._judged_all_s >= JUDGE_S or now_s < self._judged_all_s:
            self._judged_all_s = now_s
            self._marked.update(dict.fromkeys(self._entries))
        until_s = time.perf_counter() + SLICE_S
        for key in list(self._marked):
            entry = self._entries[key]
            if now_s < entry.again_s:
                continue
            if time.perf_counter() > until_s:
                break
            del self._marked[key]
            if entry.busy or (entry.reloaded_s and not self.synced):
                continue  # it is marked again when its write ends, and all are every few seconds
            if self._expired(entry, now_s):
                self._start(self._remove(entry), entry)
                continue
            try:
                self._judge(entry, now_s)
                wait_s = self._wait_s(entry, now_s)
            except Exception:  # noqa: BLE001 - one odd run must not stop the others
                self.metrics.judge_errors.inc()
                _log.exception("run.not_judged", namespace=key[0], run=entry.run.name)
                continue
            if wait_s == 0:
                self._start(self._write(entry), entry)
            elif wait_s <= JUDGE_S:
                entry.again_s = now_s + wait_s
                self._marked[key] = None

    def _expired(self, entry: Entry, now_s: float) -> bool:
        run = entry.run
        old = bool(run.finished) and now_s - run.finished_at_s > self._keep_finished_s
        return old and not entry.busy and now_s >= entry.pace.not_before_s

    def _judge(self, entry: Entry, now_s: float) -> None:
        before = entry.run
        if before.taken_by and self._holder(entry) is entry:
            entry.run = replace(before, taken_by="")
        entry.run, notices = judgements.judged(entry.run, self._nodes, now_s)
        entry.notices.extend(notices)
        self._direct(entry)
        if entry.run.finished and not before.finished and self.fleet is not None:
            self.fleet.forget(before.key)

    def _direct(self, entry: Entry) -> None:
        """Have the run's sidecars go on under the policy as it is now."""
        run = entry.run
        in_force = run.progress.policy
        if run.finished or not in_force.encoding or not run.live or self.fleet is None or not self.synced:
            return
        wanted = self._decide(entry)
        if wanted is None:
            return
        changed = directives.differs(wanted, in_force) if run.directed is None else wanted != run.directed
        if not changed:
            return
        generation = max(run.generation, *(each.directive for each in run.live)) + 1
        entry.run = replace(run, directed=wanted, generation=generation)
        self.fleet.direct(run.key, Directive(generation=generation, policy=wanted))
        self.metrics.directives.inc()
        _log.info("run.directed", namespace=run.workload.namespace, run=run.name, generation=generation)

    def _decide(self, entry: Entry) -> reports.PolicyInForce | None:
        """What it shall do, computed when a policy or a wish changed."""
        run = entry.run
        if entry.decided is not None and entry.decided[:2] == (self._serial, run.wish):
            return entry.decided[2]
        wanted: reports.PolicyInForce | None = None
        spec = self._specs.get((run.workload.namespace, run.wish.policy))
        if spec is None and run.wish.policy == policies.DEFAULT and self._defaults.has_store():
            spec = {}
        if spec is not None:
            try:
                wanted = directives.decided(spec, self._defaults.spec(), run.wish)
            except (Refusal, DeltashardError) as error:
                self.metrics.undecided.inc()
                _log.warning(
                    "run.undecided", namespace=run.workload.namespace, run=run.name, error=str(error)
                )
        entry.decided = (self._serial, run.wish, wanted)
        return wanted

    # -- writes ------------------------------------------------------------------------------------------------------

    def _wait_s(self, entry: Entry, now_s: float) -> float:
        """How long until something of it is to be written: 0 is now, infinity is nothing."""
        if entry.served is None:
            return max(0.0, entry.pace.not_before_s - now_s)
        self._tell(entry)
        changed = records.patch(entry.written, records.status(entry.run, now_s))
        return entry.pace.wait_s(changed, now_s) if changed else math.inf

    def _start(self, work: Any, entry: Entry) -> None:
        entry.busy = True
        task = asyncio.create_task(self._guarded(work, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Any, entry: Entry) -> None:
        key = entry.run.key
        try:
            await work
        except (ApiUnavailable, StatusRefused) as error:
            self.metrics.writes.labels("failed").inc()
            entry.pace.failed(self._wall())
            _log.warning("run.not_written", namespace=key[0], run=entry.run.name, error=str(error))
            if entry.run.finished and entry.served is None and isinstance(error, StatusRefused):
                self._drop(key)  # its namespace is going
        except Exception:  # noqa: BLE001 - the same
            self.metrics.writes.labels("failed").inc()
            entry.pace.failed(self._wall())
            _log.exception("run.not_written", namespace=key[0], run=entry.run.name)
        finally:
            entry.busy = False
            if self._entries.get(key) is entry:
                self._marked[key] = None

    async def _write(self, entry: Entry) -> None:
        begun_s = self._wall()
        if entry.served is None:
            entry.served, new = await self._statuses.create(records.document(entry.run))
            entry.written = entry.served.status
            entry.born = entry.served.created
            if new:
                self._tell_replaced(entry)
        run = entry.run
        change = records.patch(entry.written, records.status(run, begun_s))
        if change:
            after = await self._statuses.write(run.workload.namespace, run.name, entry.served.uid, change)
            if after is None:
                self.metrics.writes.labels("lost").inc()
                self._lost(entry)
                return
            entry.written, entry.durable = after, run.taken
        self.metrics.writes.labels("written").inc()
        self.metrics.write_seconds.observe(max(self._wall() - begun_s, 0.0))
        entry.pace.written(self._wall())
        self._tell(entry)

    async def _remove(self, entry: Entry) -> None:
        if entry.served is not None:
            await self._statuses.remove(entry.run.workload.namespace, entry.run.name, entry.served.uid)
        self.metrics.removed.inc()
        self._drop(entry.run.key)

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
            for each in self._entries.values()
            if each is not entry
            and (each.run.workload.namespace, each.run.workload.kind, each.run.workload.name)
            == (mine.namespace, mine.kind, mine.name)
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

    # -- what went while nobody looked ------------------------------------------------------------------------------

    def sweep_soon(self, path: str) -> None:
        """A list of this path was made: a watch began anew."""
        if path in {JOBS, PODS} and self.loaded:
            self._sweep_at_s = min(self._sweep_at_s, self._wall() + SWEEP_SOON_S)

    async def sweep_for_ever(self) -> None:
        """Sweep when it is due."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._wall() < self._sweep_at_s:
                continue
            self._sweep_at_s = self._wall() + SWEEP_S
            try:
                await self.sweep()
                if not self.synced:
                    self._sweep_at_s = self._wall() + 1.0
            except ApiUnavailable as error:
                self._sweep_at_s = self._wall() + 10 * SWEEP_SOON_S
                _log.warning("controller.sweep_failed", error=str(error))

    async def sweep(self) -> None:
        """Drop what is not there any more; raises `ApiUnavailable`."""
        begun_s = self._wall()
        jobs, pods = [
            {
                each["metadata"]["uid"]
                for each in await self._call.every(path, selector=SELECTOR, accept=METADATA)
            }
            for path in (JOBS, PODS)
        ]
        now_s = self._wall()
        gone = [uid for uid, (_, seen_s) in self._pods.items() if uid not in pods and seen_s < begun_s]
        for uid in gone:
            self._forget_pod(uid, now_s)
        for uid in [uid for uid, (_, seen_s) in self._jobs.items() if uid not in jobs and seen_s < begun_s]:
            self._forget_job(uid, now_s)
        for entry in list(self._entries.values()):
            run = entry.run
            there = {"Job": jobs, "Pod": pods}.get(run.workload.kind)
            known = run.jobs if run.workload.kind == "Job" else run.pods
            if there is None or run.finished or known or run.workload.uid in there:
                continue
            if run.seen_s < begun_s:
                self._set(entry, runs.finished(run, "Deleted", now_s))
        self.metrics.sweeps.inc()
        if gone:
            _log.info("controller.swept", pods=len(gone))
        if not self.synced:
            self._sync_tries += 1
            listed = await self._call.every(POLICIES, accept=METADATA)
            specs = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in listed}
            # Watches bring what the lists name, but for what ended so long ago that nobody keeps it.
            seen = jobs <= set(self._jobs) and pods <= set(self._pods) and specs <= set(self._specs)
            self.synced = seen or self._sync_tries >= SYNC_TRIES

    async def drain(self, timeout_s: float) -> None:
        """Write what is not written yet, for at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                for entry in self._entries.values():
                    entry.pace, entry.again_s = Pace(), 0.0  # at once
                self._marked.update(dict.fromkeys(self._entries))
                while self._marked or self._tasks:
                    self.tick()
                    await asyncio.sleep(TICK_S / 5)
        except TimeoutError:
            _log.warning("controller.not_drained", runs=self.unwritten())
        await self._teller.drain(1.0)


def _known_before(run: Run, pod: PodView, written_s: float) -> Run:
    """The run, a pod's end or restarts marked as counted that the status before was written after."""
    if pod.uid in run.restarts or pod.ending is None or not 0 < pod.ending.at_s <= written_s:
        return run
    lost = run.lost if pod.alive else run.lost | {pod.uid}
    return replace(run, restarts={**run.restarts, pod.uid: pod.restarts}, lost=lost)


def _taken_sentence(holder: Run) -> str:
    return (
        f"run id {holder.run_id} is held by {holder.workload.kind} {holder.workload.name} "
        f"(CheckpointRun {holder.name}, {holder.phase.value}): wait for its end, delete it, or choose another run id"
    )
