"""Calls on the API by the user's `kubernetes` client: `Requester` for threads, `Caller` for the asyncio loop.

Objects are documents here: the client's model classes of the core API alone would be 80 MiB of a process.

A `Caller` never blocks the loop, and nothing waits for ever: a call has a connect and a read timeout, at most `THREADS`
run at once, and one that failed for a passing reason (429, 5xx, no connection) is tried again at most `TRIES` times
with the pause that the server asks for, else a doubling, jittered one. What the API says otherwise is the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import urllib3
from deltashard_checkpoint.errors import EnvironmentFault
from kubernetes import client

THREADS = 8
TRIES = 4
PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
CONNECT_S = 5.0
READ_S = 30.0
CHUNK = 500
"""Objects in a page of a list."""
MERGE = "application/merge-patch+json"
VERBS = ("GET", "LIST", "POST", "PUT", "PATCH", "DELETE")
OUTCOMES = ("ok", "not_found", "conflict", "throttled", "refused", "unavailable")
ApiClient = client.ApiClient


class NoReply(EnvironmentFault):
    """The API did not answer, or not with JSON."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}"[:300])


class ApiUnavailable(EnvironmentFault):
    """The API did not answer, in spite of several tries."""


class Forbidden(ApiUnavailable):
    """The API answers that this may not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply of the API to a request."""

    status: int
    document: dict[str, Any]
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def sentence(self) -> str:
        """Status, reason and message of a reply that is not ok."""
        return f"{self.status} {self.document.get('reason', '')}: {self.document.get('message', '')}"[:500]


class Requester:
    """The API, for threads: one request, one reply, no second try."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        timeout_s: float | tuple[float, float] = (CONNECT_S, READ_S),
    ) -> Answer:
        """The reply, whatever its status; raises `NoReply`. `timeout_s`: for all, or to connect and to read."""
        try:
            serialized = self._api.param_serialize(
                method=method,
                resource_path=path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
            )
            reply = self._api.call_api(*serialized, _request_timeout=timeout_s)
            document = json.loads(reply.read() or b"{}")  # type: ignore[no-untyped-call]
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise NoReply(error) from error
        after = reply.headers.get("Retry-After", "")
        return Answer(
            status=int(reply.status),
            document=document if isinstance(document, dict) else {},
            retry_after_s=float(after) if after.isdigit() else 0.0,
        )


class Caller:
    """The API, for coroutines. Close it at the end."""

    def __init__(
        self,
        api: ApiClient,
        *,
        count: Callable[[str, str], None] = lambda _verb, _outcome: None,
        may_write: Callable[[], bool] = lambda: True,
        threads: int = THREADS,
        timeout_s: tuple[float, float] = (CONNECT_S, READ_S),
    ) -> None:
        self._request = Requester(api)
        self._count = count
        self._may_write = may_write
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="calls")
        self._slots = asyncio.Semaphore(threads)

    def close(self) -> None:
        """Let go of the threads; a call under way ends by its own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        tries: int = TRIES,
    ) -> Answer:
        """One request, tried again while the reason may pass; raises `ApiUnavailable`, also where it may not write."""
        if method != "GET" and not self._may_write():
            raise ApiUnavailable("this controller does not lead (any more)", where=path)
        verb = "LIST" if query and "limit" in query else method
        request = partial(
            self._request, method, path, body, query=query, content=content, timeout_s=self._timeout_s
        )
        pause_s, why = PAUSE_S, ""
        for left in reversed(range(tries)):
            asked_s = 0.0
            try:
                async with self._slots:
                    found = await asyncio.get_running_loop().run_in_executor(self._pool, request)
            except NoReply as error:
                why = error.what
                self._count(verb, "unavailable")
            else:
                self._count(verb, _outcome(found))
                if found.status != 429 and found.status < 500:
                    return found
                why, asked_s = found.sentence, found.retry_after_s
            if left:
                await asyncio.sleep(min(MAX_PAUSE_S, max(asked_s, pause_s * random.uniform(0.5, 1.0))))  # noqa: S311
                pause_s *= 2
        raise ApiUnavailable(f"{method} did not succeed in {tries} tries: {why}", where=path)

    async def every(self, path: str, *, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a collection, page by page; raises `ApiUnavailable`."""
        found: list[dict[str, Any]] = []
        query = {"limit": str(CHUNK)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self("GET", path, query=query)
            if page.status == 410 and "continue" in query:  # the pages grew too old between two of them
                found = []
                del query["continue"]
                continue
            if not page.ok:
                refused = Forbidden if page.status == 403 else ApiUnavailable
                raise refused(f"cannot be listed: {page.sentence}", where=path)
            found.extend(page.document.get("items") or ())
            following = (page.document.get("metadata") or {}).get("continue")
            if not following:
                return found
            query["continue"] = following


def _outcome(found: Answer) -> str:
    known = {404: "not_found", 409: "conflict", 429: "throttled"}
    return known.get(found.status, "ok" if found.ok else "refused" if found.status < 500 else "unavailable")
