"""The sidecar's Prometheus metrics, and the port that serves them and accepts nudges.

Labels are few and bounded: block uses, causes, sources and directions are closed sets. A run of many pods is cheap for
Prometheus: a labelled series begins with its first event, and only rank 0's sidecar serves the run's metrics.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from deltashard_checkpoint.process import usable_host, version
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

STALL_BUCKETS = (0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
SECONDS_BUCKETS = (0.5, 2.5, 10.0, 30.0, 60.0, 180.0, 600.0)
_SERVED_BY_EVERY_POD = re.compile(
    "deltashard_(build_info|commits|fleet_(connected|report_failures)|(raw|frame|cache)_bytes|restores|rows|save_failures)"
)
"""Families that every sidecar of a run serves, in addition to its trainers' steps and its own processor time."""
NUDGE_PATH = "/v1/report"
"""Path for the controller's request for a report. It needs no authentication: the report itself is authenticated."""
CPU_STAT = Path("/sys/fs/cgroup/cpu.stat")


class Metrics(Collector):
    """All metrics of the sidecar, as attributes; its collector yields those to serve."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.has_rank0 = False
        """Whether rank 0 of a run has ever been attached."""
        self.nudged: Callable[[], None] = lambda: None
        """Called on a `POST` to `NUDGE_PATH`."""
        self.steps: Callable[[], Mapping[tuple[str, int], int]] = dict
        """Returns the attached trainers' steps by (run, rank)."""

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"deltashard_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"deltashard_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Any = SECONDS_BUCKETS) -> Histogram:
            return Histogram(f"deltashard_{name}", text, labels, registry=self.registry, buckets=buckets)

        build = gauge("build_info", "Always 1; version and component of this process", "version", "component")
        build.labels(version(), "sidecar").set(1)
        self.last_commit = gauge(
            "last_commit_timestamp_seconds", "Unix time of the newest commit, or of the one resumed from"
        )
        self.last_step = gauge("last_committed_step", "Training step of the newest commit")
        self.lost_samples = gauge(
            "lost_samples_share",
            "Portion of lost samples (PLS) of the run in its newest commit; above 0 after a partial recovery",
        )
        self.stall = histogram(
            "save_stall_seconds", "Time that a save blocked the trainer", buckets=STALL_BUCKETS
        )
        self.durable = histogram("save_durable_seconds", "Time from the start of a save to its log entry")
        self.commits = counter("commits", "Checkpoints committed, by kind (baseline, delta)", "kind")
        self.failures = counter("save_failures", "Saves that failed, by cause", "cause")
        self.skipped = counter(
            "saves_skipped", "Due saves skipped during another save: the interval is too short"
        )
        self.blocked = gauge(
            "save_blocked_seconds",
            "Time for which a due save has been blocked, as the trainer reports; 0: none",
        )
        self.tracking_faults = counter(
            "tracking_faults", "Tables in which trainers found rows that changed without a mark"
        )
        self.rows = counter("rows", "Rows encoded (in) and sent to a trainer (out)", "direction", "encoding")
        self.raw_bytes = counter("raw_bytes", "Bytes of batches before encoding", "encoding")
        self.frame_bytes = counter(
            "frame_bytes",
            "Bytes of frames written (in) and sent to a trainer (out)",
            "direction",
            "encoding",
        )
        self.blocks = gauge("arena_blocks", "Blocks of the arena, by use", "use")
        self.spooled = gauge("cache_bytes", "Bytes in the cache directory")
        self.restores = counter(
            "restores", "Restores served, by outcome: done, or the cause of the failure", "outcome"
        )
        self.restore_seconds = histogram(
            "restore_seconds", "Duration of a restore, by the source of most bytes (cache, store)", "source"
        )
        self.retries = counter("store_retries", "Failed store requests that may be retried")
        self.log_damaged = counter(
            "log_damaged",
            "Attempts opened on a commit log that could not be read to its end: newer commits may be lost",
        )
        self.chain_broken = counter(
            "chain_broken", "Checks of the newest checkpoint's objects that found some missing"
        )
        self.maintenance = counter(
            "maintenance",
            "Maintenance tasks (compact, chain_check, retire, gc, sweep), by outcome (done, nothing, failed)",
            "task",
            "outcome",
        )
        self.compactions = counter(
            "compactions",
            "Chains compacted, by why (deferred: a snapshot built on a synthetic baseline; length: too many deltas)",
            "why",
        )
        self.fleet_connected = gauge(
            "fleet_connected",
            "1 while the controller accepts this sidecar's reports; saves and restores do not depend on it",
        )
        self.fleet_report_failures = counter(
            "fleet_report_failures",
            "Reports that the controller did not accept, by cause (token, verification, unreachable, unauthenticated, "
            "denied, unknown_pod, not_leading, busy, protocol, other)",
            "cause",
        )
        self.incidents_dropped = counter(
            "incidents_dropped", "Incidents dropped before the controller acknowledged them"
        )
        self.interval = gauge(
            "interval_seconds",
            "Save interval: effective (in force), and chosen (for the goal; without a goal for auto)",
            "which",
        )
        self.cost = gauge("save_cost_seconds", "Mean measured cost of a save in trainer seconds")
        self.mtbf = gauge(
            "lossy_failure_mtbf_seconds", "Estimated training seconds between failures that lose steps"
        )
        self.decided = counter(
            "intervals_decided",
            "Changes of the chosen interval, by cause (measured, cost, failures, durable, policy)",
            "cause",
        )

    def watch_blocks(self, counts: Callable[[], dict[str, int]], uses: Iterable[str]) -> None:
        for use in uses:
            self.blocks.labels(use).set_function(lambda use=use: counts()[use])  # type: ignore[misc]

    def record_lost_samples(self, pls: str) -> None:
        """Set the PLS of a commit's metadata; invalid numbers, which this product does not write, are ignored."""
        with contextlib.suppress(ValueError):
            self.lost_samples.set(float(pls))

    def resumed(self, *, step: int, at_s: float) -> None:
        """Record the checkpoint a trainer resumes from, committed at `at_s` (Unix seconds, by its writer's clock)."""
        self.last_commit.set(at_s)
        self.last_step.set(step)

    def committed(self, *, step: int, baseline: bool, durable_s: float) -> None:
        self.resumed(step=step, at_s=time.time())
        self.durable.observe(durable_s)
        self.commits.labels("baseline" if baseline else "delta").inc()

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            if self.has_rank0 or _SERVED_BY_EVERY_POD.fullmatch(family.name):
                yield family
        steps = GaugeMetricFamily(
            "deltashard_trainer_step", "Last step that a trainer finished", labels=("run", "rank")
        )
        for (run, rank), step in self.steps().items():
            steps.add_metric((run, str(rank)), step)
        yield steps
        with contextlib.suppress(OSError):
            if throttled := re.search(r"^throttled_usec (\d+)$", CPU_STAT.read_text(), re.MULTILINE):
                yield CounterMetricFamily(
                    "deltashard_sidecar_cpu_throttled_seconds",
                    "Time that the container's CPU limit throttled threads, summed over threads",
                    value=int(throttled[1]) / 1e6,
                )

    def serve(self, host: str, port: int) -> WSGIServer:
        """Serve `/metrics` (port 0 picks one) and nudges; raises `OSError` if the port is not available."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        page = CollectorRegistry()
        page.register(self)
        server = start_http_server(port, addr=usable_host(host), registry=page)[0]
        metrics = server.get_app()
        assert metrics is not None

        def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            if (environ["REQUEST_METHOD"], environ["PATH_INFO"]) != ("POST", NUDGE_PATH):
                return metrics(environ, start)
            self.nudged()
            start("202 Accepted", [("Content-Length", "0")])
            return ()

        server.set_app(answer)
        return server
