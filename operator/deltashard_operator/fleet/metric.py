"""Prometheus metrics of the report server. All label values are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deltashard_operator.fleet import token_review

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0, 10.0)


class FleetMetrics:
    """Metrics of the report server and of nudges, in the given registry or a new one."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        self.sidecars = Gauge("deltashard_fleet_sidecars", "Live sidecars", registry=r)
        self.serving = Gauge("deltashard_fleet_serving", "1 while reports are accepted here", registry=r)
        self.seconds = Histogram(
            "deltashard_fleet_report_seconds",
            "Seconds from a report's header to its reply",
            buckets=SECONDS,
            registry=r,
        )

        def outcomes(name: str, text: str, *known: str) -> Counter:
            made = Counter(f"deltashard_fleet_{name}", f"{text}, by outcome", ("outcome",), registry=r)
            for outcome in known:
                made.labels(outcome)
            return made

        self.reports = outcomes("reports", "Reports")
        self.reviews = outcomes("token_reviews", "Token reviews", *token_review.OUTCOMES)
        self.nudges = outcomes("nudges", "Requests to sidecars to report now", "sent", "failed")
