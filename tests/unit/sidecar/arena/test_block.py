"""The block ledger: under any sequence of operations, a block has one owner."""

import pytest
from deltashard_sidecar.arena.block import (
    MIN_BLOCKS_PER_RANK,
    RESERVED_PER_RANK,
    BlockError,
    BlockLedger,
    NotGranted,
    Use,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def ledger(total: int = 8, *ranks: int) -> BlockLedger:
    made = BlockLedger(total=total, block_bytes=1 << 20)
    for rank in ranks or (0,):
        assert made.admit(rank)
    return made


def test_two_ranks_get_fair_shares() -> None:
    """Each rank gets half of the unreserved blocks. A rank that serves reads does not use the other's reserve."""
    blocks = ledger(12, 0, 1)
    assert len(blocks.grant(0)) == 4
    assert len(blocks.grant(1)) == 4
    taken = [blocks.take_serving(0) for _ in range(4)]
    assert sum(t is not None for t in taken) == RESERVED_PER_RANK
    assert blocks.take_serving(1) is not None
    assert blocks.take_serving(1) is not None


def test_an_arena_too_small_for_one_more_rank_refuses_it() -> None:
    blocks = ledger(MIN_BLOCKS_PER_RANK, 0)
    assert blocks.admit(0)
    assert not blocks.admit(1)


def test_only_granted_blocks_may_be_handed_over() -> None:
    blocks = ledger(12, 0, 1)
    (a,) = blocks.grant(0, 1)
    blocks.check_granted(0, a)
    for rank, index in ((1, a), (0, (a + 1) % 12), (0, 99), (0, -1)):
        with pytest.raises(NotGranted):
            blocks.check_granted(rank, index)
    blocks.received(a)
    blocks.closed(a)
    with pytest.raises(NotGranted):
        blocks.check_granted(0, a)
    with pytest.raises(BlockError):
        blocks.closed(a)


def test_no_block_is_granted_during_the_embargo() -> None:
    """After a restart, blocks are unsafe until the old writers are known to have exited."""
    blocks = ledger()
    blocks.embargo.add(0)
    assert blocks.grant(0) == []
    assert blocks.take_serving(0) is None
    blocks.embargo.discard(0)
    assert blocks.grant(0)


class LedgerMachine(RuleBasedStateMachine):
    """Random operations of two ranks, compared with a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger(16, 0, 1)

    ranks = st.sampled_from([0, 1])

    @rule(rank=ranks, limit=st.integers(1, 8))
    def grant(self, rank: int, limit: int) -> None:
        before = {b.index for b in self.ledger.blocks if b.use is not Use.FREE}
        got = self.ledger.grant(rank, limit)
        assert not set(got) & before
        assert len(set(got)) == len(got) <= limit

    @precondition(lambda self: any(b.use is Use.GRANTED for b in self.ledger.blocks))
    @rule(data=st.data(), close=st.booleans())
    def hand_over(self, data: st.DataObject, close: bool) -> None:
        block = data.draw(st.sampled_from([b for b in self.ledger.blocks if b.use is Use.GRANTED]))
        self.ledger.received(block.index)
        if close:
            self.ledger.closed(block.index)

    @precondition(lambda self: any(b.pending for b in self.ledger.blocks))
    @rule(data=st.data())
    def encode(self, data: st.DataObject) -> None:
        self.ledger.encoded(data.draw(st.sampled_from([b for b in self.ledger.blocks if b.pending])).index)

    @rule(rank=ranks)
    def serve(self, rank: int) -> None:
        got = self.ledger.take_serving(rank)
        if got is not None:
            assert self.ledger.blocks[got].rank == rank

    @precondition(lambda self: any(b.use is Use.SERVING for b in self.ledger.blocks))
    @rule(data=st.data())
    def applied(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.ledger.blocks if b.use is Use.SERVING]))
        self.ledger.served(block.rank, block.index)

    @rule(rank=ranks, use=st.sampled_from([Use.GRANTED, Use.SERVING]))
    def break_stream(self, rank: int, use: Use) -> None:
        self.ledger.quarantine(rank, use)

    @rule(rank=ranks)
    def writer_gone(self, rank: int) -> None:
        self.ledger.release_quarantined(rank)
        assert not self.ledger.held(rank, Use.QUARANTINED)

    @rule(rank=ranks)
    def abort(self, rank: int) -> None:
        self.ledger.release_granted(rank)
        self.ledger.release_serving(rank)
        assert not self.ledger.held(rank, Use.GRANTED, Use.SERVING)

    @invariant()
    def accounted(self) -> None:
        free = [b.index for b in self.ledger.blocks if b.use is Use.FREE]
        assert sorted(self.ledger._free) == free
        assert sum(self.ledger.counts().values()) == 16
        for block in self.ledger.blocks:
            assert block.pending >= 0
            assert block.use is not Use.FREE or (block.pending == 0 and block.rank == -1)
            assert block.use is not Use.FILLED or block.pending > 0

    def teardown(self) -> None:
        for rank in (0, 1):
            self.ledger.release_granted(rank)
            self.ledger.release_serving(rank)
            self.ledger.release_quarantined(rank)
        for block in self.ledger.blocks:
            while block.pending:
                self.ledger.encoded(block.index)
        assert self.ledger.free == 16, "no block is ever lost"


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
