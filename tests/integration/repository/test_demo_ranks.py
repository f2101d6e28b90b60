"""`make demo RANKS=2` in small: everything happens that is promised, to a real torchrun, and all of it comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import limit_s
from tests.support.tool import ROOT

STEPS = 240


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_die_and_are_resized_and_every_shard_comes_back(tmp_path: Path) -> None:
    """The demo compares every bit itself, and ends with another code if one differs."""
    ended = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "demo" / "ranks" / "run.py"),
            *("--ranks", "2", "--steps", str(STEPS), "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s(600),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads((tmp_path / "demo-ranks.json").read_text())
    assert said["broken"] == []
    assert [(event["world_before"], event["world_after"]) for event in said["events"]] == [
        (2, 2),
        (2, 1),
        (1, 2),
        (2, 2),
    ]
    for event in said["events"]:
        assert event["exact"] is True
        steps = set(event["restored_step_per_shard"].values())
        assert len(steps) == 1, "no two steps beside one another"
        assert event["mode"] == "none" or steps == {event["committed_step"]}
    page = (tmp_path / "demo-ranks.html").read_text()
    assert "Something was not as promised" not in page
    assert page.count('<div class="verdict good">') == len(said["events"])


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
