"""Prometheus metrics of the webhook: labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from deltashard_operator import VERSION
from deltashard_operator.api.refusal import CODES

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class WebhookMetrics:
    """Every metric of the webhook, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        build = Gauge(
            "deltashard_build_info", "Always 1; what runs here", ("version", "component"), registry=r
        )
        build.labels(VERSION, "webhook").set(1)
        self.admissions = Counter(
            "deltashard_webhook_admissions",
            "Admissions answered, by kind and by outcome (injected, unchanged, a refusal's code, failed)",
            ("kind", "outcome"),
            registry=r,
        )
        self.seconds = Histogram(
            "deltashard_webhook_admission_seconds", "Time to answer one", buckets=_BUCKETS, registry=r
        )
        self.holder_unknown = Counter(
            "deltashard_webhook_holders_unknown", "Admitted without knowing who holds the run", registry=r
        )
        self.ready = Gauge("deltashard_webhook_ready", "1 when admissions can be answered", registry=r)
        for kind in ("Job", "JobSet", "Pod", "PyTorchJob", "other"):
            for outcome in ("injected", "unchanged", "failed", *CODES):
                self.admissions.labels(kind, outcome)
