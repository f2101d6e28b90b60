"""What every store over HTTP obeys: whose certificates are trusted, proxies, a warning where nothing is encrypted.

`AWS_CA_BUNDLE`, else `SSL_CERT_FILE`, names the authorities that are trusted. `HTTPS_PROXY`, `HTTP_PROXY` (for each
scheme, in either case of letters) and `NO_PROXY` name the way to the store, as they do for other tools.
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
"""Who gives a machine or a pod its credentials; such a request holds the pod's token, and no proxy may see it."""
_BUNDLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")


class BadTransport(UserError):
    """A proxy or a bundle of authorities that is named and cannot be used."""


class CertificateRefused(UserError):
    """The store's TLS certificate is not one we trust."""


def checked_endpoint(endpoint: str, *, path: bool = False) -> SplitResult:
    """The parts of http(s)://host[:port], with `path` a segment more; raises `RequestRefused`, without a password."""
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
    """The variable that names a bundle of authorities, and the file; raises `BadTransport` when that cannot be read."""
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
    """The error for a certificate that the authorities in force do not vouch for; it names where they come from."""
    named = ca_bundle()
    trusted = f"{named[0]}={named[1]}" if named else "the public authorities (certifi)"
    return CertificateRefused(
        f"TLS failed: {reason}; trusted are those of {trusted}",
        where=where,
        remedy="set AWS_CA_BUNDLE or SSL_CERT_FILE to the authority that signed the store's certificate",
    )


def proxy_of(url: str) -> str | None:
    """The proxy of requests to `url`, with its credentials; None: they go straight. Raises `BadTransport`."""
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
            f"{name} names no proxy",
            where=without_credentials(found.geturl()),
            remedy="it takes http://host:port",
        )
    return found.geturl()


def without_credentials(proxy: str) -> str:
    """A proxy's URL without the credentials in it."""
    parts = urlsplit(proxy)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, "", "", ""))


def via_proxy(url: str) -> str:
    """` through the proxy http://host:port`, for messages; nothing where requests to `url` go straight."""
    proxy = proxy_of(url)
    return f" through the proxy {without_credentials(proxy)}" if proxy else ""


def warn_if_plaintext(endpoint: str) -> None:
    """Say once that checkpoints go to `endpoint` unencrypted, unless it is on this machine."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass  # a name
    with _warned_lock:
        if endpoint in _warned:
            return
        _warned.add(endpoint)
    _log.warning(
        "the object store is reached over plain http (%s): checkpoints can be read and changed by anyone on the way; "
        "use https unless the network between is trusted",
        endpoint,
    )
