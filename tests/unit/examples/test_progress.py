"""The demo's progress line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.eventually import eventually
from tests.support.tool import ROOT


@pytest.mark.parametrize("terminal", [False, True])
def test_says_how_far_the_training_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    import progress

    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with progress.Progress(console, tmp_path, 2500):
        eventually(
            lambda: terminal or "step 0 of 2,500" in out.getvalue(), what="a line before the first step"
        )
        (tmp_path / "steps-1.jsonl").write_text(json.dumps([0.0, 750, 0.5, 0.001, 1, False]) + "\n")
        eventually(lambda: "step 750 of 2,500" in out.getvalue(), what="a line of the step")
    sys.modules.pop("progress", None)
