"""`make demo RANKS=N` refuses what it cannot do; .ci/run has it whole, with four ranks, and it ends badly if a bit differs."""

from __future__ import annotations

import subprocess
import sys

from tests.support.machine import limit_s
from tests.support.tool import ROOT


def test_worlds_that_cannot_share_a_batch_are_refused_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo" / "ranks" / "run.py", "--ranks", "7"],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s(60),
    )
    assert ended.returncode == 2
    assert "the worlds 7, 3, 4 do not share a batch of 120 evenly" in ended.stderr
