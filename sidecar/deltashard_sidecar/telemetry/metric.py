"""Prometheus metrics of one sidecar: names and units by convention, prefix `deltashard_`, one registry per process.

No label grows without bound: encodings, block uses, causes, sources and directions are closed sets. A run of many pods
costs Prometheus little: a series with labels begins with its first event, and what is said of the run is served by the
sidecar of its rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
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
OF_EVERY_POD = frozenset(
    f"deltashard_{name}"
    for name in (
        "build_info",
        "numpy_kernels",
        "fleet_connected",
        "fleet_refusals",
        "commits",
        "save_failures",
        "restores",
        "rows",
        "raw_bytes",
        "frame_bytes",
        "cache_bytes",
    )
)
"""Families that every sidecar of a run serves, beside its trainers' steps and its own processor time."""
NUDGE_PATH = "/v1/report"
"""Where the controller asks for a report. It carries no authority: the report says who it is, and is answered."""
CPU_STAT = Path("/sys/fs/cgroup/cpu.stat")


class Metrics(Collector):
    """Every metric of the sidecar, by attribute; it collects what is served of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leads = False
        """Whether rank 0 of a run was ever attached here."""
        self.nudged: Callable[[], None] = lambda: None
        """What a `POST` to `NUDGE_PATH` calls."""
        self._steps: Callable[[], Mapping[tuple[str, int], int]] = dict
        gauge = functools.partial(Gauge, registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        build = gauge("deltashard_build_info", "Always 1; what runs here", ("version", "component"))
        build.labels(version(), "sidecar").set(1)
        self.last_commit = gauge(
            "deltashard_last_commit_timestamp_seconds",
            "Unix time of the newest commit, one resumed from included; 0 before",
        )
        self.last_step = gauge("deltashard_last_committed_step", "Training step of the newest commit")
        self.lost_samples = gauge(
            "deltashard_lost_samples_share",
            "Portion of lost samples (PLS) of the run, as its newest commit says; 0 unless a recovery was partial",
        )
        self.stall = histogram(
            "deltashard_save_stall_seconds", "Time a cut held the trainer", buckets=STALL_BUCKETS
        )
        self.copied_rows = counter(
            "deltashard_rows_copied",
            "Rows of cuts copied ahead while training went on, of these copied again at the cut, and copied only then",
            ("when",),
        )
        self.slowdown = counter(
            "deltashard_training_slowdown_seconds",
            "By so much steps took longer while rows were copied ahead of a cut",
        )
        self.durable = histogram(
            "deltashard_save_durable_seconds", "From begin to the log entry", buckets=SECONDS_BUCKETS
        )
        self.commits = counter("deltashard_commits", "Checkpoints committed", ("kind",))
        self.failures = counter("deltashard_save_failures", "Saves that failed, by cause", ("cause",))
        self.skipped = counter("deltashard_saves_skipped", "Due saves skipped under a running one")
        self.blocked = gauge(
            "deltashard_save_blocked_seconds",
            "For how long a save has been due and was blocked, as the trainer warns of it; 0: none is",
        )
        self.tracking_faults = counter(
            "deltashard_tracking_faults",
            "Tables and snapshots in which trainers found rows that changed without a mark",
        )
        self.rows = counter(
            "deltashard_rows", "Rows encoded (in) and handed to a trainer (out)", ("direction", "encoding")
        )
        self.raw_bytes = counter("deltashard_raw_bytes", "Bytes of batches before encoding", ("encoding",))
        self.frame_bytes = counter(
            "deltashard_frame_bytes",
            "Bytes of frames written (in) and handed to a trainer (out)",
            ("direction", "encoding"),
        )
        self.blocks = gauge("deltashard_arena_blocks", "Blocks of the arena by use", ("use",))
        self.numpy_kernels = gauge(
            "deltashard_numpy_kernels", "1: rows are encoded by numpy, slowly; 0: by native kernels"
        )
        self.queue = gauge("deltashard_encode_queue_batches", "Batches handed over and not yet encoded")
        self.spooled = gauge("deltashard_cache_bytes", "Bytes in the cache directory")
        self.restores = counter("deltashard_restores", "Restores served, by outcome", ("outcome",))
        self.restore_seconds = histogram(
            "deltashard_restore_seconds",
            "Seconds a restore took, by where most of its bytes came from",
            ("source",),
            buckets=SECONDS_BUCKETS,
        )
        self.restore_bytes = counter("deltashard_restore_bytes", "Bytes restored, by source", ("source",))
        self.retries = counter(
            "deltashard_store_retries", "Attempts on the store that failed and may be retried"
        )
        self.log_damaged = counter(
            "deltashard_log_damaged",
            "Attempts opened on a commit log that could not be followed to its end: commits may be lost",
        )
        self.chain_broken = counter(
            "deltashard_chain_broken",
            "Looks at what the newest checkpoint is read from that found objects missing: the next save is a baseline",
        )
        self.housekeeping = counter(
            "deltashard_housekeeping", "Rounds of retention, gc and compaction", ("task", "outcome")
        )
        self.turns = counter(
            "deltashard_cuts_turned",
            "Cuts that built on a synthetic baseline, or were a baseline for more bits, by why",
            ("why",),
        )
        self.compactions = counter("deltashard_compactions", "Chains compacted, by why", ("why",))
        self.fleet_connected = gauge(
            "deltashard_fleet_connected", "Whether the controller took this sidecar's last report"
        )
        self.fleet_refusals = counter(
            "deltashard_fleet_refusals",
            "Reports that the controller did not take, by cause",
            ("cause",),
        )
        self.directives = counter(
            "deltashard_directives_applied", "Directives of the controller that came into force"
        )
        self.incidents_dropped = counter(
            "deltashard_incidents_dropped", "Incidents that went before the controller had taken them"
        )
        self.interval = gauge(
            "deltashard_interval_seconds",
            "Save interval in force (0: none by time) and as the decider would have it (0: it has none)",
            ("which",),
        )
        self.cost = gauge(
            "deltashard_save_cost_seconds", "Trainer seconds that a save costs, the mean as measured"
        )
        self.mtbf = gauge(
            "deltashard_lossy_failure_mtbf_seconds",
            "Trained seconds between failures that lose steps, as believed",
        )
        self.trained = counter("deltashard_trained_seconds", "Seconds that trainers of rank 0 trained")
        self.decided = counter(
            "deltashard_intervals_decided", "Intervals chosen, by what had changed", ("cause",)
        )

    def watch_blocks(self, counts: Callable[[], dict[str, int]], uses: Iterable[str]) -> None:
        for use in uses:
            self.blocks.labels(use).set_function(lambda use=use: counts()[use])  # type: ignore[misc]

    def watch_steps(self, steps: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        """`steps` gives those of the trainers that train here, by run and rank."""
        self._steps = steps

    def copied(self, *, rows: int, ahead: int, again: int, slower_s: float) -> None:
        """A cut of `rows` was handed over; what a trainer says is bounded by what it can be."""
        ahead = min(ahead, rows)
        self.copied_rows.labels("ahead").inc(ahead)
        self.copied_rows.labels("again").inc(min(again, ahead))
        self.copied_rows.labels("held").inc(rows - ahead)
        if math.isfinite(slower_s) and slower_s > 0:
            self.slowdown.inc(slower_s)

    def lost(self, said: str) -> None:
        """The PLS that a commit says of its run; what is no number was not ours."""
        with contextlib.suppress(ValueError):
            self.lost_samples.set(float(said))

    def resumed(self, *, step: int, at_s: float) -> None:
        """A trainer goes on from a checkpoint committed at `at_s` (Unix seconds, by its writer's clock)."""
        self.last_commit.set(at_s)
        self.last_step.set(step)

    def committed(self, *, step: int, baseline: bool, durable_s: float) -> None:
        self.last_commit.set(time.time())
        self.last_step.set(step)
        self.durable.observe(durable_s)
        self.commits.labels("baseline" if baseline else "delta").inc()

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            if self.leads or family.name in OF_EVERY_POD:
                yield family
        steps = GaugeMetricFamily(
            "deltashard_trainer_step", "The step that a trainer finished last", labels=("run", "rank")
        )
        for (run, rank), step in self._steps().items():
            steps.add_metric((run, str(rank)), step)
        yield steps
        if (throttled_s := _throttled_s()) is not None:
            yield CounterMetricFamily(
                "deltashard_sidecar_cpu_throttled_seconds",
                "For how long the container's CPU limit held threads up, one after the other",
                value=throttled_s,
            )

    def serve(self, host: str, port: int) -> WSGIServer:
        """Serve `/metrics` (port 0 picks one) and nudges; raises `OSError` where the port cannot be had."""
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


def _throttled_s() -> float | None:
    """Of this container, by its cgroup; None: it has no limit, or does not show it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^throttled_usec (\d+)$", CPU_STAT.read_text(), re.MULTILINE)
        return None if found is None else int(found[1]) / 1e6
    return None
