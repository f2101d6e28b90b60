"""Prometheus metrics of the controller: its own work, and one set of gauges for each run that is not finished.

What is said of runs is read from them at the scrape, so a finished run's series end with it and nothing is kept twice.
They carry the workload's name and no UID: one that is created again under its name goes on with the series. Of two
workloads of one name (a Job and a pod, say) that train at one time, the second is called like its CheckpointRun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltashard_operator import VERSION
from deltashard_operator.controller import event, write_queue
from deltashard_operator.kube import call
from deltashard_operator.run import condition
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import Run

LABELS = ("namespace", "run")


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
        self.writes = counter("writes", "What was written, by outcome", outcome=write_queue.OUTCOMES)
        self.queue = gauge("queue", "Writes that are due or under way")
        self.events = counter("events", "Kubernetes Events, by outcome", outcome=event.OUTCOMES)
        self.watched = Counter(
            "deltashard_controller_watch_events",
            "Events of watches (told, not_understood) and watches that failed and begin anew (failed)",
            ("outcome", "resource"),
            registry=r,
        )
        self.watch_age = gauge("watch_age_seconds", "Since the least fresh watch brought anything")
        self.loop_lag = gauge("loop_lag_seconds", "How late the loop was, at worst of a minute")
        self.reclaims = counter(
            "reclaims",
            "Removals of finished runs' bytes that came to an end, by state",
            outcome=("removed", "kept", "failed"),
        )
        self.judge_errors = counter("judge_errors", "Runs that could not be read or judged: a fault of ours")
        self.undecided = counter("undecided", "Policies that could not be read for a run")
        self.node_failures = Counter(
            "deltashard_node_failures",
            "Interruptions of training, by the node whose pod was lost; not those of a crash loop",
            ("node",),
            registry=r,
        )

    def follow(self, runs: Callable[[], Iterable[Run]]) -> None:
        """Say what there is to say of these runs at every scrape."""
        self.registry.register(_OfRuns(runs))


_NUMBERS = (
    (
        "last_commit_timestamp_seconds",
        "progress.last_commit_at_s",
        "When the newest checkpoint was committed",
    ),
    ("last_committed_step", "progress.last_step", "Training step of the newest checkpoint"),
    ("step", "progress.step", "Training step reached"),
    ("interval_seconds", "progress.policy.every_s", "Between checkpoints; 0: off"),
    ("stored_bytes", "progress.stored_bytes", "Size in the store"),
    ("save_cost_seconds", "progress.measured.cost_s", "Training time that a save costs, as measured"),
    ("step_seconds", "progress.measured.step_s", "Training time of a step, as measured"),
    ("training_since_timestamp_seconds", "trains_since_s", "Since when steps are made, Unix time"),
    ("failures_total", "failures", "Interruptions of training that nobody wanted"),
    ("restores_total", "ledger.restores", "Restores"),
    ("lost_steps_total", "ledger.lost_steps", "Steps trained again after restores"),
    ("trained_seconds_total", "trained_s", "Time in phases that train"),
)
"""(name, attribute of the run, help). A gauge is absent while it is 0, but for those in `_ALWAYS`."""
_ALWAYS = frozenset({"step", "interval_seconds", "stored_bytes"})


class _OfRuns(Collector):
    def __init__(self, runs: Callable[[], Iterable[Run]]) -> None:
        self._runs = runs

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
        total = GaugeMetricFamily("deltashard_runs", "Runs, by phase", labels=("phase",))
        for each, n in by_phase.items():
            total.add_metric((each.value,), n)
        yield total
        for name, path, text in _NUMBERS:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"deltashard_run_{name}", text, labels=LABELS)
            for labels, run in live.items():
                value: Any = run
                for attribute in path.split("."):
                    value = getattr(value, attribute, 0)  # not measured yet
                if value or name in _ALWAYS or kind is CounterMetricFamily:
                    family.add_metric(labels, value)
            yield family
        yield from _labelled(live)


def _labelled(live: dict[tuple[str, str], Run]) -> Iterable[Metric]:
    """What a run has by name: phase, troubles, causes, decisions."""
    phase = GaugeMetricFamily("deltashard_run_phase", "1 for the phase it is in", labels=(*LABELS, "phase"))
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
        "1 for each decision of the run",
        labels=(*LABELS, "subject", "goal", "reachable", "value", "would"),
    )
    for labels, run in live.items():
        phase.add_metric((*labels, run.phase.value), 1)
        for found in run.conditions:
            if found.type != condition.READY and found.status == "True":
                trouble.add_metric((*labels, found.type), 1)
        for cause, n in run.ledger.causes.items():
            interruptions.add_metric((*labels, cause), n)
        for made in run.progress.decisions:
            reachable = str(not made.unreachable).lower()
            decision.add_metric((*labels, made.subject, made.goal, reachable, made.value, made.would), 1)
    return phase, trouble, interruptions, decision
