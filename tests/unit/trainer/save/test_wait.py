"""Why a cut waits: the whole table, and which reason is named first."""

from __future__ import annotations

import itertools

import pytest
from deltashard.save.wait import Asker, Standing, Wait

ALL = set(Asker)
BINDS: dict[str, tuple[Wait, set[Asker]]] = {
    "torn": (Wait.TORN, ALL),
    "stepped": (Wait.STEPPED, ALL),
    "accumulating": (Wait.ACCUMULATING, ALL - {Asker.CLOSE}),
    "moved": (Wait.MOVED, ALL - {Asker.CLOSE}),
    "in_flight": (Wait.FLIGHT, ALL),
    "away": (Wait.AWAY, ALL),
    "backing_off": (Wait.BACK_OFF, {Asker.TIMER, Asker.REQUEST, Asker.URGENT}),
}
"""Fact -> the reason, and for whom it is one; the first that holds is named."""


@pytest.mark.parametrize("asker", list(Asker))
def test_the_first_reason_that_counts_for_who_asks(asker: Asker) -> None:
    """Every state of affairs, for everybody."""
    for facts in itertools.product([False, True], repeat=len(BINDS)):
        holds = dict(zip(BINDS, facts, strict=True))
        standing = Standing.of(**holds)
        reasons = [wait for name, (wait, askers) in BINDS.items() if holds[name] and asker in askers]
        assert standing.why(asker) == (reasons[0] if reasons else None), holds
        of_the_program = [BINDS[name][0] for name in list(BINDS)[:4] if holds[name]]
        assert standing.gone == (of_the_program[0] if of_the_program else None), holds


def test_every_reason_has_words() -> None:
    """For messages."""
    assert all(wait.said for wait in Wait)
