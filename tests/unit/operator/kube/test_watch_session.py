"""How fresh watches are: a quiet one is, a dead one is not, and an API that is away is nobody's fault here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from deltashard_operator.kube.watch_session import STALE_S, UNRESOLVED_S, Freshness, session
from kubernetes import client

JOBS, PODS = "/apis/batch/v1/jobs", "/api/v1/pods"


@dataclass
class Clock:
    """One that is set by hand."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Stream:
    """What Freshness looks at of a response."""

    def __init__(self) -> None:
        self.content: Any = SimpleNamespace(total_bytes=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(clock: Callable[[], float]) -> tuple[Freshness, Stream, Stream]:
    found = Freshness((JOBS, PODS), clock=clock)
    jobs, pods = Stream(), Stream()
    for path, stream in ((JOBS, jobs), (PODS, pods)):
        found.tried(path)
        found.answered(path, stream)  # type: ignore[arg-type]
    return found, jobs, pods


def test_a_watch_that_brings_only_bookmarks_is_fresh(clock: Clock) -> None:
    found, jobs, pods = watching(clock)
    for _ in range(20):
        clock.now_s += 60
        jobs.content.total_bytes += 100
        pods.content.total_bytes += 100
        assert found.untended() == []
        assert found.heard_s() == 0


def test_a_watch_without_a_byte_that_nobody_opens_again_is_dead(clock: Clock) -> None:
    found, jobs, _ = watching(clock)
    for _ in range(5):
        clock.now_s += 60
        jobs.content.total_bytes += 100
        found.heard_s()
    assert clock.now_s > 1000 + STALE_S
    assert found.untended() == [PODS]
    assert found.heard_s() == 300


def test_an_api_that_is_away_is_tried_and_no_reason_to_begin_anew(clock: Clock) -> None:
    found, _, _ = watching(clock)
    for _ in range(10):
        clock.now_s += 60
        found.tried(PODS)
        found.tried(JOBS)
    assert found.untended() == []
    assert found.heard_s() == 600


def test_a_kind_that_is_not_asked_for_after_the_kinds_were_was_not_there(clock: Clock) -> None:
    """While the API does not say which kinds there are, nothing can be asked for."""
    found = Freshness((JOBS, PODS), clock=clock)
    found.discovering(1)
    clock.now_s += 1000
    assert found.untended() == []
    found.discovering(-1)
    found.tried(JOBS)
    clock.now_s += UNRESOLVED_S
    assert found.untended() == []
    clock.now_s += 1
    assert found.untended() == [PODS]
    found.begin()
    assert found.untended() == []


def test_a_kind_that_is_never_heard_grows_old_however_often_watching_begins(clock: Clock) -> None:
    """From the first beginning on, which may be long after this was made: a controller waits for its Lease."""
    found = Freshness((JOBS, PODS), clock=clock)
    clock.now_s += 10 * STALE_S
    found.begin()
    assert found.heard_s() == 0
    for _ in range(20):
        found.discovering(1)
        found.discovering(-1)
        found.tried(JOBS)
        found.answered(JOBS)
        clock.now_s += UNRESOLVED_S + 1
        assert found.untended() == [PODS]
        found.begin()
        assert found.untended() == []
    assert found.heard_s() == 20 * (UNRESOLVED_S + 1)
    assert found.heard_s() > STALE_S


@pytest.mark.parametrize("method", ["PATCH", "POST", "PUT", "DELETE"])
def test_what_is_not_a_read_is_refused(clock: Clock, method: str) -> None:
    """Before it is sent: nobody listens there."""
    api = client.ApiClient(client.Configuration(host="http://127.0.0.1:1"))
    found = Freshness((JOBS,), clock=clock)

    async def main() -> None:
        ignored = {"on_watch": lambda _: None, "on_refused": lambda _: None}
        made = session(api, (JOBS,), found, on_page=lambda *_: None, **ignored).aiohttp_session
        async with made:
            await made.request(method, f"http://127.0.0.1:1{JOBS}")

    with pytest.raises(RuntimeError, match=f"kopf would {method} {JOBS}, and may only read"):
        asyncio.run(main())
    clock.now_s += 1
    assert found.heard_s() == 1


def test_a_watch_that_is_opened_while_the_one_before_is_looked_at_is_not_lost(clock: Clock) -> None:
    found, jobs, pods = watching(clock)
    new = Stream()

    class Ended:
        """Content that is asked just when kopf opens the next watch, on its own thread."""

        @property
        def total_bytes(self) -> int:
            found.answered(JOBS, new)  # type: ignore[arg-type]
            return 100

    jobs.content = Ended()
    found.heard_s()
    clock.now_s += STALE_S + 1
    new.content.total_bytes = pods.content.total_bytes = 100
    assert found.untended() == []
    assert found.heard_s() == 0


def test_a_namespace_that_may_not_be_read_makes_nothing_stale_unless_none_may(clock: Clock) -> None:
    """Its rights went, or it did, among several."""
    one, other = "/apis/batch/v1/namespaces/a/jobs", "/apis/batch/v1/namespaces/b/jobs"
    found = Freshness((one, other), clock=clock)
    found.begin()
    for _ in range(60):
        clock.now_s += 10
        found.answered(one)
        found.refused(other)
    assert found.heard_s() == 0
    clock.now_s += 10
    found.refused(one)
    assert found.heard_s() > STALE_S, "the other was never heard"
    found.answered(other)
    assert found.heard_s() == 0
