"""Prometheus metrics of the controller's fleet service: labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from deltashard_operator.fleet import token_review
from deltashard_operator.fleet.sidecar_stream import ENDS, REJECTIONS


class FleetMetrics:
    """Every metric of the service, in the given registry, else in one of its own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        self.streams = Gauge("deltashard_fleet_streams", "Sidecars that are connected", registry=r)
        self.serving = Gauge("deltashard_fleet_serving", "1 when the port is open", registry=r)
        self.accepted = Counter("deltashard_fleet_streams_accepted", "Streams welcomed", registry=r)
        self.refused = Counter(
            "deltashard_fleet_streams_refused", "Streams refused, by cause", ("cause",), registry=r
        )
        self.ended = Counter(
            "deltashard_fleet_streams_ended", "Welcomed streams that ended, by cause", ("cause",), registry=r
        )
        self.heartbeats = Counter("deltashard_fleet_heartbeats", "Heartbeats taken", registry=r)
        self.incidents = Counter(
            "deltashard_fleet_incidents", "Incidents in heartbeats, repeats included", registry=r
        )
        self.reviews = Counter(
            "deltashard_fleet_token_reviews",
            "Answers about tokens, by outcome and by where they came from",
            ("outcome", "source"),
            registry=r,
        )
        self.directives = Counter("deltashard_fleet_directives_sent", "Directives sent", registry=r)
        self.saves = Counter("deltashard_fleet_saves_requested", "Save requests sent", registry=r)
        self.dropped = Counter(
            "deltashard_fleet_messages_dropped",
            "Save requests dropped, because the stream had too many waiting",
            registry=r,
        )
        self.not_after = Gauge(
            "deltashard_fleet_certificate_not_after_timestamp_seconds",
            "End of the serving certificate's validity, Unix time",
            registry=r,
        )
        self.loads = Counter(
            "deltashard_fleet_certificate_loads", "Certificates loaded, by outcome", ("outcome",), registry=r
        )
        for cause in REJECTIONS:
            self.refused.labels(cause)
        for cause in ENDS:
            self.ended.labels(cause)
        for outcome in token_review.OUTCOMES:
            for source in token_review.SOURCES:
                self.reviews.labels(outcome, source)
        for outcome in ("loaded", "failed"):
            self.loads.labels(outcome)

    def reviewed(self, outcome: str, source: str) -> None:
        """Count an answer about a token, as `Reviewer(count=...)` has it."""
        self.reviews.labels(outcome, source).inc()
