"""Server certificate, read from files and replaced atomically while serving.

The server listens with one front context. In every handshake its server-name callback (which OpenSSL also runs for
clients without a server name) switches the connection to the newest *complete* certificate. A missing, partly written
or mismatched file keeps the previous certificate. Existing connections keep theirs.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge

RELOAD_S = 1.0
"""Interval in seconds at which the files are read."""
_log = structlog.get_logger("deltashard.certificate")


class Certificate:
    """Certificate in a directory (`tls.crt`, `tls.key`), as mounted from a Secret. `watch` it as a task."""

    def __init__(self, directory: Path, server: str, registry: CollectorRegistry) -> None:
        """`server`: name of the server in the metric names."""
        self._directory = directory
        self._not_after = Gauge(
            f"deltashard_{server}_certificate_not_after_timestamp_seconds",
            "End of the serving certificate's validity, Unix time",
            registry=registry,
        )
        self._loads = Counter(
            f"deltashard_{server}_certificate_loads",
            "Certificates loaded, by outcome (loaded, failed)",
            ("outcome",),
            registry=registry,
        )
        self.loaded: ssl.SSLContext | None = None
        self._content: list[bytes] = []
        self.front = _context()
        self.front.sni_callback = self._serve

    def reload(self) -> None:
        """Load changed files. Invalid files are counted and logged, and the previous certificate stays in use."""
        context = _context()
        try:
            content = [(self._directory / name).read_bytes() for name in ("tls.crt", "tls.key")]
            if content == self._content:
                return
            with _in_memory(content[0]) as certificate, _in_memory(content[1]) as key:
                context.load_cert_chain(certificate, key)
            not_after_s = x509.load_pem_x509_certificate(content[0]).not_valid_after_utc.timestamp()
        except (OSError, ValueError) as error:  # includes OpenSSL's errors
            self._loads.labels("failed").inc()
            _log.warning("certificate.unusable", directory=str(self._directory), error=str(error))
            return
        self.loaded, self._content = context, content
        self._not_after.set(not_after_s)
        self._loads.labels("loaded").inc()
        _log.info("certificate.loaded", not_after_s=not_after_s)

    async def watch(self) -> None:
        while True:
            self.reload()
            await asyncio.sleep(RELOAD_S)

    def _serve(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _front: object
    ) -> int | None:
        if self.loaded is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self.loaded
        return None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield a path to these bytes in memory: OpenSSL accepts only paths, and the key must not be written to a disk."""
    fd = os.memfd_create("deltashard-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as out:
            out.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
