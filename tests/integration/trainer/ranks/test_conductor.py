"""Conductors over a real store: ranks that wish, stay, are busy and differ in pace cut at the same steps, all or none."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from deltashard.group.conductor import Conductor
from deltashard.group.order import Proposal
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from torch import nn

from tests.support.machine import limit_s

RANKS, STEPS = 4, 120


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rank:
    """A rank in a thread, whose training goes in lock-step with the others'."""

    def __init__(self, number: int, lockstep: threading.Barrier, seed: int) -> None:
        self.lockstep = lockstep
        self.chance = random.Random(f"{seed} {number}")
        self.alike = random.Random(seed)
        """The same draws on every rank: what all of them do."""
        self.clock = StepClock(Tracking(nn.Linear(1, 1)))
        self.clock.adopt(memoryview(bytearray(64)).cast("Q"))
        self.clock._line[SAVE_AT_STEP] = NEVER
        self.busy_until = 0
        self.cuts: dict[int, int] = {}
        self.missed: set[int] = set()
        """Went for a later step, when all ranks stayed and cut another first."""
        self.exact: dict[int, int | None] = {}
        self.conductor = Conductor(number, RANKS, clock=self.clock, why_not=self.why_not)
        self.conductor.begin("attempt/")

    def why_not(self, urgent: bool) -> str:
        return "busy" if self.clock.step < self.busy_until and not urgent else ""

    def boundary(self) -> bool:
        """What `step()` does about orders; whether it cut."""
        step = self.clock.step
        self.conductor.hold(step)
        cut = self.conductor.cut_at(step)
        if cut is None:
            return False
        if (missed := self.conductor.missed()) is not None:
            self.missed.add(missed)
        self.cuts[cut] = step
        self.busy_until = step + self.chance.randrange(4)
        self.conductor.taken(cut)
        return True

    def train(self) -> None:
        for _ in range(STEPS):
            self.lockstep.wait(limit_s(60))
            self.clock.tick()
            self.boundary()
            if self.chance.random() < 0.05:
                self.conductor.wish(Proposal(reason="timer", urgent=self.chance.random() < 0.3))
            if self.alike.random() < 0.05:
                self.stay(exact=self.alike.random() < 0.5)
        self.stay(exact=False)  # close()
        self.lockstep.wait(limit_s(60))
        self.conductor.close()

    def stay(self, *, exact: bool) -> None:
        """All ranks want this very step: they come to it together, however often that is off."""
        step = self.clock.step
        with self.conductor.stay():
            while step not in self.cuts.values():
                self.clock.expect()
                self.boundary()
                self.busy_until = 0  # the save before ends
                if step not in self.cuts.values():
                    self.conductor.wish(Proposal(reason="user", at=step if exact else 0, exact=exact))
                    self.clock.pause(0.05)
        self.exact[step] = step


@pytest.mark.parametrize("seed", [1])
def test_all_ranks_cut_at_the_same_steps(seed: int) -> None:
    lockstep = threading.Barrier(RANKS)
    ranks = [Rank(number, lockstep, seed) for number in range(RANKS)]

    def train(rank: Rank) -> None:
        try:
            rank.train()
        except BaseException:
            lockstep.abort()
            raise

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(train, ranks))
    first, *others = ranks
    assert len(first.cuts) >= 3
    assert STEPS in first.cuts.values()
    for other in others:
        assert other.cuts == first.cuts
        assert other.exact == first.exact
    assert not set.union(*(rank.missed for rank in ranks)) & first.cuts.keys()
    assert not any(rank.conductor.down for rank in ranks)


def test_a_rank_that_closed_is_waited_for_by_nobody() -> None:
    ranks = [Rank(number, threading.Barrier(1), 3) for number in range(2)]

    for rank in ranks:
        rank.conductor._world_size = 2
        rank.conductor.begin("two/")
    ranks[1].conductor.close()
    with ranks[0].conductor.stay():
        ranks[0].conductor.wish(Proposal(reason="close"))
        while not ranks[0].conductor.off:
            ranks[0].clock.expect()
            ranks[0].clock.pause(0.05)
    assert ranks[0].conductor.why_off == "rank 1: it has closed"
    ranks[0].conductor.close()


def test_an_attempt_that_goes_on_late_is_cut_at_its_next_step() -> None:
    """The steps before it took no time in it: taken for its pace, they put its first cut as many steps off."""
    ranks = [Rank(number, threading.Barrier(1), 5) for number in range(2)]
    for rank in ranks:
        rank.conductor._world_size = 2
        rank.clock.set(1_000_000)
        rank.conductor.begin("resumed/")
    ranks[1].conductor.wish(Proposal(reason="user"))
    for rank in ranks:
        while rank.conductor._orders.due is None:
            rank.clock.expect()
            rank.clock.pause(0.05)
    assert [rank.conductor._orders.due for rank in ranks] == [(1, 1_000_001)] * 2
    for rank in ranks:
        rank.conductor.close()


def test_without_the_store_nobody_is_held() -> None:
    """It went with torchrun's agent: training goes on, without saves, and the reason is there."""
    rank = Rank(0, threading.Barrier(1), 4)

    def gone(*_: object) -> None:
        from deltashard.errors import GroupLost

        raise GroupLost("the store is gone", where="here")

    rank.conductor._orders.promise(0)
    rank.conductor._store.get = gone  # type: ignore[method-assign]
    rank.conductor.hold(5)
    assert "the store is gone" in rank.conductor.down
    assert not rank.boundary()
    rank.conductor.close()
