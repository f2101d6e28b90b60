"""Drawn user programs, killed and resumed: each comes back exactly, or a warning or an error says that it does not."""

from __future__ import annotations

import json
import os

import pytest

from tests.programs.dimension import differences, draw
from tests.programs.program_runner import ProgramRunner

COUNT = int(os.environ.get("DELTASHARD_TEST_PROGRAMS", "10"))
"""500 take about half an hour."""
GOOD = ("exact", "reported", "another loader between epochs", "another program from its beginning")
"""Between epochs a program may give another loader, and before the first checkpoint it may be another one: there is no
uninterrupted run to compare with."""


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * COUNT)
def test_random_programs_resume_exactly_or_report() -> None:
    """What is bad is printed as the differences from the plain program: a case for test_cases.py."""
    bad = []
    with ProgramRunner() as runner:
        for spec in map(draw, range(COUNT)):
            verdict = runner.verdict(spec)
            print(
                verdict["outcome"],
                json.dumps(differences(spec)),
                *verdict["reported"],
                sep="\n    ",
                flush=True,
            )
            if verdict["outcome"] not in GOOD:
                bad.append(f"{json.dumps(differences(spec))}: {verdict}")
    assert not bad, "\n".join(bad)
