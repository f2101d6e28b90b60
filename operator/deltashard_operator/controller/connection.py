"""kopf's way to the API: a session of ours, and with it how fresh every watch is.

kopf is given a session instead of credentials, for two reasons. A projected token is read again when it rotates (the
kubernetes client's own hook does it), so no watch has to be torn down for a login. And every response passes through
`Response`, so that it is known when each watch last brought a byte: bookmarks come every minute, kopf ends a watch
that is silent for longer and begins anew, so a quiet cluster looks fresh and a dead watch does not. A list after the
first means that a watch had to begin anew and may have missed deletions: whoever asks is told (`on_list`).
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf
from kubernetes import client

STALE_S = 240.0
"""Three times what kopf lets a watch be silent, and a little: a watch that nobody tends."""


class Freshness:
    """When each watch and list was last seen to do anything. Keys are URL paths, such as /apis/batch/v1/jobs."""

    def __init__(
        self,
        expected: tuple[str, ...],
        *,
        on_list: Callable[[str], None] = lambda _path: None,
        on_watch: Callable[[str], None] = lambda _path: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected`: paths that have to be watched."""
        self._clock = clock
        self._on_list = on_list
        self._on_watch = on_watch
        self._tried_any_s = clock()
        self._begun_s = self._tried_any_s
        self._tried: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._open: dict[str, tuple[aiohttp.ClientResponse, int]] = {}
        self._lock = threading.Lock()
        """Of `_open`: watches are opened on kopf's thread and looked at on the controller's."""
        self.expected = expected

    def tried(self, path: str) -> None:
        """A request begins: of a watched path, or of what comes before all watches."""
        if path in self.expected:
            self._tried[path] = self._clock()
        else:
            self._tried_any_s = self._clock()

    def begin(self) -> None:
        """Watching begins."""
        self._begun_s = self._tried_any_s = self._clock()

    def opened(self, path: str, response: aiohttp.ClientResponse, *, watch: bool) -> None:
        """The API answers it."""
        self._heard[path] = self._clock()
        if watch:
            with self._lock:
                self._open[path] = (response, 0)
            self._on_watch(path)
        else:
            self._on_list(path)

    def _look(self) -> None:
        with self._lock:  # else one that is opened meanwhile may be lost, and would look dead for ever
            for path, (response, seen) in list(self._open.items()):
                content: Any = response.content
                if content.total_bytes != seen:
                    self._heard[path] = self._clock()
                    self._open[path] = (response, content.total_bytes)
                if response.closed:
                    del self._open[path]

    def heard_s(self) -> float:
        """Seconds since the least fresh expected watch brought anything, or since the beginning."""
        self._look()
        now_s = self._clock()
        return max((now_s - self._heard.get(path, self._begun_s) for path in self.expected), default=0.0)

    def untended(self) -> list[str]:
        """Watches that nobody has tended for too long: neither a byte nor a new try."""
        self._look()
        now_s = self._clock()
        return [
            path
            for path in self.expected
            if now_s - max(self._heard.get(path, 0.0), self._tried.get(path, 0.0), self._tried_any_s)
            > STALE_S
        ]


def connection(
    configuration: client.Configuration, freshness: Freshness, user_agent: str
) -> kopf.AiohttpSession:
    """A session for kopf from the kubernetes client's configuration. Call it on the loop."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)

    class Response(aiohttp.ClientResponse):
        """One that reports itself."""

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            result = await super().start(connection)
            path = self.url.path
            if path in freshness.expected and self.status < 400:
                freshness.opened(path, self, watch=self.url.query.get("watch") == "true")
            return result

    async def authorized(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        freshness.tried(request.url.path)
        token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        headers={"User-Agent": user_agent},
        response_class=Response,
        middlewares=(authorized,),
    )
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)
