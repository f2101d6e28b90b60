"""Prometheus metrics of the controller: its own work, and one set of gauges for each run that is not finished.

What is said of runs is read from them at the scrape, so a finished run's series end with it and nothing is kept twice.
They carry the workload's name and no UID: one that is created again under its name goes on with the series. Of two
workloads of one name (a Job and a pod, say) that train at one time, the second is called like its CheckpointRun.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
WRITES = ("written", "conflict", "lost", "failed")
HANDLERS = ("jobs", "pods", "nodes", "policies", "cluster policies", "runs", "requests")


class ControllerMetrics:
    """Every metric of the controller; labels of its own work are closed sets."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        build = Gauge(
            "deltashard_build_info", "Always 1; what runs here", ("version", "component"), registry=r
        )
        build.labels(VERSION, "controller").set(1)

        def counter(name: str, text: str, **labels: Sequence[str]) -> Counter:
            """`labels` with their values."""
            made = Counter(f"deltashard_controller_{name}", text, tuple(labels), registry=r)
            for values in itertools.product(*labels.values()) if labels else ():
                made.labels(*values)
            return made

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"deltashard_controller_{name}", text, registry=r)

        self.calls = counter("api_calls", "Answers of the API", verb=call.VERBS, outcome=call.OUTCOMES)
        self.leading = gauge("leading", "1 when it may write, 0 when another controller leads")
        self.writes = counter(
            "status_writes", "Statuses of runs and policies written, by outcome", outcome=WRITES
        )
        self.write_seconds = Histogram(
            "deltashard_controller_status_write_seconds", "Time to write one", registry=r
        )
        self.queue = gauge("queue", "Writes that are due or under way")
        self.events = counter("events", "Kubernetes Events, by outcome", outcome=event.OUTCOMES)
        self.events_waiting = gauge("events_waiting", "Events to be told")
        self.handled = counter("watch_events", "Events of watches, by resource", resource=HANDLERS)
        self.handler_errors = counter(
            "watch_event_errors", "Events of watches that could not be understood", resource=HANDLERS
        )
        self.watch_restarts = counter("watch_restarts", "Times a watch began, by resource", resource=HANDLERS)
        self.kopf_restarts = counter("watcher_failures", "Times all watches failed and began anew")
        self.watch_age = gauge("watch_age_seconds", "Since the least fresh watch brought anything")
        self.loop_lag = gauge("loop_lag_seconds", "How late the loop was, at worst of a minute")
        self.sweeps = counter("sweeps", "Looks for what went unseen")
        self.removed = counter("runs_removed", "CheckpointRuns removed")
        self.reclaims = counter(
            "reclaims",
            "Removals of finished runs' bytes that came to an end, by state",
            outcome=("removed", "kept", "failed"),
        )
        self.directives = counter("directives", "Directives given")
        self.judge_errors = counter("judge_errors", "Runs that could not be read or judged: a fault of ours")
        self.undecided = counter("undecided", "Policies that could not be read for a run")
        self.node_failures = Counter(
            "deltashard_node_failures",
            "Interruptions of training, by the node whose pod was lost; not those of a crash loop",
            ("node",),
            registry=r,
        )

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

    def follow(self, runs: Callable[[], Iterable[Run]]) -> None:
        """Say what there is to say of these runs at every scrape."""
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


_GAUGES = (
    (
        "last_commit_timestamp_seconds",
        "progress.last_commit_at_s",
        "When the newest checkpoint was committed",
    ),
    ("last_committed_step", "progress.last_step", "Training step of the newest checkpoint"),
    ("step", "progress.step", "Training step reached"),
    ("ranks_expected", "progress.world_size", "Ranks of the newest attempt"),
    ("ranks_present", "progress.ranks_present", "Ranks that are attached to a sidecar which is heard"),
    ("stall_seconds", "progress.stall_s", "The longest that a rank stood still for the newest checkpoint"),
    ("lost_samples_share", "progress.lost_share", "Portion of samples lost by partial recoveries"),
    ("interval_seconds", "progress.policy.every_s", "Between checkpoints; 0: off"),
    ("stored_bytes", "progress.stored_bytes", "Size in the store"),
    ("save_cost_seconds", "progress.measured.cost_s", "Training time that a save costs, as measured"),
    (
        "save_durable_seconds",
        "progress.measured.durable_s",
        "From a save's begin until durable, 95 of 100 times",
    ),
    ("step_seconds", "progress.measured.step_s", "Training time of a step, as measured"),
    ("restore_seconds", "progress.measured.restore_s", "From open to the first step, as measured"),
    ("training_since_timestamp_seconds", "trains_since_s", "Since when steps are made, Unix time"),
)
"""(name, attribute of the run, help); absent while it is 0, but for those in `_ALWAYS`."""
_ALWAYS = frozenset({"step", "ranks_present", "lost_samples_share", "interval_seconds", "stored_bytes"})
_COUNTERS = (
    ("failures", "failures", "Interruptions of training that nobody wanted"),
    ("restores", "ledger.restores", "Restores"),
    ("lost_steps", "ledger.lost_steps", "Steps trained again after restores"),
    ("trained_seconds", "trained_s", "Time in phases that train"),
)


def _families(live: Mapping[tuple[str, str], Run]) -> Iterable[Metric]:
    """What is a number of each run."""
    for name, path, text in _GAUGES + _COUNTERS:
        counts = (name, path, text) in _COUNTERS
        family = (CounterMetricFamily if counts else GaugeMetricFamily)(
            f"deltashard_run_{name}", text, labels=LABELS
        )
        for labels, run in live.items():
            value: Any = run
            for attribute in path.split("."):
                value = getattr(value, attribute, 0)  # not measured yet
            if value or counts or name in _ALWAYS:
                family.add_metric(labels, value)
        yield family


class _OfRuns(Collector):
    def __init__(self, runs: Callable[[], Iterable[Run]]) -> None:
        self._runs = runs
        self._whys = Whys()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        by_phase = dict.fromkeys(Phase, 0)
        live: dict[tuple[str, str], Run] = {}
        for run in self._runs():
            by_phase[run.phase] += 1
            if not run.finished:
                mine = run.workload.namespace, run.workload.name
                live[mine if mine not in live else (run.workload.namespace, run.name)] = run
        phase = GaugeMetricFamily(
            "deltashard_run_phase", "1 for the phase it is in", labels=(*LABELS, "phase")
        )
        trouble = GaugeMetricFamily(
            "deltashard_run_condition", "1 for each trouble it has", labels=(*LABELS, "condition")
        )
        interruptions = CounterMetricFamily(
            "deltashard_run_interruptions",
            "Interruptions after which training was opened again, a crash loop once",
            labels=(*LABELS, "cause"),
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
            for cause, n in run.ledger.causes.items():
                interruptions.add_metric((*labels, cause), n)
            for made in run.progress.decisions:
                reachable = str(not made.unreachable).lower()
                why = self._whys.of(run, made)
                decision.add_metric(
                    (*labels, made.subject, made.goal, reachable, made.value, made.would, why), 1
                )
            phase.add_metric((*labels, run.phase.value), 1)
            for found in run.conditions:
                if found.type != condition.READY and found.status == "True":
                    trouble.add_metric((*labels, found.type), 1)
        self._whys.keep(live.values())
        yield from _families(live)
        yield phase
        yield trouble
        yield interruptions
        yield decision
        yield total
