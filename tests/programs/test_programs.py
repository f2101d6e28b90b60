"""Drawn user programs, killed and resumed: each comes back exactly, or a warning or an error says that it does not."""

from __future__ import annotations

import os

import pytest

from tests.programs.dimension import draw
from tests.programs.run import report

COUNT = int(os.environ.get("DELTASHARD_TEST_PROGRAMS", "10"))
"""500 take about half an hour."""


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * COUNT)
def test_drawn_programs_resume_exactly_or_are_told() -> None:
    bad = report(draw(seed) for seed in range(COUNT))

    assert not bad, "\n".join(bad)
