"""Calls of a faulty API: transient faults are retried a few times, and every other answer is returned."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from deltashard_operator.kube.call import TRIES, ApiUnavailable, Caller

from tests.support.operator.access import access_to
from tests.support.server.minio_server import free_port
from tests.support.server.threaded_http import ThreadedHttp

Reply = tuple[int, dict[str, str], dict[str, Any]]


class ReplayServer(ThreadedHttp):
    """Answers with the configured replies in order, and repeats the last one."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [(200, {}, {})]
        self.paths: list[str] = []
        outer = self

        class ReplayHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.paths.append(f"{self.command} {self.path}")
                status, headers, document = outer.replies.pop(0) if outer.replies[1:] else outer.replies[0]
                body = json.dumps(document).encode()
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(ReplayHandler)


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    found = ReplayServer()
    found.start()
    yield found
    found.stop()


def called(port: int, counts: Counter[tuple[str, str]], work: Any) -> Any:
    async def run() -> Any:
        call = Caller(access_to(port), count=lambda verb, outcome: counts.update([(verb, outcome)]))
        try:
            return await work(call)
        finally:
            await call.close()

    return asyncio.run(run())


def test_throttling_and_faults_are_retried(server: ReplayServer) -> None:
    server.replies = [(429, {"Retry-After": "1"}, {}), (503, {}, {}), (200, {}, {"kind": "Pod"})]
    counts: Counter[tuple[str, str]] = Counter()
    answer = called(server.port, counts, lambda call: call("GET", "/x"))
    assert answer.document == {"kind": "Pod"}
    assert counts == {("GET", "throttled"): 1, ("GET", "unavailable"): 1, ("GET", "ok"): 1}


@pytest.mark.parametrize("status", [404, 409, 403, 422])
def test_other_status_is_returned_at_once(server: ReplayServer, status: int) -> None:
    server.replies = [(status, {}, {"reason": "Because", "message": "so"})]
    answer = called(server.port, Counter(), lambda call: call("POST", "/x", {"a": 1}))
    assert (answer.status, answer.ok, answer.sentence) == (status, False, f"{status} Because: so")
    assert len(server.paths) == 1


def test_retries_are_bounded(server: ReplayServer) -> None:
    server.replies = [(500, {}, {})]
    with pytest.raises(ApiUnavailable, match="GET failed: 500"):
        called(server.port, Counter(), lambda call: call("GET", "/x"))
    assert len(server.paths) == TRIES


def test_unreachable_api_is_unavailable() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    with pytest.raises(ApiUnavailable):
        called(free_port(), counts, lambda call: call("GET", "/x", tries=2))
    assert counts == {("GET", "unavailable"): 2}


def test_long_lists_are_paginated(server: ReplayServer) -> None:
    first = {"items": [{"n": 1}], "metadata": {"continue": "more"}}
    server.replies = [
        (200, {}, first),
        (200, {}, {"items": [{"n": 2}], "metadata": {}}),
    ]
    found = called(server.port, Counter(), lambda call: call.list_all("/x", selector="a=b"))
    assert found == [{"n": 1}, {"n": 2}]
    assert ["continue=more" in path for path in server.paths] == [False, True]
    assert all("labelSelector=a%3Db" in path for path in server.paths)
