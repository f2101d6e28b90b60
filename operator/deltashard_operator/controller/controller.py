"""The controller: watch events and sidecar reports in; CheckpointRuns, events and replies out.

Everything runs on one asyncio loop without blocking: watch handlers (`watch`) and reports update the run and mark it
(`run_store`); `pump` reconciles the marked runs several times a second and queues the resulting writes (`writer`,
`write_queue`). Counters survive in the CheckpointRuns, which are loaded first. An incident is acknowledged to its
sidecar once the status that counts it and its event are written, so that the incident is repeated if the controller
crashes in between. Runs of an earlier controller are neither reconciled nor given directives before the initial lists
are complete, because an unseen policy is not an absent one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import pod_annotation, policy_writer, status
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.reclaimer import Reclaimer
from deltashard_operator.controller.requests import CheckpointRequests
from deltashard_operator.controller.run_store import RunEntry, RunStore
from deltashard_operator.controller.watch import NO_RUN, TICK_S, WatchHandlers
from deltashard_operator.controller.write_queue import WriteQueue
from deltashard_operator.controller.writer import RunWriter
from deltashard_operator.fleet.report import (
    Directive,
    Reply,
    Report,
    ReportRefused,
    RunKey,
    SidecarIdentity,
    UnknownPod,
)
from deltashard_operator.kube.call import Caller
from deltashard_operator.run import (
    directive,
    ledger,
    reconcile,
    report_change,
    run_record,
    schedule,
    watched_run,
)
from deltashard_operator.run.phase import TRAINING_PHASES, Phase
from deltashard_operator.run.reclaim import REMOVED
from deltashard_operator.run.watched_run import REPORTER_TIMEOUT_S, WatchedRun

RESYNC_S = 10.0
"""Interval at which all runs are reconciled, because time alone changes them (stale, stuck)."""
POLL_S = 1.0
"""Interval at which all policies, removals and requests are reconciled."""
TIME_SLICE_S = 0.05
"""Maximum time of uninterrupted reconciliation, so that other tasks of the loop can run."""
YIELD_S = 0.01
_log = structlog.get_logger("deltashard.controller")


class Controller:
    """Controller of all runs. `report` is the `ReportHandler`."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        call: Caller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        keep_finished_s: float,
        status_interval_s: float,
        namespaces: Sequence[str] = (),
        disruption_taints: Container[str] = (),
        annotate_pods: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Control the runs of `namespaces` (empty: all). `annotate_pods`: see `pod_annotation`."""
        self._namespaces = namespaces
        self.metrics = metrics
        self._keep_finished_s = keep_finished_s
        self._wall = wall
        self.queue = queue = WriteQueue(
            commit_s=status_interval_s, wall=wall, count=lambda outcome: metrics.writes.labels(outcome).inc()
        )
        self._run_store = run_store = RunStore(
            call=call, defaults=defaults, metrics=metrics, queue=queue, wall=wall
        )
        self._requests = CheckpointRequests(run_store, keep_finished_s=keep_finished_s)
        self.watches = WatchHandlers(
            run_store,
            keep_finished_s=keep_finished_s,
            disruption_taints=disruption_taints,
            more=(self._requests.kind,),
        )
        self._writer = RunWriter(run_store)
        self._reconcilers: list[Callable[[float], None]] = [
            Reclaimer(run_store).reconcile,
            self._requests.reconcile,
        ]
        self._reconcilers += [partial(policy_writer.reconcile, run_store)]
        self._reconcilers += [partial(pod_annotation.reconcile, run_store)] if annotate_pods else []
        self._polled_s = self._resynced_s = 0.0
        self._resync: dict[RunKey, None] = {}
        """Runs to reconcile periodically. Marked runs go first."""
        self.sidecars = 0
        """Number of live sidecars at the last resync."""
        self._initial_nudge_done = False
        metrics.register_runs(self.runs)
        metrics.queue.set_function(lambda: len(queue))

    def runs(self) -> Iterator[WatchedRun]:
        return (each.run for each in self._run_store)

    @property
    def synced(self) -> bool:
        return self.watches.synced

    def set_nudger(self, nudger: Callable[[str], None]) -> None:
        self._run_store.nudger = nudger

    async def load(self) -> None:
        for found in await status.list_runs(self._run_store.call, self._namespaces):
            run = self._read(found)
            if run is None:
                continue
            entry = self._run_store.add(run)
            self._writer.adopt(entry, found)
            entry.durable, entry.created_at = run.ledger, found["metadata"].get("creationTimestamp", "")
        _log.info("controller.loaded", runs=len(self._run_store.by_key))

    def _read(self, found: Mapping[str, Any]) -> WatchedRun | None:
        """Parse the run of a CheckpointRun. For an unreadable finished run, parse only what its removal needs."""
        found_status = found.get("status") or {}
        for each in (found_status, {**found_status, "phase": Phase.FINISHED.value, "ledger": ""}):
            try:
                return run_record.run_of({**found, "status": each})
            except Exception:  # noqa: BLE001 - e.g. of a newer version; the other runs continue
                self.metrics.reconcile_errors.inc()
                _log.exception("run.unreadable", name=found["metadata"]["name"])
            if not found_status.get("finishedAt"):
                break
        return None

    def report(self, report: Report) -> Reply:
        """Process a report and return the reply; see `report.ReportHandler`."""
        entry = self._find_entry(report.identity)
        uid, now_s = report.identity.pod_uid, self._wall()
        report_interval_s = schedule.min_interval_s(self.sidecars)
        run, events = report_change.with_report(entry.run, report, now_s, report_interval_s=report_interval_s)
        entry.events.extend(events)
        self._run_store.set(entry, run)
        for each in report.save_results:
            self._requests.on_save_result(run.key, each)
        report_run = schedule.is_reporter(run, uid, now_s)
        saves = self._run_store.orders.of(run.key, now_s) if report_run else ()
        part = watched_run.part_of(run, uid, report.pod.run)
        return Reply(
            sequence=report.sequence,
            next_s=schedule.next_s(run, uid, now_s, urgent=bool(saves), live=self.sidecars),
            report_run=report_run,
            directive=self._due_directive(entry, uid),
            saves=saves,
            acknowledged_incident=ledger.acknowledged_id(entry.durable, self._writer.recorded, report, part),
        )

    def _find_entry(self, identity: SidecarIdentity) -> RunEntry:
        """Return the run of a sidecar. Raises `UnknownPod`; `ReportRefused` for another workload's pod or run id."""
        where = f"{identity.namespace}/{identity.pod}"
        entry = self._run_store.by_key.get(self._run_store.pods.get(identity.pod_uid, NO_RUN))
        if entry is None or identity.pod_uid not in entry.run.pods:
            raise UnknownPod("this pod is unknown, or not yet known", where=where)
        if entry.run.key != identity.run_key:
            message = f"this pod is of workload {entry.run.workload.uid}, not {identity.workload_uid}"
            raise ReportRefused(message, where=where)
        holder = self._run_store.holder(entry)
        if holder is not entry:
            run = holder.run
            sentence = (
                f"run id {run.run_id} is held by {run.workload.display_name} (CheckpointRun {run.name}, "
                f"{run.phase.value}): wait until it ends, delete it, or choose another run id"
            )
            self._run_store.set(entry, replace(entry.run, run_id_conflict=sentence))
            raise ReportRefused(sentence, where=where)
        return entry

    def _due_directive(self, entry: RunEntry, pod_uid: str) -> Directive | None:
        """Return the directive that a sidecar needs, or None if its policy is current or the wanted one unknown."""
        run = entry.run
        policy = self._run_store.policy_of(run) if not run.finished else None
        if not isinstance(policy, Policy):
            return None
        state = run.last_reports[pod_uid].pod
        in_force = watched_run.policy_in_force(run, watched_run.part_of(run, pod_uid, state.run))
        return directive.due(policy.saving, state.directive, in_force)

    async def pump(self) -> None:
        while True:
            done = self.tick()
            await asyncio.sleep(TICK_S if done else YIELD_S)

    def tick(self) -> bool:
        """Reconcile the marked runs, periodically all, and start due writes. Returns whether all are done."""
        now_s = self._wall()
        if self.synced:
            if not self._initial_nudge_done:
                self._initial_nudge_done = True
                for entry in self._run_store:
                    self._run_store.nudge(entry, every=entry.run.phase not in TRAINING_PHASES, first=True)
            if abs(now_s - self._polled_s) >= POLL_S:
                self._polled_s = now_s
                for each in self._reconcilers:
                    each(now_s)
        if abs(now_s - self._resynced_s) >= RESYNC_S:
            self._resynced_s = now_s
            self.sidecars = sum(len(watched_run.live_reports(run, now_s)) for run in self.runs())
            self._resync.update(dict.fromkeys(self._run_store.by_key))
        done = self._reconcile_marked(now_s)
        self.queue.tick()
        return done

    def _reconcile_marked(self, now_s: float) -> bool:
        until_s = time.perf_counter() + TIME_SLICE_S
        for key in (*self._run_store.marked, *self._resync):
            if time.perf_counter() > until_s:
                return False
            self._run_store.marked.pop(key, None)
            self._resync.pop(key, None)
            entry = self._run_store.by_key.get(key)
            if entry is None or (entry.run.loaded_status_s and not self.synced):
                continue  # all runs are marked again every few seconds
            if self._expired(entry.run, now_s):
                self._writer.remove(entry)
                continue
            try:
                self._reconcile(entry, now_s)
                self._writer.reconcile(entry, now_s)
            except Exception:  # noqa: BLE001 - one invalid run must not stop the others
                self.metrics.reconcile_errors.inc()
                _log.exception("run.reconcile_failed", namespace=key[0], run=entry.run.name)
        return True

    def _expired(self, run: WatchedRun, now_s: float) -> bool:
        if not run.finished or (run.reclaim is not None and run.reclaim.pending):
            return False
        ended_at_s = run.finished_at_s
        if run.reclaim is not None:
            # Keep the record of a removal, too. A removal that keeps the bytes is retried daily, but not forever.
            reclaimed_at_s = run.reclaim.since_s if run.reclaim.state is REMOVED else run.reclaim.due_s
            ended_at_s = max(ended_at_s, reclaimed_at_s)
        return now_s - ended_at_s > self._keep_finished_s

    def _reconcile(self, entry: RunEntry, now_s: float) -> None:
        if entry.run.run_id_conflict and self._run_store.holder(entry) is entry:
            entry.run = replace(entry.run, run_id_conflict="")
        entry.run, events = reconcile.reconcile(entry.run, self._run_store.nodes, now_s)
        entry.events.extend(events)
        reporters = self._run_store.reporters(entry)
        began_s = now_s - entry.run.watched_since_s
        if not reporters and entry.run.loaded_status_s and RESYNC_S <= began_s < REPORTER_TIMEOUT_S:
            self._run_store.nudge(entry)  # the pod with index 0 does not have rank 0, or was not reachable
        for uid in reporters:
            wanted = self._due_directive(entry, uid)
            if wanted is not None and wanted.id != entry.nudged:
                entry.nudged = wanted.id
                # Nudge all sidecars, so that the ranks of a run do not use different encodings for minutes.
                self._run_store.nudge(entry, every=True)
                _log.info("run.directive_changed", namespace=entry.run.workload.namespace, run=entry.run.name)

    async def drain(self, timeout_s: float) -> None:
        self.queue.flush()
        self._run_store.mark_all()
        try:
            async with asyncio.timeout(timeout_s):
                while self._run_store.marked or not self.queue.idle:
                    self.tick()
                    await asyncio.sleep(TICK_S / 5)
        except TimeoutError:
            _log.warning("controller.drain_timeout", runs=len(self.queue))
