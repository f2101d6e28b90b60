"""Prometheus metrics of the controller: its own work, and one set of gauges per unfinished run.

Run metrics are read from the runs at the scrape, so the series end with the run. They are labeled with the workload's
name without a UID: a workload recreated under the same name continues the series. If two workloads with the same name
(e.g. a Job and a pod) train at the same time, the second has the name of its CheckpointRun.
"""

from __future__ import annotations

import itertools
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltashard_operator import VERSION
from deltashard_operator.controller import write_queue
from deltashard_operator.kube import call
from deltashard_operator.run import condition
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import WatchedRun

EVENT_OUTCOMES = ("recorded", "duplicate", "rate_limited", "refused", "dropped")


class ControllerMetrics:
    """Metrics of the controller. The label values of its work are closed sets."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        build = Gauge(
            "deltashard_build_info", "Always 1; the running version", ("version", "component"), registry=r
        )
        build.labels(VERSION, "controller").set(1)

        def counter(name: str, text: str, **labels: Sequence[str]) -> Counter:
            """`labels`: label names with all their values."""
            made = Counter(f"deltashard_controller_{name}", text, tuple(labels), registry=r)
            for values in itertools.product(*labels.values()) if labels else ():
                made.labels(*values)
            return made

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"deltashard_controller_{name}", text, registry=r)

        self.calls = counter("api_calls", "Responses of the API", verb=call.VERBS, outcome=call.OUTCOMES)
        self.leading = gauge("leading", "1 while this controller leads and may write")
        self.writes = counter("writes", "Writes, by outcome", outcome=write_queue.OUTCOMES)
        self.queue = gauge("queue", "Writes that are due or in flight")
        self.events = counter("events", "Kubernetes Events, by outcome", outcome=EVENT_OUTCOMES)
        self.watched = Counter(
            "deltashard_controller_watch_events",
            "Events of watches (handled, handler_failed) and watches that failed and were restarted (failed)",
            ("outcome", "resource"),
            registry=r,
        )
        self.watch_age = gauge("watch_age_seconds", "Time since the stalest watch received anything")
        self.loop_lag = gauge("loop_lag_seconds", "Maximum lag of the event loop in the last minute")
        self.reclaims = counter(
            "reclaims",
            "Finished removals of runs' bytes, by state",
            outcome=("removed", "kept", "failed"),
        )
        self.reconcile_errors = counter(
            "reconcile_errors", "Internal errors while reading or reconciling a run"
        )

    def register_runs(self, runs: Callable[[], Iterable[WatchedRun]]) -> None:
        self.registry.register(_RunCollector(runs))


class _RunCollector(Collector):
    def __init__(self, runs: Callable[[], Iterable[WatchedRun]]) -> None:
        self._runs = runs

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        total = GaugeMetricFamily("deltashard_runs", "Runs, by phase", labels=("phase",))
        phases = Counts(run.phase for run in self._runs())
        for phase in Phase:
            total.add_metric((phase.value,), phases[phase])
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {"": total}
        names: set[tuple[str, str]] = set()
        for run in self._runs():
            if run.finished:
                continue
            mine = run.workload.namespace, run.workload.name
            mine = mine if mine not in names else (run.workload.namespace, run.name)
            names.add(mine)
            for name, text, labels, value in _run_samples(run):
                if name not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[name] = kind(
                        f"deltashard_run_{name}", text, labels=("namespace", "run", *labels)
                    )
                families[name].add_metric((*mine, *labels.values()), value)
        yield from families.values()


def _run_samples(run: WatchedRun) -> Iterator[tuple[str, str, Mapping[str, str], float]]:
    """Yield (name, help, labels, value) for a run. Unknown values are 0 and omitted."""
    now, measured = run.progress, run.progress.measured
    yield "phase", "1 for the current phase", {"phase": run.phase.value}, 1
    for trouble in run.conditions:
        if trouble.type != condition.READY and trouble.status == "True":
            yield "condition", "1 for each condition with a problem", {"condition": trouble.type}, 1
    for each in now.decisions:
        decision = {
            "subject": each.subject,
            "goal": each.goal,
            "reachable": str(not each.unreachable).lower(),
        }
        decision |= {"value": each.value, "proposed": each.proposed}
        yield "decision_info", "1 for each decision of the run", decision, 1
    yield "failures_total", "How often training stopped and was opened again", {}, run.ledger.failures
    yield "restores_total", "Restores", {}, run.ledger.restores
    yield "lost_steps_total", "Steps trained again after restores", {}, run.ledger.lost_steps
    yield "trained_seconds_total", "Time in phases that train", {}, run.trained_s
    yield "step", "Training step reached", {}, now.step
    yield "interval_seconds", "Interval between checkpoints; 0: off", {}, now.policy.every_s
    yield "stored_bytes", "Size in the store", {}, now.stored_bytes
    for name, text, value in (
        ("last_commit_timestamp_seconds", "When the newest checkpoint was committed", now.last_commit_at_s),
        ("last_committed_step", "Training step of the newest checkpoint", now.last_step),
        ("save_cost_seconds", "Training time that a save costs", measured.cost_s if measured else 0),
        ("step_seconds", "Training time of a step", measured.step_s if measured else 0),
        (
            "training_since_timestamp_seconds",
            "Start of the current training period, Unix time",
            run.training_since_s,
        ),
    ):
        if value:
            yield name, text, {}, value
