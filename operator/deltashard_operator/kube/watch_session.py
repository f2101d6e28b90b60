"""The HTTP session that kopf watches with: it tells what each list named, how fresh each watch is, and writes nothing.

kopf is given a session instead of credentials, for these reasons. A projected token is read again when it rotates (the
kubernetes client's own hook does it), so no watch has to be torn down for a login. What a list names passes through it,
page by page; kopf itself tells nobody when a list is over, so what went while it did not look would never be found.
And it is seen when each watch last brought a byte: bookmarks come every minute and kopf ends a watch that is silent for
longer, so a quiet cluster looks fresh and a dead watch does not.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf
from kubernetes import client

STALE_S = 240.0
"""Three times what kopf lets a watch be silent, and a little: a watch that nobody tends."""
UNRESOLVED_S = 15.0
"""After kopf asked which kinds there are, it watches those it found; one that it does not ask for was not there."""
UNAUTHORIZED_S = 5.0
"""kopf answers 401 with a new login and a new try at once, for ever."""
Document = dict[str, Any]


@dataclass(slots=True)
class _Signs:
    """Signs of life of one watch. Written on kopf's thread, but for what `Freshness.heard_s` reads from a stream."""

    tried_s: float = 0.0
    heard_s: float = 0.0
    refused_s: float = 0.0
    """When the API last said that this may not be read; 0: it may."""
    stream: _Stream | None = None


@dataclass(slots=True)
class _Stream:
    response: aiohttp.ClientResponse
    size: int = 0


class Freshness:
    """When each watched path was last asked for, and last brought anything. Reads are from any thread."""

    def __init__(self, paths: Iterable[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signs = {path: _Signs() for path in paths}
        self._begun_s = self._discovered_s = clock()
        self._begun = False
        self._discovering = 0

    def begin(self) -> None:
        """Note that watching begins, or begins anew: which makes nothing fresher that was not heard."""
        self._discovered_s = self._clock()
        if not self._begun:
            self._begun, self._begun_s = True, self._discovered_s
        self._discovering = 0
        for signs in self._signs.values():
            signs.tried_s = 0.0

    def discovering(self, change: int) -> None:
        """Note that a request for the kinds there are begins (1) or is over (-1)."""
        self._discovering += change
        self._discovered_s = self._clock()

    def tried(self, path: str) -> None:
        """Note that a list or a watch of this path is asked for."""
        self._signs[path].tried_s = self._clock()

    def answered(self, path: str, stream: aiohttp.ClientResponse | None = None) -> None:
        """Note that the API answers; `stream`: with a watch."""
        signs = self._signs[path]
        signs.heard_s, signs.refused_s = self._clock(), 0.0
        if stream is not None:
            signs.stream = _Stream(stream)

    def refused(self, path: str) -> None:
        """Note that the API answers, and refuses to let this path be read."""
        self._signs[path].refused_s = self._clock()

    def _heard_s(self, signs: _Signs) -> float:
        stream = signs.stream
        if stream is not None:
            content: Any = stream.response.content
            if content.total_bytes != stream.size:
                stream.size, signs.heard_s = content.total_bytes, self._clock()
        return signs.heard_s

    def heard_s(self) -> float:
        """Seconds since the least fresh watch brought anything, or since the first beginning.

        One that may not be read (a namespace of several whose rights went) does not count, unless none may.
        """
        now_s = self._clock()
        readable = [
            signs
            for signs in self._signs.values()
            if not signs.refused_s or now_s - signs.refused_s > STALE_S
        ]
        return max(
            now_s - max(self._heard_s(signs), self._begun_s) for signs in readable or self._signs.values()
        )

    def untended(self) -> list[str]:
        """Paths of which there was neither a byte nor a new try for too long."""
        now_s, found = self._clock(), []
        for path, signs in self._signs.items():
            if signs.tried_s:
                lost = now_s - max(self._heard_s(signs), signs.tried_s) > STALE_S
            else:
                lost = not self._discovering and now_s - self._discovered_s > UNRESOLVED_S
            if lost:
                found.append(path)
        return found


def session(
    api: client.ApiClient,
    paths: Iterable[str],
    freshness: Freshness,
    *,
    on_page: Callable[[str, Document, bool], object],
    on_watch: Callable[[str], None],
    on_refused: Callable[[str], object],
) -> kopf.AiohttpSession:
    """A session for kopf as the kubernetes client has one. Call it on kopf's loop.

    It refuses all that is not a read (RuntimeError), whatever kopf makes of an object. `freshness` is told of every
    request and answer; `on_page` of each page of a list in order (path, document, whether it is the first); `on_watch`
    of the path of a watch that begins; `on_refused` of one that may not be read.
    """
    watched, configuration = frozenset(paths), api.configuration
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)

    async def authorized(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        response = await handler(request)
        if response.status == 401:
            await asyncio.sleep(UNAUTHORIZED_S)
        return response

    async def observed(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        path, query = request.url.path, request.url.query
        if request.method != "GET":
            raise RuntimeError(
                f"kopf would {request.method} {path}, and may only read: object_watch.settings"
            )
        if path not in watched:
            freshness.discovering(1)
            try:
                return await handler(request)
            finally:
                freshness.discovering(-1)
        freshness.tried(path)
        response = await handler(request)
        if response.status == 403 and "/namespaces/" in path:
            freshness.refused(path)
            on_refused(path)
        if response.status < 400:
            if query.get("watch") == "true":
                freshness.answered(path, response)
                on_watch(path)
            else:
                freshness.answered(path)
                on_page(path, await response.json(), "continue" not in query)
        return response

    found = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        headers=api.default_headers,
        middlewares=(observed, authorized),
    )
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=found)
