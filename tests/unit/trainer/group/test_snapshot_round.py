"""The outcome of a snapshot round, and how a rank applies it. The group model covers the interleavings."""

from __future__ import annotations

import pytest
from deltashard.group.snapshot_round import Ack, Proposal, RoundVerdict, SnapshotRounds, decide
from deltashard_checkpoint.errors import InternalBug

ANY, CLOSE, EXACT = (
    Proposal(reason="timer"),
    Proposal(reason="close"),
    Proposal(reason="user", at=7, exact=True),
)
READY, NINE, BUSY = Ack(limit=7), Ack(limit=9), Ack(limit=9, not_ready_reason="the sidecar was disconnected")
STAYS = Ack(limit=7, holds_step=True)
VERDICTS = {
    "not all answered": (ANY, {0: READY}, 2, None),
    "the last limit": (ANY, {0: READY, 1: NINE}, 2, RoundVerdict(at=9)),
    "one is not ready": (ANY, {1: BUSY}, 3, RoundVerdict(at=None, cancel_reason="rank 1: the sidecar was disconnected", rank=1)),
    # If a rank waits for a save or closes, all ranks can save only its current step.
    "one stays": (CLOSE, {0: STAYS, 1: NINE}, 3, RoundVerdict(
        at=None, cancel_reason="rank 0 is held at step 7, rank 1 continues to step 9", rank=1
    )),
    "all stay": (CLOSE, {0: STAYS, 1: STAYS}, 2, RoundVerdict(at=7)),
    "at the exact step": (EXACT, {0: READY, 1: READY}, 2, RoundVerdict(at=7)),
    "past the exact step": (EXACT, {0: READY, 1: Ack(limit=8)}, 3, RoundVerdict(
        at=None, cancel_reason="rank 1 may be past step 7", rank=1
    )),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_order_is_resolved_or_cancelled_with_the_rank_named(case: str) -> None:
    proposal, acks, world, verdict = VERDICTS[case]
    assert decide(proposal, acks, world, overdue=False) == verdict


def test_unresponsive_rank_is_named() -> None:
    missing = "no answer of ranks 0, 2 in time"
    assert decide(ANY, {1: READY}, 3, overdue=True) == RoundVerdict(at=None, cancel_reason=missing, rank=0)
    many = decide(ANY, {}, 4096, overdue=True)
    assert many.cancel_reason == "no answer of ranks 0, 1, 2, 3, 4, 5, 6, 7 and more in time"


def test_verdict_before_a_promise_raises() -> None:
    """Another rank may have passed the promised step."""
    rounds = SnapshotRounds()
    rounds.promise(8)
    with pytest.raises(InternalBug, match="before the limit 8"):
        rounds.apply_verdict(RoundVerdict(at=7))


def test_verdict_between_two_promise_checks_is_no_error() -> None:
    """The order thread may end the promise at any time between two checks by the training thread."""

    class EndingOrders(SnapshotRounds):
        @property
        def limit(self) -> int | None:
            found, self._limit = self._limit, None
            return found

        @limit.setter
        def limit(self, value: int | None) -> None:
            self._limit = value

    for ask in (SnapshotRounds.must_wait, SnapshotRounds.limit_holds):
        rounds = EndingOrders()
        rounds.promise(7)
        assert ask(rounds, 7) == (ask is SnapshotRounds.must_wait)
        assert ask(rounds, 7) is False
