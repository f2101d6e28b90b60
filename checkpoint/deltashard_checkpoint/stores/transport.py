"""Settings of all HTTP stores: trusted certificates, proxies, and a warning about unencrypted connections.

`AWS_CA_BUNDLE`, else `SSL_CERT_FILE`, names the trusted authorities. `HTTPS_PROXY`, `HTTP_PROXY` (per scheme, in upper
or lower case) and `NO_PROXY` configure proxies as in other tools.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies_environment, proxy_bypass

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import RequestRefused

_log = logging.getLogger("deltashard.stores")
_warned: set[str] = set()
_warned_lock = threading.Lock()
_CREDENTIALS = re.compile(r"169\.254\.[0-9.]+|fe80:.*|fd00:ec2:.*|100\.100\.100\.200", re.ASCII)
"""Sources of machine or pod credentials; these requests carry the pod's token, which no proxy may see."""
_BUNDLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")


class BadTransport(UserError):
    """The configured proxy or certificate bundle cannot be used."""


class CertificateRefused(UserError):
    """The store's TLS certificate is not trusted."""


def checked_endpoint(endpoint: str, *, path: bool = False) -> SplitResult:
    """Split http(s)://host[:port], with `path` plus one segment; raises `RequestRefused`, without a password."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port is None or parts.port > 0
    except ValueError:
        port = False
    usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and port and not parts.query
    segments = len([each for each in parts.path.split("/") if each])
    if not usable or "@" in parts.netloc or segments > int(path):
        raise RequestRefused(
            "the store's endpoint is not an http(s) URL of host and port",
            where=f"{parts.scheme}://{parts.hostname or ''}",
            remedy="use http://host:port or https://host",
        )
    return parts


def ca_bundle() -> tuple[str, Path] | None:
    """Return the variable that names a certificate bundle, and the file; raises `BadTransport` if it is unreadable."""
    for name in _BUNDLES:
        if value := os.environ.get(name):
            path = Path(value)
            try:
                empty = not path.read_bytes().strip()
            except OSError as error:
                raise _bad_bundle(name, value, str(error.strerror or error)) from None
            if empty:
                raise _bad_bundle(name, value, "the file is empty")
            return name, path
    return None


def _bad_bundle(name: str, value: str, reason: str) -> BadTransport:
    return BadTransport(
        f"the authorities of {name} cannot be read: {reason}",
        where=value,
        remedy=f"point {name} at a PEM file of certificates, or unset it",
    )


def certificate_refused(reason: str, *, where: str) -> CertificateRefused:
    """Return the error for a certificate that no trusted authority signed; it names the source of the authorities."""
    named = ca_bundle()
    trusted = f"{named[0]}={named[1]}" if named else "the public authorities (certifi)"
    return CertificateRefused(
        f"TLS failed: {reason}; trusted authorities: {trusted}",
        where=where,
        remedy="set AWS_CA_BUNDLE or SSL_CERT_FILE to the authority that signed the store's certificate",
    )


def proxy_of(url: str) -> str | None:
    """Return the proxy for requests to `url`, with its credentials; None: direct. Raises `BadTransport`."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    proxy = None if _CREDENTIALS.fullmatch(parts.hostname or "") else proxies.get(parts.scheme)
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        usable = found.scheme in {"http", "https"} and bool(found.hostname) and found.port != 0
    except ValueError:
        usable = False
    if not usable:
        name = f"{parts.scheme.upper()}_PROXY"
        raise BadTransport(
            f"{name} is not a proxy URL",
            where=without_credentials(found.geturl()),
            remedy="use http://host:port",
        )
    return found.geturl()


def without_credentials(proxy: str) -> str:
    """Return a proxy's URL without its credentials."""
    parts = urlsplit(proxy)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, "", "", ""))


def via_proxy(url: str) -> str:
    """Return ` through the proxy http://host:port` for messages; empty if requests to `url` are direct."""
    proxy = proxy_of(url)
    return f" through the proxy {without_credentials(proxy)}" if proxy else ""


def warn_if_plaintext(endpoint: str) -> None:
    """Warn once that checkpoints are sent to `endpoint` unencrypted, unless it is on this machine."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass  # a host name
    with _warned_lock:
        if endpoint in _warned:
            return
        _warned.add(endpoint)
    _log.warning(
        "the object store is reached over plain http (%s): checkpoints can be read and changed in transit; "
        "use https unless the network is trusted",
        endpoint,
    )
