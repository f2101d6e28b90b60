"""API requests for coroutines.

Every request has a connect and a read timeout, and the number of concurrent requests is the number of connections. A
request that fails with a transient error (429, 5xx, no response) is tried at most `TRIES` times, with the delay from
Retry-After or else jittered exponential back-off. Any other response is returned.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.api_access import TIMEOUT_S, ApiAccess

CONNECTIONS = 8
TRIES = 4
PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
CHUNK = 500
MERGE = "application/merge-patch+json"
VERBS = ("GET", "LIST", "POST", "PUT", "PATCH", "DELETE")
OUTCOMES = ("ok", "not_found", "conflict", "throttled", "refused", "unavailable")
TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, ValueError)
"""Errors of a request without a JSON response. A TimeoutError is an OSError."""


class ApiUnavailable(EnvironmentFault):
    """The API did not respond within the retries."""


class Forbidden(ApiUnavailable):
    """The API denied a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    """Response of the API."""

    status: int
    document: dict[str, Any]
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def sentence(self) -> str:
        return f"{self.status} {self.document.get('reason', '')}: {self.document.get('message', '')}"[:500]


class Caller:
    """API caller. Create it on the loop, and close it at the end."""

    def __init__(
        self,
        api: ApiAccess,
        *,
        count: Callable[[str, str], None] = lambda _verb, _outcome: None,
        may_write: Callable[[], bool] = lambda: True,
        connections: int = CONNECTIONS,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> None:
        """`count` is called with verb and outcome of each request. `timeout_s`: see `ApiAccess.session`."""
        self._url = api.configuration.host
        self._session = api.session(connections=connections, timeout_s=timeout_s)
        self._count = count
        self._may_write = may_write
        self.close = self._session.close

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        tries: int = TRIES,
    ) -> ApiResponse:
        """Send a request, with retries. Raises `ApiUnavailable`, also for a write while `may_write` is false."""
        if method != "GET" and not self._may_write():
            raise ApiUnavailable("this controller is not the leader", where=path)
        verb = "LIST" if query and "limit" in query else method
        data = None if body is None else json.dumps(body)
        pause_s, why = PAUSE_S, ""
        for left in reversed(range(tries)):
            retry_after_s = 0.0
            try:
                found = await self._answer(method, path, data, query, content)
            except TRANSPORT_ERRORS as error:
                why = f"{type(error).__name__}: {error}"[:300]
                self._count(verb, "unavailable")
            else:
                self._count(verb, _outcome(found))
                if found.status != 429 and found.status < 500:
                    return found
                why, retry_after_s = found.sentence, found.retry_after_s
            if left:
                await asyncio.sleep(min(MAX_PAUSE_S, max(retry_after_s, pause_s * random.uniform(0.5, 1.0))))  # noqa: S311
                pause_s *= 2
        raise ApiUnavailable(f"{method} failed: {why}", where=path)

    async def _answer(
        self, method: str, path: str, data: str | None, query: Mapping[str, str] | None, content: str
    ) -> ApiResponse:
        """Send one request and return the response. Raises one of `TRANSPORT_ERRORS`."""
        headers = {"Accept": "application/json", "Content-Type": content}
        async with self._session.request(
            method, self._url + path, data=data, params=query, headers=headers
        ) as reply:
            document = json.loads(await reply.read() or b"{}")
        after = reply.headers.get("Retry-After", "")
        return ApiResponse(
            status=reply.status,
            document=document if isinstance(document, dict) else {},
            retry_after_s=float(after) if after.isdigit() else 0.0,
        )

    async def list_all(self, path: str, *, selector: str = "") -> list[dict[str, Any]]:
        """Return all objects of a collection, read in pages. Raises `ApiUnavailable`."""
        found: list[dict[str, Any]] = []
        query = {"limit": str(CHUNK)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self("GET", path, query=query)
            if not page.ok:
                refused = Forbidden if page.status == 403 else ApiUnavailable
                raise refused(f"cannot be listed: {page.sentence}", where=path)
            found.extend(page.document.get("items") or ())
            following = (page.document.get("metadata") or {}).get("continue")
            if not following:
                return found
            query["continue"] = following


async def object_at(call: Callable[..., Awaitable[ApiResponse]], path: str) -> dict[str, Any] | None:
    """Return the object at this path, or None if it does not exist. Raises `ApiUnavailable`."""
    answer = await call("GET", path)
    if not answer.ok and answer.status != 404:
        raise ApiUnavailable(f"cannot be read: {answer.sentence}", where=path)
    return answer.document if answer.ok else None


def _outcome(found: ApiResponse) -> str:
    known = {404: "not_found", 409: "conflict", 429: "throttled"}
    return known.get(found.status, "ok" if found.ok else "refused" if found.status < 500 else "unavailable")
