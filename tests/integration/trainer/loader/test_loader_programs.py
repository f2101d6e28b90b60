"""Whole loops over wrapped loaders, lost and resumed: bit-exact, or it is said which guarantee is lost."""

from __future__ import annotations

import pytest

from tests.integration.trainer.loader.loader_program import (
    EXACT,
    SAID,
    WORKERS,
    Program,
    turns_forgotten,
    two_to_one,
)
from tests.integration.trainer.loader.loader_world import resumed

STEPS = 16


@pytest.mark.parametrize("at", [3, 6, 13])
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT)
def test_a_resumed_program_goes_on_as_the_lost_one_would_have(program: Program, at: int) -> None:
    """In the middle and at the end of an epoch, and nobody is bothered."""
    wanted, seen, said = resumed(program, at, at + STEPS)
    assert seen == wanted
    assert not said


@pytest.mark.parametrize("at", [1])
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT)
def test_so_it_does_after_the_first_steps_or_it_is_said(program: Program, at: int) -> None:
    """How several loaders take turns is not known yet."""
    wanted, seen, said = resumed(program, at, at + STEPS)
    assert seen == wanted or said


@pytest.mark.parametrize("at", [3, 9])
@pytest.mark.parametrize("program", WORKERS.values(), ids=WORKERS)
def test_order_survives_with_workers(program: Program, at: int) -> None:
    """A sampler of the user's in front of workers, and workers that outlive their epoch."""
    wanted, seen, _ = resumed(program, at, at + STEPS)
    assert seen == wanted


@pytest.mark.parametrize("name", SAID)
def test_what_does_not_resume_exactly_is_said(name: str) -> None:
    """With the remedy, wherever the run was cut; each of them does differ somewhere."""
    program, words = SAID[name]
    differed = False
    for at in (1, 3, 7, 9):
        wanted, seen, said = resumed(program, at, at + STEPS)
        differed |= seen != wanted
        assert seen == wanted or any(words in text or "take turns" in text for text in said), (at, said)
    assert differed


@pytest.mark.parametrize("at", [4, 13])
def test_a_loader_that_is_passed_by_for_a_whole_pass_is_said(at: int) -> None:
    """Both were open at the cut; the one that goes on ends its pass, longer in a row than ever before."""
    wanted, seen, said = resumed(turns_forgotten, at, at + STEPS)
    assert seen != wanted
    assert any("was inside a pass over 'b'" in text for text in said)


@pytest.mark.parametrize("at", [4, 6, 13])
def test_two_turns_to_one_are_left_alone(at: int) -> None:
    """A loader that waits for its turn is not passed by."""
    wanted, seen, said = resumed(two_to_one, at, at + STEPS)
    assert seen == wanted
    assert not said
