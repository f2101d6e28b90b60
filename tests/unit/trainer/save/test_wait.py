"""Why a cut waits: the whole table, and which reason is named first."""

from __future__ import annotations

import itertools

import pytest
from deltashard.save.wait import MESSAGE, REMEDY, Asker, SnapshotGate
from deltashard_proto.block_reason import BlockReason, text_of, word_of

ALL = set(Asker)
BINDS: dict[str, tuple[BlockReason, set[Asker]]] = {
    "torn": (BlockReason.TORN, ALL),
    "stepped": (BlockReason.STEPPED, ALL),
    "accumulating": (BlockReason.ACCUMULATING, ALL - {Asker.CLOSE}),
    "moved": (BlockReason.MOVED, ALL - {Asker.CLOSE}),
    "in_flight": (BlockReason.FLIGHT, ALL),
    "away": (BlockReason.AWAY, ALL),
    "backing_off": (BlockReason.BACK_OFF, {Asker.TIMER, Asker.REQUEST, Asker.URGENT}),
}
"""Fact -> the reason, and for whom it is one; the first that holds is named."""


@pytest.mark.parametrize("asker", list(Asker))
def test_the_first_reason_that_counts_for_who_asks(asker: Asker) -> None:
    """Every state of affairs, for everybody."""
    for facts in itertools.product([False, True], repeat=len(BINDS)):
        holds = dict(zip(BINDS, facts, strict=True))
        gate = SnapshotGate.of(**holds)
        reasons = [wait for name, (wait, askers) in BINDS.items() if holds[name] and asker in askers]
        assert gate.why(asker) == (reasons[0] if reasons else None), holds
        of_the_program = [BINDS[name][0] for name in list(BINDS)[:4] if holds[name]]
        assert gate.not_at_boundary == (of_the_program[0] if of_the_program else None), holds


def test_every_reason_has_words() -> None:
    """For messages."""
    assert set(MESSAGE) == set(REMEDY) == set(BlockReason)


def test_a_reason_goes_through_a_control_line() -> None:
    """A number of 64 bits, with the rank that blocks; what a newer trainer has is nothing that could be shown."""
    for reason in BlockReason:
        assert text_of(word_of(reason)) == str(reason)
        assert text_of(word_of(reason, 63)) == f"{reason} (rank 63)"
    assert text_of(0) == text_of(word_of(list(BlockReason)[-1]) + 1) == ""
