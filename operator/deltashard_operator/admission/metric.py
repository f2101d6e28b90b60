"""Prometheus metrics of the webhook. All label values are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from deltashard_operator import VERSION
from deltashard_operator.api.refusal import CODES

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class WebhookMetrics:
    """Metrics of the webhook in their own registry."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        build = Gauge(
            "deltashard_build_info", "Always 1; the running version", ("version", "component"), registry=r
        )
        build.labels(VERSION, "webhook").set(1)
        self.admissions = Counter(
            "deltashard_webhook_admissions",
            "Admissions answered, by kind and by outcome (injected, unchanged, a refusal's code, failed)",
            ("kind", "outcome"),
            registry=r,
        )
        self.seconds = Histogram(
            "deltashard_webhook_admission_seconds",
            "Time to answer an admission",
            buckets=_BUCKETS,
            registry=r,
        )
        self.holder_unknown = Counter(
            "deltashard_webhook_holders_unknown",
            "Workloads admitted while the run's holder was unknown",
            registry=r,
        )
        self.ready = Gauge("deltashard_webhook_ready", "1 when admissions can be answered", registry=r)
        for kind in ("Job", "JobSet", "Pod", "PyTorchJob", "other"):
            for outcome in ("injected", "unchanged", "failed", *CODES):
                self.admissions.labels(kind, outcome)
