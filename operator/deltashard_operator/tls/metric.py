"""Prometheus metrics of the controller's certificate issuer: labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

CERTIFICATES = ("webhook", "fleet", "fleet_authority")
AUTHORITY_CAUSES = ("missing", "forbidden", "conflict", "unavailable", "other")


class AuthorityMetrics:
    """Every metric of the issuer, in the given registry, else in one of its own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = CollectorRegistry() if registry is None else registry
        self.not_after = Gauge(
            "deltashard_authority_not_after_timestamp_seconds",
            "End of the validity of what is stored, Unix time",
            ("certificate",),
            registry=r,
        )
        self.issued = Counter(
            "deltashard_authority_issued", "Certificates issued", ("certificate",), registry=r
        )
        self.published = Counter(
            "deltashard_authority_bundles_published", "Bundles written", ("bundle",), registry=r
        )
        self.failures = Counter(
            "deltashard_authority_failures", "Looks that failed, by cause", ("cause",), registry=r
        )
        self.checked = Gauge(
            "deltashard_authority_checked_timestamp_seconds",
            "When all was last found in order or on its way, Unix time",
            ("bundle",),
            registry=r,
        )
        for certificate in CERTIFICATES:
            self.issued.labels(certificate)
        for bundle in ("webhook", "fleet"):
            self.published.labels(bundle)
        for cause in AUTHORITY_CAUSES:
            self.failures.labels(cause)
