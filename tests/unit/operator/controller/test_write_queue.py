"""Order and rate of writes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from functools import partial

import pytest
from deltashard_operator.controller.write_queue import (
    ANNOTATION_INTERVAL_S,
    BURST,
    EVENT_BURST,
    EVENT_PER_S,
    FAST_INTERVAL_S,
    LOW_INTERVAL_S,
    MAX_BACKOFF_S,
    MAX_IN_FLIGHT,
    PER_S,
    RESERVE,
    Priority,
    WriteQueue,
)
from deltashard_operator.kube.call import ApiUnavailable

from tests.support.async_test import async_test

COMMIT_S = 30.0


class WriteQueueBench:
    """A write queue with a fake clock, which records the writes."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.counted = Counter[str]()
        self.queue = WriteQueue(
            commit_s=COMMIT_S, wall=lambda: self.now_s, count=lambda outcome: self.counted.update((outcome,))
        )
        self.written: list[Hashable] = []
        self.broken = False

    def offer(self, key: Hashable, priority: Priority) -> None:
        async def work() -> None:
            if self.broken:
                raise ApiUnavailable("no answer", where="x")
            self.written.append(key)

        self.queue.offer(key, priority, work)

    async def after(self, seconds: float) -> list[Hashable]:
        self.now_s += seconds
        before = len(self.written)
        self.queue.tick()
        while self.queue.tasks:
            await asyncio.wait(self.queue.tasks)
            self.queue.tick()
        return self.written[before:]


@pytest.fixture
def bench() -> WriteQueueBench:
    return WriteQueueBench()


@pytest.mark.parametrize(
    ("priority", "apart_s"),
    [
        (Priority.ORDER, 0.0),
        (Priority.EVENT, 0.0),
        (Priority.PROBLEM, FAST_INTERVAL_S),
        (Priority.CONDITION, FAST_INTERVAL_S),
        (Priority.COMMIT, COMMIT_S),
        (Priority.LOW, LOW_INTERVAL_S),
        (Priority.ANNOTATION, ANNOTATION_INTERVAL_S),
    ],
)
@async_test
async def test_write_interval_depends_on_the_change(
    bench: WriteQueueBench, priority: Priority, apart_s: float
) -> None:
    bench.offer("run", Priority.NEW)
    assert await bench.after(0) == ["run"]
    bench.offer("run", priority)
    if apart_s:
        assert await bench.after(apart_s - 0.5) == []
        bench.now_s -= apart_s - 0.5
    assert await bench.after(apart_s) == ["run"]
    assert await bench.after(LOW_INTERVAL_S) == []


@async_test
async def test_mass_failure_causes_one_write_per_run(
    bench: WriteQueueBench,
) -> None:
    for n in range(253):
        bench.offer(n, Priority.COMMIT)
        bench.offer(n, Priority.PROBLEM)
    assert await bench.after(0) == [*range(253)]
    left = BURST - 253
    for _ in range(20):
        for n in range(253):
            bench.offer(n, Priority.CONDITION)
        found = await bench.after(FAST_INTERVAL_S)
        left += PER_S
        assert len(found) == max(left - RESERVE[Priority.CONDITION], 0)
        left -= len(found)
    for n in range(int(left)):
        bench.offer(("lost", n), Priority.PROBLEM)
    assert len(await bench.after(0)) == left


@async_test
async def test_burst_is_rate_limited_except_new_runs(bench: WriteQueueBench) -> None:
    for n in range(1000):
        bench.offer(n, Priority.PROBLEM)
        bench.offer(("new", n), Priority.NEW)
    found = await bench.after(0)
    assert len(found) == 1000 + BURST
    assert bench.queue.idle is False
    assert len(await bench.after(1)) == PER_S
    bench.queue.flush()
    assert len(await bench.after(0)) == 1000 - BURST - PER_S


@async_test
async def test_commits_leave_a_reserve_for_failures(bench: WriteQueueBench) -> None:
    for n in range(1000):
        bench.offer(("commit", n), Priority.COMMIT)
    assert len(await bench.after(COMMIT_S)) == BURST - RESERVE[Priority.COMMIT]
    for n in range(300):
        bench.offer(("lost", n), Priority.PROBLEM)
    assert await bench.after(0) == [("lost", n) for n in range(300)]


@async_test
async def test_events_and_run_writes_do_not_starve_each_other(bench: WriteQueueBench) -> None:
    for n in range(1000):
        bench.offer(("event", n), Priority.EVENT)
        bench.offer(("commit", n), Priority.COMMIT)
    found = Counter(each[0] for each in await bench.after(COMMIT_S) if isinstance(each, tuple))
    assert found == {"event": EVENT_BURST, "commit": BURST - RESERVE[Priority.COMMIT]}
    found = Counter(each[0] for each in await bench.after(1) if isinstance(each, tuple))
    assert found == {"event": EVENT_PER_S, "commit": PER_S}


@async_test
async def test_writes_are_serial_per_key_and_bounded_overall(bench: WriteQueueBench) -> None:
    go, started = asyncio.Event(), list[int]()

    async def work(key: int) -> None:
        started.append(key)
        await go.wait()

    for _ in range(2):
        for key in range(MAX_IN_FLIGHT + 5):
            bench.queue.offer(key, Priority.NEW, partial(work, key))
        bench.queue.tick()
        await asyncio.sleep(0)
    assert started == list(range(MAX_IN_FLIGHT))
    assert len(bench.queue) == MAX_IN_FLIGHT + 5
    go.set()
    await bench.after(0)
    assert Counter(started) == Counter([*range(MAX_IN_FLIGHT + 5), *range(MAX_IN_FLIGHT)])


@async_test
async def test_failed_write_is_retried_with_backoff_up_to_a_minute(bench: WriteQueueBench) -> None:
    bench.broken = True
    bench.offer("run", Priority.PROBLEM)
    await bench.after(0)
    for failures in range(1, 9):
        pause_s = min(2.0**failures, MAX_BACKOFF_S)
        bench.broken = False
        assert await bench.after(pause_s - 0.5) == []
        bench.broken = True
        assert not bench.queue.idle
        await bench.after(0.5)
    bench.now_s -= 7200.0  # the clock is set back, and no write waits for two hours
    bench.broken = False
    assert await bench.after(0) == []
    assert await bench.after(FAST_INTERVAL_S) == ["run"]
    assert bench.counted == Counter(failed=9, written=1)


@async_test
async def test_failed_writes_are_retried_at_once_on_shutdown(bench: WriteQueueBench) -> None:
    bench.broken = True
    bench.offer("run", Priority.PROBLEM)
    await bench.after(0)
    bench.broken = False
    bench.queue.flush()
    assert await bench.after(0) == ["run"]
