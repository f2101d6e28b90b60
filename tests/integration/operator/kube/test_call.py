"""Calls on an API that misbehaves: passing faults are tried again, few times, and everything else is the answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from deltashard_operator.controller import event
from deltashard_operator.controller.event import Regarding, Teller
from deltashard_operator.kube.call import TRIES, Answer, ApiUnavailable, Caller
from deltashard_operator.run.watched_run import Notice
from kubernetes import client

from tests.support.server.minio_server import free_port

Reply = tuple[int, dict[str, str], dict[str, Any]]


class Server:
    """Answers with what it was given, in order, the last one for ever."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [(200, {}, {})]
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _reply(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.paths.append(f"{self.command} {self.path}")
                status, headers, document = (
                    outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                )
                body = json.dumps(document).encode()
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PATCH = do_DELETE = _reply

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def api(self) -> client.ApiClient:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self._http.server_address[1]}"
        configuration.retries = False
        return client.ApiClient(configuration)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def called(api: client.ApiClient, counts: Counter[tuple[str, str]], work: Any) -> Any:
    async def run() -> Any:
        call = Caller(api, count=lambda verb, outcome: counts.update([(verb, outcome)]))
        try:
            return await work(call)
        finally:
            call.close()
            api.close()

    return asyncio.run(run())


def test_throttling_and_faults_are_tried_again_until_it_works(server: Server) -> None:
    server.replies = [(429, {"Retry-After": "1"}, {}), (503, {}, {}), (200, {}, {"kind": "Pod"})]
    counts: Counter[tuple[str, str]] = Counter()
    answer = called(server.api, counts, lambda call: call("GET", "/x"))
    assert answer.document == {"kind": "Pod"}
    assert counts == {("GET", "throttled"): 1, ("GET", "unavailable"): 1, ("GET", "ok"): 1}


@pytest.mark.parametrize("status", [404, 409, 403, 422])
def test_what_the_api_says_otherwise_is_the_answer_at_once(server: Server, status: int) -> None:
    server.replies = [(status, {}, {"reason": "Because", "message": "so"})]
    answer = called(server.api, Counter(), lambda call: call("POST", "/x", {"a": 1}))
    assert (answer.status, answer.ok, answer.sentence) == (status, False, f"{status} Because: so")
    assert len(server.paths) == 1


def test_the_tries_are_bounded(server: Server) -> None:
    server.replies = [(500, {}, {})]
    with pytest.raises(ApiUnavailable, match="did not succeed"):
        called(server.api, Counter(), lambda call: call("GET", "/x"))
    assert len(server.paths) == TRIES


def test_an_api_that_is_not_there_is_unavailable() -> None:
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.retries = False
    counts: Counter[tuple[str, str]] = Counter()
    with pytest.raises(ApiUnavailable):
        called(client.ApiClient(configuration), counts, lambda call: call("GET", "/x", tries=2))
    assert counts == {("GET", "unavailable"): 2}


def test_long_lists_come_in_pages_and_begin_anew_when_they_grew_too_old(server: Server) -> None:
    first = {"items": [{"n": 1}], "metadata": {"continue": "more"}}
    server.replies = [
        (200, {}, first),
        (410, {}, {"reason": "Expired"}),
        (200, {}, first),
        (200, {}, {"items": [{"n": 2}], "metadata": {}}),
    ]
    found = called(server.api, Counter(), lambda call: call.every("/x", selector="a=b"))
    assert found == [{"n": 1}, {"n": 2}]
    assert ["continue=more" in path for path in server.paths] == [False, True, False, True]
    assert all("labelSelector=a%3Db" in path for path in server.paths)


def test_what_one_run_tells_is_limited_and_what_cannot_be_told_is_counted(server: Server) -> None:
    """Twenty-five at once, then one a minute; repeats raise a count; a refusal is no fault."""
    counts: Counter[str] = Counter()
    now_s = [1000.0]
    about = Regarding(api_version="v1", kind="Pod", namespace="team", name="p", uid="u")
    server.replies = [(201, {}, {})]

    async def tell(call: Caller) -> None:
        teller = Teller(call, count=lambda outcome: counts.update([outcome]), wall=lambda: now_s[0])
        running = asyncio.create_task(teller.run())
        for n in range(30):
            teller.tell((about,), Notice(reason=f"Reason{n % 5}", message="x"))
        await teller.drain(60.0)
        now_s[0] += event.REFILL_S
        server.replies = [(403, {}, {"message": "forbidden"})]
        teller.tell((about,), Notice(reason="Other", message="x"))
        await teller.drain(60.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    called(server.api, Counter(), tell)
    assert counts == {"told": 5, "repeated": 20, "limited": 5, "failed": 1}
    assert sum(path.startswith("PATCH") for path in server.paths) == 20


@pytest.mark.parametrize("uid", ["u", "v", "w", "x"])  # whichever lane it falls into
def test_a_count_is_never_raised_on_an_event_that_is_only_about_to_be(uid: str) -> None:
    """Three tellings at once of one thing, by an API that is slow to create: one Event, told three times."""
    there: dict[str, int] = {}

    async def call(method: str, path: str, document: dict[str, Any], **_: Any) -> Answer:
        if method == "POST":
            for _ in range(50):  # slow enough for another worker to come in between
                await asyncio.sleep(0)
            there[document["metadata"]["name"]] = document["count"]
            return Answer(status=201, document=document)
        name = path.rpartition("/")[2]
        if name not in there:
            return Answer(status=404, document={})
        there[name] = document["count"]
        return Answer(status=200, document={})

    async def tell() -> None:
        teller = Teller(cast("Caller", call))
        running = asyncio.create_task(teller.run())
        for _ in range(3):
            about = Regarding(api_version="v1", kind="Pod", namespace="team", name="p", uid=uid)
            teller.tell((about,), Notice(reason="SaveFailed", message="x", warning=True))
        await teller.drain(60.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(tell())
    assert list(there.values()) == [3]
