"""Random user programs, killed and resumed: each resumes exactly, or a warning or error reports the difference."""

from __future__ import annotations

import json
import os

import pytest

from tests.programs.dimension import differences, draw
from tests.programs.program_runner import ProgramRunner

COUNT = int(os.environ.get("DELTASHARD_TEST_PROGRAMS", "10"))
"""500 take about half an hour."""
ALLOWED = ("exact", "reported", "another loader between epochs", "another program from its beginning")
"""In the last two, no uninterrupted run is comparable: the loader changed between epochs, or anything before the first
checkpoint."""


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * COUNT)
def test_random_programs_resume_exactly_or_report() -> None:
    """Failures are printed as the differences from the plain program, for a case in test_cases.py."""
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
            if verdict["outcome"] not in ALLOWED:
                bad.append(f"{json.dumps(differences(spec))}: {verdict}")
    assert not bad, "\n".join(bad)
