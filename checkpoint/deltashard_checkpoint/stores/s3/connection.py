"""HTTP connections of an S3 store: no retries, no redirects, and no wait beyond the caller's deadline.

Proxies and authorities come from the environment (`transport`). The class is a `PoolManager`, as minio-py requires.

urllib3's connect timeout also bounds each `send` on a fresh connection (Python bounds a whole `sendall` by it). So a
body is sent in slices, each with a new timeout, and the deadline is checked in between. Receiving works alike: `read1`
returns available bytes, so a slow server cannot keep a call forever.

MinIO closes the connection after it rejects an upload, without announcing it, and urllib3 returns a connection to its
pool once the response is read: the next request could hit the reset. So a connection is dropped after the head of a
rejection; the response keeps its socket open to its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import certifi
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.response import BaseHTTPResponse, HTTPResponse

from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.deadline import idle_timeout_s, remaining_s
from deltashard_checkpoint.stores.transport import ca_bundle, proxy_of, without_credentials

SLICE_BYTES = 1024 * 1024
_SHORTEST_S = 0.01
_CONNECT_S = 5.0
_CONNECTIONS = 32
_UPLOADS = frozenset({"PUT", "POST"})


class _Connection(HTTPConnection):
    """Connection that is not reused after a rejected upload."""

    _method = ""

    def putrequest(self, method: str, url: str, *args: Any, **kw: Any) -> None:
        self._method = method
        super().putrequest(method, url, *args, **kw)

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as urllib3 itself does
        response = super().getresponse()
        if response.status >= 400 and self._method in _UPLOADS and self.sock is not None:
            # As http.client does for an announced close: the response reads on from its own handle of the socket.
            sock, self.sock = self.sock, None
            sock.close()
        return response


class _SecureConnection(_Connection, HTTPSConnection):
    """Same over TLS."""


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_POOLS = {"http": _Pool, "https": _SecurePool}


class Connections(urllib3.PoolManager):
    """A connection pool that obeys `deadline` and records the store's time per thread."""

    def __init__(self, max_idle_s: float) -> None:
        bundle = ca_bundle()
        self._pool_options: dict[str, Any] = {
            "maxsize": _CONNECTIONS,
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": str(bundle[1]) if bundle else certifi.where(),
        }
        super().__init__(**self._pool_options)
        self.pool_classes_by_scheme = _POOLS
        self._proxied: dict[str, urllib3.ProxyManager] = {}
        self._proxied_lock = threading.Lock()
        self._max_idle_s = max_idle_s
        self._seen = threading.local()

    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> BaseHTTPResponse:  # type: ignore[override]  # noqa: ARG002 - the base's signature; redirects are never followed
        """Send one request, bounded by the timeouts and the deadline."""
        check_deadline(url.partition("?")[0])
        left_s = max(_SHORTEST_S, remaining_s())
        kw["timeout"] = urllib3.Timeout(
            connect=min(_CONNECT_S, left_s),
            read=max(_SHORTEST_S, idle_timeout_s(self._max_idle_s)),
        )
        kw["retries"] = False
        proxy = proxy_of(url)
        if proxy is None:
            response = super().urlopen(method, url, redirect=False, **kw)
        else:
            response = self._proxy_manager(proxy).urlopen(method, url, redirect=False, **kw)
        date = response.headers.get("Date")
        self._seen.skew_s = None
        self._seen.date_s = None
        if date is not None:
            self._seen.date_s = parsedate_to_datetime(date).timestamp()
            self._seen.skew_s = time.time() - self._seen.date_s
        return response

    def _proxy_manager(self, proxy: str) -> urllib3.ProxyManager:
        with self._proxied_lock:
            if proxy not in self._proxied:
                parts = urlsplit(proxy)
                login = (
                    f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
                )
                manager = urllib3.ProxyManager(
                    without_credentials(proxy),
                    proxy_headers=urllib3.make_headers(proxy_basic_auth=login),
                    **self._pool_options,
                )
                manager.pool_classes_by_scheme = _POOLS
                self._proxied[proxy] = manager
            return self._proxied[proxy]

    def clear(self) -> None:
        super().clear()
        with self._proxied_lock:
            for each in self._proxied.values():
                each.clear()

    @property
    def date_s(self) -> float | None:
        """Return the Date of this thread's last response, in seconds since the epoch."""
        return getattr(self._seen, "date_s", None)

    @property
    def skew_s(self) -> float | None:
        """Return the seconds by which the local clock was ahead of the store's at this thread's last response."""
        return getattr(self._seen, "skew_s", None)


def slices(data: memoryview, where: str) -> Iterator[memoryview]:
    """Yield `data` in views of `SLICE_BYTES` within the deadline."""
    for start in range(0, len(data), SLICE_BYTES):
        check_deadline(where)
        yield data[start : start + SLICE_BYTES]


def check_deadline(where: str) -> None:
    """Raise `StoreUnavailable` if the deadline has passed."""
    if remaining_s() <= 0:
        raise StoreUnavailable("the call's deadline passed", where=where)
