"""Prometheus metrics of certificates: those that a server loads, and those that the controller issues."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

CERTIFICATES = ("authority", "leaf")
CAUSES = ("missing", "forbidden", "conflict", "unavailable", "other")


class CertificateMetrics:
    """Metrics of the certificate that a server (webhook, fleet) loads."""

    def __init__(self, server: str, r: CollectorRegistry) -> None:
        self.not_after = Gauge(
            f"deltashard_{server}_certificate_not_after_timestamp_seconds",
            "End of the serving certificate's validity, Unix time",
            registry=r,
        )
        self.loads = Counter(
            f"deltashard_{server}_certificate_loads",
            "Certificates loaded, by outcome",
            ("outcome",),
            registry=r,
        )
        for outcome in ("loaded", "failed"):
            self.loads.labels(outcome)


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
        self.published = Counter("deltashard_authority_bundles_published", "Bundles written", registry=r)
        self.failures = Counter(
            "deltashard_authority_failures", "Checks that failed, by cause", ("cause",), registry=r
        )
        self.checked = Gauge(
            "deltashard_authority_checked_timestamp_seconds",
            "When all was last found in order or on its way, Unix time",
            registry=r,
        )
        for certificate in CERTIFICATES:
            self.issued.labels(certificate)
        for cause in CAUSES:
            self.failures.labels(cause)
