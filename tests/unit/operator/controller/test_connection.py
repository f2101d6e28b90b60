"""How fresh watches are: a quiet one is, a dead one is not, and an API that is away is nobody's fault here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from deltashard_operator.controller.connection import STALE_S, Freshness

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


class Ended(Stream):
    """One that ended, and is asked just when kopf opens the next one, on its own thread."""

    def __init__(self, opens: Callable[[], None]) -> None:
        self._opening = threading.Thread(target=opens)
        self.content = SimpleNamespace(total_bytes=0)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        self._opening.start()
        self._opening.join(0.2)  # it is over by then, or waits for us
        return True


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


def test_a_watch_that_is_opened_while_somebody_looks_is_not_lost(clock: Clock) -> None:
    """The one before has ended, and goes; the new one is looked at from then on."""
    found, _, pods = watching(clock)
    new = Stream()
    old = Ended(lambda: found.opened(JOBS, new, watch=True))  # type: ignore[arg-type]
    found.opened(JOBS, old, watch=True)  # type: ignore[arg-type]
    found.heard_s()
    old._opening.join(60.0)
    clock.now_s += STALE_S + 1
    new.content.total_bytes = pods.content.total_bytes = 100
    assert found.untended() == []
    assert found.heard_s() == 0
