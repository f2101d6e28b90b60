"""Orders: whatever the interleaving, one step for all ranks or none, nobody waits for ever, nobody is left behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from deltashard.group.order import AHEAD_S, Ack, Orders, Proposal, RoundVerdict, limit_after, settled
from deltashard_checkpoint.errors import InternalBug
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass
class Shared:
    """The group's store: compare-and-set, and what was set."""

    held: dict[str, bytes] = field(default_factory=dict)

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self.held.setdefault(key, value)


class Rank:
    """A rank whose training thread and order thread take turns as the test says, one look or store call at a time."""

    def __init__(self, rank: int, world_size: int, shared: Shared, margin: int) -> None:
        self.rank, self.world_size, self.shared, self.margin = rank, world_size, shared, margin
        self.orders = Orders()
        self.step = 0
        self.dead = self.waiting = False
        self.why_not = ""
        self.cuts: dict[int, int] = {}
        self.acked: dict[int, int] = {}
        self.thread = self._order_thread()

    def train(self) -> None:
        """One step and its boundary, or another look at a boundary that waits."""
        if self.dead:
            return
        if not self.waiting:
            self.step += 1
        self.waiting = self.orders.held(self.step)
        if not self.waiting and (cut := self.orders.cut_at(self.step)) is not None:
            self.cuts[cut] = self.step
            self.orders.taken(cut)

    def propose(self) -> None:
        if not self.dead:
            self.shared.compare_set(f"order/{self.orders.number}", Proposal(reason="timer").text())

    def look(self, *, overdue: bool) -> None:
        """The order thread goes on to its next wait."""
        if not self.dead:
            self.overdue = overdue
            next(self.thread)

    def _order_thread(self):
        while True:
            n = self.orders.number
            if f"order/{n}" not in self.shared.held:
                yield
                continue
            while True:
                seen = self.step
                yield
                self.orders.promise(seen + self.margin)
                yield
                if self.orders.kept(self.step):
                    break
            assert self.orders.limit is not None
            self.acked[n] = self.orders.limit
            ack = Ack(limit=self.orders.limit, why_not=self.why_not)
            self.shared.held[f"ack/{n}/{self.rank}"] = ack.text()
            while f"verdict/{n}" not in self.shared.held:
                acks = {
                    r: Ack.of(self.shared.held[key])
                    for r in range(self.world_size)
                    if (key := f"ack/{n}/{r}") in self.shared.held
                }
                proposal = Proposal.of(self.shared.held[f"order/{n}"])
                verdict = settled(proposal, acks, self.world_size, overdue=self.overdue)
                yield
                if verdict is not None:
                    self.shared.compare_set(f"verdict/{n}", verdict.text())
            self.orders.read(RoundVerdict.of(self.shared.held[f"verdict/{n}"]))


moves = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "look", "look", "propose", "late", "die", "busy"]),
        st.integers(0, 3),
    ),
    max_size=250,
)


@settings(max_examples=300, deadline=None)
@given(world_size=st.integers(2, 4), margins=st.lists(st.integers(1, 4), min_size=4, max_size=4), story=moves)
def test_all_ranks_cut_at_one_step_or_none_does(world_size, margins, story) -> None:
    shared = Shared()
    ranks = [Rank(r, world_size, shared, margins[r]) for r in range(world_size)]
    for what, which in story:
        rank = ranks[which % world_size]
        # Lock-step: a rank that is a step ahead waits for the others in its next collective.
        behind = min((r.step for r in ranks), default=0)
        if what == "train" and (rank.step <= behind or rank.waiting):
            rank.train()
        elif what in ("look", "late"):
            rank.look(overdue=what == "late")
        elif what == "propose":
            rank.propose()
        elif what == "busy":
            rank.why_not = "" if rank.why_not else "the save before is in flight"
        elif what == "die" and which == 3:
            rank.dead = True
    for n in range(1, 1 + max(r.orders.number for r in ranks)):
        steps = {r.cuts[n] for r in ranks if n in r.cuts}
        assert len(steps) <= 1
        verdict = shared.held.get(f"verdict/{n}")
        if steps:
            assert verdict is not None
            assert RoundVerdict.of(verdict).at == steps.pop()
    # From here on every rank that lives is let run: nobody is held, and what goes is reached by all of them.
    for _ in range(200):
        for rank in ranks:
            rank.look(overdue=True)
        behind = min(r.step for r in ranks if not r.dead) if any(not r.dead for r in ranks) else 0
        for rank in ranks:
            if rank.step <= behind or rank.waiting:
                rank.train()
    for rank in ranks:
        assert rank.dead or not rank.waiting
        assert rank.dead or rank.orders.due is None
    for n in range(1, 1 + max(r.orders.number for r in ranks)):
        verdict = shared.held.get(f"verdict/{n}")
        at = None if verdict is None else RoundVerdict.of(verdict).at
        for rank in ranks:
            if not rank.dead:
                assert rank.cuts.get(n) == at
            assert n not in rank.cuts or rank.cuts[n] == at


def test_an_order_is_off_for_a_reason_that_names_the_rank() -> None:
    ready, busy = Ack(limit=7), Ack(limit=9, why_not="the sidecar was away")
    any_step = Proposal(reason="timer")
    assert settled(any_step, {0: ready}, 2, overdue=False) is None
    assert settled(any_step, {0: ready, 1: Ack(limit=9)}, 2, overdue=True) == RoundVerdict(at=9)
    away = "rank 1: the sidecar was away"
    assert settled(any_step, {1: busy}, 3, overdue=False) == RoundVerdict(at=None, why_off=away, rank=1)
    missing = "no answer of ranks 0, 2 in time"
    assert settled(any_step, {1: ready}, 3, overdue=True) == RoundVerdict(at=None, why_off=missing, rank=0)
    many = settled(any_step, {}, 4096, overdue=True)
    assert many is not None
    assert many.why_off == "no answer of ranks 0, 1, 2, 3, 4, 5, 6, 7 and more in time"


def test_a_rank_that_stays_is_not_asked_to_go_on() -> None:
    """It waits for a save, or closes: only its own step is one that all can cut."""
    stays, goes = Ack(limit=7, stays=True), Ack(limit=9)
    off = RoundVerdict(at=None, why_off="rank 0 stands at step 7, rank 1 continues to step 9", rank=1)
    assert settled(Proposal(reason="close"), {0: stays, 1: goes}, 3, overdue=False) == off
    assert settled(Proposal(reason="close"), {0: stays, 1: stays}, 2, overdue=False) == RoundVerdict(at=7)


def test_an_exact_proposal_means_one_step() -> None:
    exact = Proposal(reason="user", at=7, exact=True)
    assert settled(exact, {0: Ack(limit=7), 1: Ack(limit=7)}, 2, overdue=False) == RoundVerdict(at=7)
    past = RoundVerdict(at=None, why_off="rank 1 may be past step 7", rank=1)
    assert settled(exact, {0: Ack(limit=7), 1: Ack(limit=8)}, 3, overdue=False) == past


def test_a_cut_that_was_never_taken_is_known_when_the_next_is_due() -> None:
    """The rank has no part in it, and says so."""
    orders = Orders()
    orders.read(RoundVerdict(at=7))
    orders.read(RoundVerdict(at=None, why_off="x"))
    assert (orders.due, orders.missed) == ((1, 7), None)
    orders.read(RoundVerdict(at=5))
    assert (orders.due, orders.missed) == ((3, 5), 1)


def test_a_limit_lies_as_far_ahead_as_an_order_takes() -> None:
    assert limit_after(10, 5.0) == 11
    assert limit_after(10, AHEAD_S) == 11
    assert limit_after(10, AHEAD_S / 20) == 30
    assert limit_after(10, 0.0) == 11


@pytest.mark.parametrize(
    "said",
    [
        Proposal(reason="é", urgent=True, at=3, exact=True),
        Ack(limit=3, why_not="x", stays=True),
        RoundVerdict(at=5),
        RoundVerdict(at=None, why_off="y"),
    ],
)
def test_words_read_back_as_they_were_said(said: Proposal | Ack | RoundVerdict) -> None:
    assert type(said).of(said.text()) == said


def test_a_verdict_before_a_promise_is_a_bug() -> None:
    """Some rank may have passed it."""
    orders = Orders()
    orders.promise(8)
    with pytest.raises(InternalBug, match="before the limit 8"):
        orders.read(RoundVerdict(at=7))


def test_a_verdict_between_two_looks_at_a_promise_is_no_error() -> None:
    """The order thread may end the promise at any instant of a question that the training thread asks."""

    class Ending(Orders):
        @property
        def limit(self) -> int | None:
            found, self._limit = self._limit, None
            return found

        @limit.setter
        def limit(self, value: int | None) -> None:
            self._limit = value

    for ask in (Orders.held, Orders.kept):
        orders = Ending()
        orders.promise(7)
        assert ask(orders, 7) == (ask is Orders.held)
        assert ask(orders, 7) is False
