"""How fresh watches are: a quiet one is, a dead one is not, and an API that is away is nobody's fault here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from deltashard_operator.connections import STALE_S, Freshness

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
        self.closed = False


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(clock: Callable[[], float], **more: Any) -> tuple[Freshness, Stream, Stream]:
    found = Freshness((JOBS, PODS), clock=clock, **more)
    jobs, pods = Stream(), Stream()
    for path, stream in ((JOBS, jobs), (PODS, pods)):
        found.tried(path)
        found.opened(path, stream, watch=True)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("path", [PODS, "/apis"])
def test_an_api_that_is_away_is_tried_and_no_reason_to_die(clock: Clock, path: str) -> None:
    found, jobs, pods = watching(clock)
    jobs.closed = pods.closed = True
    for _ in range(10):
        clock.now_s += 60
        found.tried(path)
        found.tried(JOBS)
    assert found.untended() == []
    assert found.heard_s() == 600


def test_lists_and_watches_are_told_apart(clock: Clock) -> None:
    lists: list[str] = []
    watches: list[str] = []
    found, _, _ = watching(clock, on_list=lists.append, on_watch=watches.append)
    found.opened(JOBS, Stream(), watch=False)  # type: ignore[arg-type]
    assert (lists, watches) == ([JOBS], [JOBS, PODS])
