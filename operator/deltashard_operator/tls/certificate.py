"""A server's certificate: read from files, replaced while serving, never by halves.

The server listens with one front context that lives as long as the process. At every handshake its server-name
callback (which OpenSSL runs for clients without a server name, too) hands the connection to the newest *whole*
certificate: a context of its own, loaded from copies of both files and checked, key against certificate, before
anyone sees it. A file that is half written, missing or does not fit its partner leaves the old certificate in service
and counts as a failure. Connections that exist keep what they began with. Rotation is safe as long as the bundle the
clients trust holds the authorities of both certificates, which is the issuer's side of the bargain.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.tls import issuance
from deltashard_operator.tls.metric import CertificateMetrics

CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"
RELOAD_S = 1.0
"""Seconds between looks at the files."""
_log = structlog.get_logger("deltashard.certificate")


class CertificateUnusable(EnvironmentFault):
    """The files hold no certificate with its key, or are not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Certificate with its key, whole and checked."""

    context: ssl.SSLContext
    not_after_s: float
    """End of its validity, Unix seconds."""
    content: tuple[bytes, bytes]


class Certificate:
    """The certificate in a directory (`tls.crt`, `tls.key`), as a Secret volume holds it. Not thread-safe."""

    def __init__(self, directory: Path, metrics: CertificateMetrics | None = None) -> None:
        self.directory = directory
        self._metrics = metrics
        self.loaded: Loaded | None = None
        self.front = _context()
        self.front.sni_callback = self._serve

    def refresh(self) -> bool:
        """Load the files if they changed; True when a new certificate went into service.

        Raises:
            CertificateUnusable: they cannot be used; what was in service stays.
        """
        try:
            certificate, key = ((self.directory / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE))
        except OSError as error:
            raise CertificateUnusable(
                str(error.strerror), where=str(error.filename), remedy="issue the certificate"
            ) from None
        if self.loaded is not None and (certificate, key) == self.loaded.content:
            return False
        context = _context()
        try:
            with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
                context.load_cert_chain(certificate_path, key_path)
            not_after_s = issuance.not_after_s(certificate)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise CertificateUnusable(
                f"certificate and key do not make a pair: {error}",
                where=str(self.directory),
                remedy="issue it again",
            ) from None
        self.loaded = Loaded(context=context, not_after_s=not_after_s, content=(certificate, key))
        return True

    def reload(self) -> None:
        """Take changed files into service; bad ones are counted and logged, and what was in service stays."""
        try:
            outcome = "loaded" if self.refresh() else ""
        except CertificateUnusable as error:
            outcome = "failed"
            _log.warning("certificate.unusable", error=str(error))
        if outcome and self._metrics is not None:
            self._metrics.loads.labels(outcome).inc()
        if outcome == "loaded" and self.loaded is not None:
            _log.info("certificate.loaded", not_after_s=self.loaded.not_after_s)
            if self._metrics is not None:
                self._metrics.not_after.set(self.loaded.not_after_s)

    async def watch(self) -> None:
        """Reload for ever."""
        while True:
            self.reload()
            await asyncio.sleep(RELOAD_S)

    def _serve(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _front: object
    ) -> int | None:
        if self.loaded is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self.loaded.context
        return None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path to these bytes: OpenSSL takes paths only, the key belongs on no disk, and the root may be read-only."""
    fd = os.memfd_create("deltashard-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as out:
            out.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
