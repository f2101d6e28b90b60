"""The controller: what the watches and the sidecars say goes in, CheckpointRuns, Events and directives come out.

Everything here runs on one asyncio loop and nothing waits: handlers (`watch`) and the ledger put facts into the run
they are of and mark it (`run_book`); `pump` draws conclusions from marked runs a few times a second, writes what is due
in tasks of its own (`writer`), and has Events told. So a burst of a thousand heartbeats costs a thousand small updates
and as many judgements as there are runs.

What was counted survives in the CheckpointRuns, which are read before anything else. An incident of a sidecar is
acknowledged when the status that counts it is written, so that a controller that dies in between hears it again. Before
all that there is was seen, no run of an earlier controller's is judged and none is directed: a policy that was not seen
yet is not one that is not there.

The ledger refuses a sidecar whose pod is of another workload than it says, and one that asks for a run id that an
older workload holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog
from deltashard_checkpoint.errors import DeltashardError
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.controller.event import Teller
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.policy_writer import PolicyWriter
from deltashard_operator.controller.reclaimer import Reclaimer
from deltashard_operator.controller.run_book import Director, Entries, Entry
from deltashard_operator.controller.status import Pace, Statuses, served
from deltashard_operator.controller.watch import TICK_S, Watches
from deltashard_operator.controller.writer import Writes
from deltashard_operator.fleet import sidecar_report
from deltashard_operator.fleet.sidecar_report import Directive, Heartbeat, Hello
from deltashard_operator.kube.call import Caller
from deltashard_operator.run import directive, judgement, run_record, watched_run
from deltashard_operator.run.watched_run import Run

JUDGE_S = 5.0
"""Time alone changes a run (stale, stuck, settled): every run is judged so often."""
SLICE_S = 0.05
"""Judging keeps the loop from others no longer than this at once."""
YIELD_S = 0.01
"""What the others get before it goes on."""
_log = structlog.get_logger("deltashard.controller")


class Controller:
    """All runs. Implements `sidecar_report.Ledger`."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        call: Caller,
        teller: Teller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        keep_finished_s: float,
        status_interval_s: float,
        namespaces: Sequence[str] = (),
        leads: Callable[[], bool] = lambda: True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Keep the runs of these namespaces (none named: of all).

        `leads`: whether this controller may write; while it may not, facts are taken and nothing comes of them.
        """
        self._leads = leads
        self._statuses = Statuses(call, namespaces)
        self._teller = teller
        self._defaults = defaults
        self.metrics = metrics
        self._keep_finished_s = keep_finished_s
        self._wall = wall
        self._books = Entries(status_interval_s=status_interval_s, wall=wall)
        self.watches = Watches(
            self._books, call=call, metrics=metrics, keep_finished_s=keep_finished_s, wall=wall
        )
        self._writes = Writes(self._books, statuses=self._statuses, teller=teller, metrics=metrics, wall=wall)
        self._policies = PolicyWriter(
            self._books,
            call=call,
            defaults=defaults,
            metrics=metrics,
            counts_s=status_interval_s,
            wall=wall,
        )
        self._reclaims = Reclaimer(self._books, call=call, defaults=defaults, metrics=metrics, wall=wall)
        self._judged_all_s = 0.0
        self.loaded = False
        metrics.follow(self)

    def __len__(self) -> int:
        return len(self._books)

    def runs(self) -> Iterator[Run]:
        return (each.run for each in self._books)

    def unwritten(self) -> int:
        """Runs of which something is not written yet."""
        return len(self._books.marked) + sum(each.busy for each in self._books)

    @property
    def synced(self) -> bool:
        return self.watches.synced

    def follow(self, fleet: Director) -> None:
        self._books.fleet = fleet

    # -- what was known before ---------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the CheckpointRuns; raises `ApiUnavailable`."""
        for found in await self._statuses.all():
            try:
                run = run_record.run_of(found)
            except Exception:  # noqa: BLE001 - of a newer version, say: that run begins anew, the others go on
                self.metrics.judge_errors.inc()
                _log.exception("run.not_read", name=(found.get("metadata") or {}).get("name", ""))
                continue
            entry = self._books.enter(run)
            entry.served = served(found)
            entry.written = entry.served.status
            entry.durable = run.taken
            entry.born = entry.served.created
            entry.reloaded_s = run.judged_s
            if run.directed is not None and not run.finished and self._books.fleet is not None:
                self._books.fleet.direct(run.key, Directive(generation=run.generation, policy=run.directed))
        self.loaded = True
        _log.info("controller.loaded", runs=len(self._books.by_key))

    # -- what the sidecars say ---------------------------------------------------------------------------------------

    def connected(self, hello: Hello) -> None:
        known = self._books.pods.get(hello.pod_uid)
        entry = self._books.by_key.get(known) if known is not None else None
        if known is None or entry is None:
            raise sidecar_report.Unknown(
                "this pod is not known (yet)", where=f"{hello.namespace}/{hello.pod}"
            )
        if known != hello.run_key:
            raise sidecar_report.Refused(
                f"this pod is of workload {known[1]}, not {hello.workload_uid}",
                where=f"{hello.namespace}/{hello.pod}",
            )
        holder = self._books.holder(entry)
        if holder is not entry:
            sentence = _taken_sentence(holder.run)
            self._books.set(entry, replace(entry.run, taken_by=sentence))
            raise sidecar_report.Refused(sentence, where=f"{hello.namespace}/{hello.pod}")
        self._books.set(entry, watched_run.with_connected(entry.run, hello))

    def reported(self, hello: Hello, heartbeat: Heartbeat) -> int:
        entry = self._books.by_key.get(hello.run_key)
        if entry is None:  # removed while it was connected
            return 0
        run, notices = watched_run.with_report(entry.run, hello, heartbeat, self._wall())
        entry.notices.extend(notices)
        self._books.set(entry, run)
        durable = entry.durable.get(hello.pod_uid)
        return durable.incident if durable is not None and durable.process == hello.process else 0

    def disconnected(self, hello: Hello) -> None:
        entry = self._books.by_key.get(hello.run_key)
        if entry is not None:
            self._books.set(entry, watched_run.without_connected(entry.run, hello))

    # -- conclusions -------------------------------------------------------------------------------------------------

    async def pump(self) -> None:
        while True:
            done = self.tick()
            await asyncio.sleep(TICK_S if done else YIELD_S)

    def tick(self) -> bool:  # noqa: C901
        """Judge what is marked (and everything now and then), and begin the writes that are due.

        Returns whether it got through: a slice is of time as it passes, and on a busy machine little is done in one.
        """
        if not self._leads():
            return True
        now_s = self._wall()
        if self.synced:
            self._policies.tick()
            self._reclaims.tick()
        if now_s - self._judged_all_s >= JUDGE_S or now_s < self._judged_all_s:
            self._judged_all_s = now_s
            self._books.marked.update(dict.fromkeys(self._books.by_key))
        until_s = time.perf_counter() + SLICE_S
        for key in list(self._books.marked):
            entry = self._books.by_key.get(key)
            if entry is None:
                del self._books.marked[key]
                continue
            if now_s < entry.again_s:
                continue
            if time.perf_counter() > until_s:
                return False
            del self._books.marked[key]
            if entry.busy or (entry.reloaded_s and not self.synced):
                continue  # it is marked again when its write ends, and all are every few seconds
            if self._expired(entry, now_s):
                self._writes.remove(entry)
                continue
            try:
                self._judge(entry, now_s)
                wait_s = self._writes.wait_s(entry, now_s)
            except Exception:  # noqa: BLE001 - one odd run must not stop the others
                self.metrics.judge_errors.inc()
                _log.exception("run.not_judged", namespace=key[0], run=entry.run.name)
                continue
            if wait_s == 0:
                self._writes.write(entry)
            elif wait_s <= JUDGE_S:
                entry.again_s = now_s + wait_s
                self._books.mark(key)
        return True

    def _expired(self, entry: Entry, now_s: float) -> bool:
        run = entry.run
        ended_at_s = run.finished_at_s
        if run.reclaim is not None:
            if run.reclaim.pending:
                return False
            ended_at_s = max(ended_at_s, run.reclaim.since_s)  # what came of its bytes is to be read, too
        old = bool(run.finished) and now_s - ended_at_s > self._keep_finished_s
        return old and not entry.busy and now_s >= entry.pace.not_before_s

    def _judge(self, entry: Entry, now_s: float) -> None:
        before = entry.run
        if before.taken_by and self._books.holder(entry) is entry:
            entry.run = replace(before, taken_by="")
        entry.run, notices = judgement.judged(entry.run, self._books.nodes, now_s)
        entry.notices.extend(notices)
        self._count_nodes(entry)
        self._direct(entry)
        if entry.run.finished and not before.finished and self._books.fleet is not None:
            self._books.fleet.forget(before.key)

    def _direct(self, entry: Entry) -> None:
        """Have the run's sidecars go on under the policy as it is now."""
        run = entry.run
        in_force = run.progress.policy
        if (
            run.finished
            or not in_force.encoding
            or not run.live
            or self._books.fleet is None
            or not self.synced
        ):
            return
        wanted = self._decide(entry)
        if wanted is None:
            return
        changed = directive.differs(wanted, in_force) if run.directed is None else wanted != run.directed
        if not changed:
            return
        generation = max(run.generation, *(each.directive for each in run.live)) + 1
        entry.run = replace(run, directed=wanted, generation=generation)
        self._books.fleet.direct(run.key, Directive(generation=generation, policy=wanted))
        self.metrics.directives.inc()
        _log.info("run.directed", namespace=run.workload.namespace, run=run.name, generation=generation)

    def _count_nodes(self, entry: Entry) -> None:
        seen = entry.run.incidents.nodes
        if seen is entry.nodes:
            return
        for node, n in seen.items():
            if n > entry.nodes.get(node, 0) and node in self._books.nodes:
                self.metrics.node_failures.labels(node).inc(n - entry.nodes.get(node, 0))
        entry.nodes = seen

    def _decide(self, entry: Entry) -> pb.Policy | None:
        """What it shall do, computed when a policy or a wish changed."""
        run = entry.run
        if entry.decided is not None and entry.decided[:2] == (self._books.serial, run.wish):
            return entry.decided[2]
        wanted: pb.Policy | None = None
        spec = self._books.spec_of(run, self._defaults)
        if spec is not None:
            try:
                wanted = directive.decided(spec, self._defaults.spec(), run.wish)
            except (Refusal, DeltashardError) as error:
                self.metrics.undecided.inc()
                _log.warning(
                    "run.undecided", namespace=run.workload.namespace, run=run.name, error=str(error)
                )
        entry.decided = (self._books.serial, run.wish, wanted)
        return wanted

    async def drain(self, timeout_s: float) -> None:
        """Write what is not written yet, for at most so long."""
        if not self._leads():
            return
        try:
            async with asyncio.timeout(timeout_s):
                for entry in self._books:
                    entry.pace, entry.again_s = Pace(), 0.0  # at once
                self._books.marked.update(dict.fromkeys(self._books.by_key))
                while self._books.marked or self._writes.tasks:
                    self.tick()
                    await asyncio.sleep(TICK_S / 5)
                await self._policies.settle()
                await self._reclaims.settle()
        except TimeoutError:
            _log.warning("controller.not_drained", runs=self.unwritten())
        await self._teller.drain(1.0)


def _taken_sentence(holder: Run) -> str:
    return (
        f"run id {holder.run_id} is held by {holder.workload.called} "
        f"(CheckpointRun {holder.name}, {holder.phase.value}): wait for its end, delete it, or choose another run id"
    )
