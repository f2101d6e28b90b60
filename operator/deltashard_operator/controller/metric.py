"""Prometheus metrics of the controller: its own work, and one set of gauges for each run that is not finished.

What is said of runs is read from them at the scrape, so a finished run's series end with it and nothing is kept twice.
They carry the workload's name and no UID: one that is created again under its name goes on with the series. Of two
workloads of one name (a Job and a pod, say) that train at one time, the second is called like its CheckpointRun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from deltashard_proto.v1.fleet_pb2 import Decision
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltashard_operator import VERSION
from deltashard_operator.controller import event
from deltashard_operator.kube import call
from deltashard_operator.run import condition
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import Run

LABELS = ("namespace", "run")
MAX_WHY = 200
"""Characters of a sentence in a label."""
HANDLERS = ("jobs", "pods", "nodes", "policies", "cluster policies", "runs", "requests")


class Runs(Protocol):
    """Who has the runs."""

    def runs(self) -> Iterator[Run]:
        """Every one."""

    def unwritten(self) -> int:
        """How many writes are due or under way."""


class ControllerMetrics:
    """Every metric of the controller; labels of its own work are closed sets."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        build = Gauge(
            "deltashard_build_info", "Always 1; what runs here", ("version", "component"), registry=r
        )
        build.labels(VERSION, "controller").set(1)
        self.calls = Counter(
            "deltashard_controller_api_calls", "Answers of the API", ("verb", "outcome"), registry=r
        )
        self.leading = Gauge(
            "deltashard_controller_leading",
            "1 when it may write, 0 when another controller leads",
            registry=r,
        )
        self.writes = Counter(
            "deltashard_controller_status_writes",
            "Statuses of runs and policies written, by outcome",
            ("outcome",),
            registry=r,
        )
        self.write_seconds = Histogram(
            "deltashard_controller_status_write_seconds", "Time to write one", registry=r
        )
        self.queue = Gauge("deltashard_controller_queue", "Writes that are due or under way", registry=r)
        self.events = Counter(
            "deltashard_controller_events", "Kubernetes Events, by outcome", ("outcome",), registry=r
        )
        self.events_waiting = Gauge("deltashard_controller_events_waiting", "Events to be told", registry=r)
        self.handled = Counter(
            "deltashard_controller_watch_events", "Events of watches, by resource", ("resource",), registry=r
        )
        self.handler_errors = Counter(
            "deltashard_controller_watch_event_errors",
            "Events of watches that could not be understood",
            ("resource",),
            registry=r,
        )
        self.watch_restarts = Counter(
            "deltashard_controller_watch_restarts",
            "Times a watch began, by resource",
            ("resource",),
            registry=r,
        )
        self.kopf_restarts = Counter(
            "deltashard_controller_watcher_failures", "Times all watches failed and began anew", registry=r
        )
        self.watch_age = Gauge(
            "deltashard_controller_watch_age_seconds",
            "Since the least fresh watch brought anything",
            registry=r,
        )
        self.loop_lag = Gauge(
            "deltashard_controller_loop_lag_seconds",
            "How late the loop was, at worst of a minute",
            registry=r,
        )
        self.sweeps = Counter("deltashard_controller_sweeps", "Looks for what went unseen", registry=r)
        self.removed = Counter("deltashard_controller_runs_removed", "CheckpointRuns removed", registry=r)
        self.reclaims = Counter(
            "deltashard_controller_reclaims",
            "Removals of finished runs' bytes that came to an end, by state",
            ("outcome",),
            registry=r,
        )
        self.directives = Counter("deltashard_controller_directives", "Directives given", registry=r)
        self.judge_errors = Counter(
            "deltashard_controller_judge_errors",
            "Runs that could not be read or judged: a fault of ours",
            registry=r,
        )
        self.undecided = Counter(
            "deltashard_controller_undecided", "Policies that could not be read for a run", registry=r
        )
        self.node_failures = Counter(
            "deltashard_node_failures",
            "Interruptions of training, by the node whose pod was lost; not those of a crash loop",
            ("node",),
            registry=r,
        )
        for verb in call.VERBS:
            for outcome in call.OUTCOMES:
                self.calls.labels(verb, outcome)
        for outcome in ("written", "conflict", "lost", "failed"):
            self.writes.labels(outcome)
        for state in ("removed", "kept", "failed"):
            self.reclaims.labels(state)
        for outcome in event.OUTCOMES:
            self.events.labels(outcome)
        for resource in HANDLERS:
            self.handled.labels(resource)
            self.handler_errors.labels(resource)
            self.watch_restarts.labels(resource)

    def watched(self, what: str, kind: str) -> None:
        """Count what `ObjectWatch` says."""
        if what == "failure":
            self.kopf_restarts.inc()
        else:
            {"event": self.handled, "error": self.handler_errors, "watch": self.watch_restarts}[what].labels(
                kind
            ).inc()

    def without_node(self, node: str) -> None:
        with contextlib.suppress(KeyError):  # it never failed
            self.node_failures.remove(node)

    def follow(self, runs: Runs) -> None:
        """Say what there is to say of these runs at every scrape."""
        self.queue.set_function(runs.unwritten)
        self.registry.register(_OfRuns(runs))


class Whys:
    """Why each decision of a run holds, as a label may say it.

    The sentence has figures that every save measures anew, and a label that changes is a new series. So it is kept as
    it was when what is decided changed last.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], tuple[Decision, str]] = {}

    def of(self, run: Run, made: Decision) -> str:
        """The sentence, no longer than a label should be."""
        key = run.workload.namespace, run.name, made.subject
        before, why = self._known.get(key, (None, ""))
        if before is None or _decided(before) != _decided(made):
            why = ", ".join(filter(None, (made.why, made.bound)))
            why = why if len(why) <= MAX_WHY else why[: MAX_WHY - 3] + "..."
            self._known[key] = made, why
        return why

    def keep(self, live: Iterable[Run]) -> None:
        there = {(run.workload.namespace, run.name) for run in live}
        self._known = {key: known for key, known in self._known.items() if key[:2] in there}


def _decided(made: Decision) -> tuple[str, ...]:
    return made.goal, made.value, made.would, str(bool(made.unreachable))


class _OfRuns(Collector):
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._whys = Whys()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        by_phase = dict.fromkeys(Phase, 0)
        live: dict[tuple[str, str], Run] = {}
        for run in self._runs.runs():
            by_phase[run.phase] += 1
            if not run.finished:
                mine = run.workload.namespace, run.workload.name
                live[mine if mine not in live else (run.workload.namespace, run.name)] = run
        gauges = {
            name: GaugeMetricFamily(f"deltashard_run_{name}", text, labels=LABELS)
            for name, text in (
                ("last_commit_timestamp_seconds", "When the newest checkpoint was committed, Unix time"),
                ("last_committed_step", "Training step of the newest checkpoint"),
                ("step", "Training step reached"),
                ("ranks_expected", "Ranks of the newest attempt"),
                ("ranks_present", "Ranks that are attached to a sidecar which is heard"),
                ("stall_seconds", "The longest that a rank stood still for the newest checkpoint"),
                ("lost_samples_share", "Portion of samples lost by partial recoveries"),
                ("interval_seconds", "Between checkpoints; 0: off"),
                ("stored_bytes", "Size in the store"),
                ("save_cost_seconds", "Training time that a save costs, as measured; absent before"),
                ("save_durable_seconds", "From a save's begin until it is durable, 95 of 100 times"),
                ("step_seconds", "Training time of a step, as measured; absent before"),
                ("restore_seconds", "From open to the first step, as measured; absent before"),
                (
                    "training_since_timestamp_seconds",
                    "Since when steps are made, Unix time; absent when none are",
                ),
            )
        }
        counters = {
            name: CounterMetricFamily(f"deltashard_run_{name}", text, labels=LABELS)
            for name, text in (
                ("failures", "Interruptions of training that nobody wanted"),
                ("restores", "Restores"),
                ("lost_steps", "Steps trained again after restores"),
                ("trained_seconds", "Time in phases that train"),
            )
        }
        phase = GaugeMetricFamily(
            "deltashard_run_phase", "1 for the phase it is in", labels=(*LABELS, "phase")
        )
        trouble = GaugeMetricFamily(
            "deltashard_run_condition", "1 for each trouble it has", labels=(*LABELS, "condition")
        )
        interruptions = CounterMetricFamily(
            "deltashard_run_interruptions",
            "Interruptions after which training was opened again, a crash loop once",
            labels=(*LABELS, "cause", "lossy"),
        )
        decision = GaugeMetricFamily(
            "deltashard_run_decision_info",
            "1 for each decision of the run; why it holds, with the figures of the moment at which it came to",
            labels=(*LABELS, "subject", "goal", "reachable", "value", "would", "why"),
        )
        total = GaugeMetricFamily("deltashard_runs", "Runs, by phase", labels=("phase",))
        for each, n in by_phase.items():
            total.add_metric((each.value,), n)
        for labels, run in live.items():
            progress = run.progress
            if progress.last_commit_at_s:
                gauges["last_commit_timestamp_seconds"].add_metric(labels, progress.last_commit_at_s)
                gauges["last_committed_step"].add_metric(labels, progress.last_step)
            gauges["step"].add_metric(labels, progress.step)
            _ranks(gauges, labels, run)
            gauges["interval_seconds"].add_metric(labels, progress.policy.every_s)
            gauges["stored_bytes"].add_metric(labels, progress.stored_bytes)
            if run.trains_since_s:
                gauges["training_since_timestamp_seconds"].add_metric(labels, run.trains_since_s)
            _measured(gauges, labels, run)
            counters["trained_seconds"].add_metric(labels, run.trained_s)
            for cause, times in run.ledger.incidents.causes.items():
                interruptions.add_metric((*labels, cause, "true"), times.lossy)
                interruptions.add_metric((*labels, cause, "false"), times.restores - times.lossy)
            for made in progress.decisions:
                reachable = str(not made.unreachable).lower()
                why = self._whys.of(run, made)
                decision.add_metric(
                    (*labels, made.subject, made.goal, reachable, made.value, made.would, why), 1
                )
            counters["failures"].add_metric(labels, run.failures)
            counters["restores"].add_metric(labels, run.ledger.restores)
            counters["lost_steps"].add_metric(labels, run.ledger.lost_steps)
            phase.add_metric((*labels, run.phase.value), 1)
            for found in run.conditions:
                if found.type != condition.READY and found.status == "True":
                    trouble.add_metric((*labels, found.type), 1)
        self._whys.keep(live.values())
        yield from gauges.values()
        yield from counters.values()
        yield phase
        yield trouble
        yield interruptions
        yield decision
        yield total


def _ranks(gauges: Mapping[str, GaugeMetricFamily], labels: tuple[str, str], run: Run) -> None:
    progress = run.progress
    if progress.world_size:
        gauges["ranks_expected"].add_metric(labels, progress.world_size)
        gauges["ranks_present"].add_metric(labels, progress.ranks_present)
    if progress.stall_s:
        gauges["stall_seconds"].add_metric(labels, progress.stall_s)
    gauges["lost_samples_share"].add_metric(labels, progress.lost_share)


def _measured(gauges: Mapping[str, GaugeMetricFamily], labels: tuple[str, str], run: Run) -> None:
    found = run.progress.measured
    if found is None:
        return
    for name, value in (
        ("save_cost_seconds", found.cost_s),
        ("save_durable_seconds", found.durable_s),
        ("step_seconds", found.step_s),
        ("restore_seconds", found.restore_s),
    ):
        if value:
            gauges[name].add_metric(labels, value)
