"""Complete loops over wrapped loaders, interrupted and resumed: bit-exact, or with a warning that names the loss."""

from __future__ import annotations

import pytest

from tests.integration.trainer.loader.loader_program import EXACT, INEXACT, WORKERS
from tests.integration.trainer.loader.simulated_trainer import LoaderProgram, resumed

STEPS = 16


@pytest.mark.parametrize("at", [3, 6, 13])
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT)
def test_resumed_program_matches_uninterrupted_one(program: LoaderProgram, at: int) -> None:
    """The interruption is in the middle or at the end of an epoch, without a warning."""
    outcome = resumed(program, at, at + STEPS)
    assert outcome.seen == outcome.wanted
    assert not outcome.warnings


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT)
def test_early_resume_is_exact_or_warns(program: LoaderProgram, at: int) -> None:
    """At this point the nesting of loaders is not known yet."""
    outcome = resumed(program, at, at + STEPS)
    assert outcome.exact or outcome.warnings


@pytest.mark.parametrize("at", [3, 9])
@pytest.mark.parametrize("program", WORKERS.values(), ids=WORKERS)
def test_workers_give_the_same_batches(program: LoaderProgram, at: int) -> None:
    """The cases cover a user's sampler, persistent workers, and random numbers drawn in workers."""
    outcome = resumed(program, at, at + STEPS)
    assert outcome.seen == outcome.wanted


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_resume_warns(name: str) -> None:
    """The warning contains the remedy at every step of interruption."""
    program, message = INEXACT[name]
    for at in (3, 7, 9):
        outcome = resumed(program, at, at + 2 * STEPS)
        messages = outcome.warnings + outcome.infos
        assert outcome.exact or any(message in text for text in messages), (at, messages)
