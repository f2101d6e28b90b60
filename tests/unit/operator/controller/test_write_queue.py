"""The order and the pace of writes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from functools import partial

import pytest
from deltashard_operator.controller.write_queue import (
    AT_WORK,
    BURST,
    EVENT_BURST,
    EVENT_PER_S,
    MAX_BACKOFF_S,
    NOTE_S,
    PER_S,
    QUIET_S,
    RESERVE,
    SOON_S,
    Rank,
    WriteQueue,
)
from deltashard_operator.kube.call import ApiUnavailable

from tests.support.in_a_loop import in_a_loop

COMMIT_S = 30.0


class Bench:
    """A queue by a clock of the test's own, and what it wrote."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.counted = Counter[str]()
        self.queue = WriteQueue(
            commit_s=COMMIT_S, wall=lambda: self.now_s, count=lambda outcome: self.counted.update((outcome,))
        )
        self.written: list[Hashable] = []
        self.broken = False

    def offer(self, key: Hashable, rank: Rank) -> None:
        async def work() -> None:
            if self.broken:
                raise ApiUnavailable("away", where="x")
            self.written.append(key)

        self.queue.offer(key, rank, work)

    async def after(self, seconds: float) -> list[Hashable]:
        """What is written when so much time has passed."""
        self.now_s += seconds
        before = len(self.written)
        self.queue.tick()
        while self.queue.tasks:
            await asyncio.wait(self.queue.tasks)
            self.queue.tick()
        return self.written[before:]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("rank", "apart_s"),
    [
        (Rank.ORDER, 0.0),
        (Rank.EVENT, 0.0),
        (Rank.TROUBLE, SOON_S),
        (Rank.CONDITION, SOON_S),
        (Rank.COMMIT, COMMIT_S),
        (Rank.QUIET, QUIET_S),
        (Rank.NOTE, NOTE_S),
    ],
)
@in_a_loop
async def test_what_changed_says_how_far_writes_are_apart(bench: Bench, rank: Rank, apart_s: float) -> None:
    bench.offer("run", Rank.NEW)
    assert await bench.after(0) == ["run"]
    bench.offer("run", rank)
    if apart_s:
        assert await bench.after(apart_s - 0.5) == []
        bench.now_s -= apart_s - 0.5
    assert await bench.after(apart_s) == ["run"]
    assert await bench.after(QUIET_S) == []


@in_a_loop
async def test_the_loss_of_many_is_one_write_each_and_what_follows_leaves_room_for_the_next(
    bench: Bench,
) -> None:
    for n in range(253):
        bench.offer(n, Rank.COMMIT)
        bench.offer(n, Rank.TROUBLE)
    assert await bench.after(0) == [*range(253)]
    left = BURST - 253
    for _ in range(20):
        for n in range(253):
            bench.offer(n, Rank.CONDITION)
        found = await bench.after(SOON_S)
        left += PER_S
        assert len(found) == max(left - RESERVE[Rank.CONDITION], 0)
        left -= len(found)
    for n in range(int(left)):
        bench.offer(("lost", n), Rank.TROUBLE)
    assert len(await bench.after(0)) == left


@in_a_loop
async def test_a_burst_is_bounded_and_then_so_many_a_second_go_but_new_ones_are_free(bench: Bench) -> None:
    for n in range(1000):
        bench.offer(n, Rank.TROUBLE)
        bench.offer(("new", n), Rank.NEW)
    found = await bench.after(0)
    assert len(found) == 1000 + BURST
    assert bench.queue.idle is False
    assert len(await bench.after(1)) == PER_S
    bench.queue.hurry()
    assert len(await bench.after(0)) == 1000 - BURST - PER_S


@in_a_loop
async def test_commits_leave_a_reserve_for_what_goes_wrong(bench: Bench) -> None:
    for n in range(1000):
        bench.offer(("commit", n), Rank.COMMIT)
    assert len(await bench.after(COMMIT_S)) == BURST - RESERVE[Rank.COMMIT]
    for n in range(300):
        bench.offer(("lost", n), Rank.TROUBLE)
    assert await bench.after(0) == [("lost", n) for n in range(300)]


@in_a_loop
async def test_events_and_what_is_written_of_runs_do_not_starve_each_other(bench: Bench) -> None:
    for n in range(1000):
        bench.offer(("event", n), Rank.EVENT)
        bench.offer(("commit", n), Rank.COMMIT)
    found = Counter(each[0] for each in await bench.after(COMMIT_S) if isinstance(each, tuple))
    assert found == {"event": EVENT_BURST, "commit": BURST - RESERVE[Rank.COMMIT]}
    found = Counter(each[0] for each in await bench.after(1) if isinstance(each, tuple))
    assert found == {"event": EVENT_PER_S, "commit": PER_S}


@in_a_loop
async def test_one_write_of_a_key_and_few_of_all_are_under_way_at_once(bench: Bench) -> None:
    go, begun = asyncio.Event(), list[int]()

    async def work(key: int) -> None:
        begun.append(key)
        await go.wait()

    for _ in range(2):
        for key in range(AT_WORK + 5):
            bench.queue.offer(key, Rank.NEW, partial(work, key))
        bench.queue.tick()
        await asyncio.sleep(0)
    assert begun == list(range(AT_WORK))
    assert len(bench.queue) == AT_WORK + 5
    go.set()
    await bench.after(0)
    assert Counter(begun) == Counter([*range(AT_WORK + 5), *range(AT_WORK)])


@in_a_loop
async def test_a_write_that_fails_is_tried_again_after_pauses_that_grow_to_a_minute(bench: Bench) -> None:
    bench.broken = True
    bench.offer("run", Rank.TROUBLE)
    await bench.after(0)
    for failures in range(1, 9):
        pause_s = min(2.0**failures, MAX_BACKOFF_S)
        bench.broken = False
        assert await bench.after(pause_s - 0.5) == []
        bench.broken = True
        assert not bench.queue.idle
        await bench.after(0.5)
    bench.now_s -= 7200.0  # the clock is set back, and nothing waits for two hours
    bench.broken = False
    assert await bench.after(0) == []
    assert await bench.after(SOON_S) == ["run"]
    assert bench.counted == Counter(failed=9, written=1)


@in_a_loop
async def test_at_the_end_what_failed_is_tried_at_once(bench: Bench) -> None:
    bench.broken = True
    bench.offer("run", Rank.TROUBLE)
    await bench.after(0)
    bench.broken = False
    bench.queue.hurry()
    assert await bench.after(0) == ["run"]
