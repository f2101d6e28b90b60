"""A training on a GPU is killed and resumed in another process with the same state and the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import DEVICES, needs_gpu
from tests.support.machine import limit_s
from tests.support.tool import ROOT

STEPS = 60


def train(store: Path, *, code: int = 0, **how: Any) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "DELTASHARD_SOCKET"}
    environment |= {"XDG_CACHE_HOME": str(store.parent / "cache"), "DELTASHARD_PRECOPY_BYTES": "1"}
    arguments = json.dumps({"url": f"file://{store}", **how})
    command = [sys.executable, "-m", "tests.integration.trainer.cuda.training_process", arguments]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(120), check=False
    )
    assert done.returncode == code, done.stderr[-4000:] + done.stdout[-1000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def end_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["what"] == "end")


@pytest.mark.parametrize("device", DEVICES)
def test_killed_training_resumes_exactly(tmp_path: Path, device: str) -> None:
    """SIGKILL hits between two snapshots.

    The restored state equals the snapshot, and the end equals an uninterrupted run.
    """
    first = train(tmp_path / "store", device=device, steps=STEPS, kill_at=37, code=-signal.SIGKILL)
    snapshots = {line["step"]: line["digest"] for line in first if line["what"] == "snapshot"}
    second = train(tmp_path / "store", device=device, steps=STEPS)
    restored, end = second[0], end_of(second)
    assert restored["step"] in snapshots
    assert restored["digest"] == snapshots[restored["step"]], "the restored state differs from the snapshot"
    whole, again = (end_of(train(tmp_path / name, device=device, steps=STEPS)) for name in ("whole", "again"))
    print(json.dumps({"deterministic": whole["digest"] == again["digest"], **whole}))
    if whole["digest"] == again["digest"]:  # atomics may make two runs differ legitimately
        assert end["digest"] == whole["digest"], "the resumed run differs from the uninterrupted one"
    assert not whole["failures"]
    assert not whole["faults"]
    if device == "cuda":
        assert whole["ahead"] == 0  # from a GPU all rows are copied at the snapshot
    trackers = {name: how for name, (how, _) in whole["trackers"].items()}
    assert [*trackers.values()] == ["gradients"] * 3 + ["hashes"] * 3, whole["trackers"]


@needs_gpu
@pytest.mark.parametrize("way", [("cuda", "cpu"), ("cpu", "cuda")], ids=" to ".join)
def test_checkpoint_from_another_device(tmp_path: Path, way: tuple[str, str]) -> None:
    """Tables, state and dense parameters are device-independent. Generators are not, and strict=False skips them."""
    there, here = way
    train(tmp_path / "store", device=there, steps=17, strict=False)
    second = train(tmp_path / "store", device=here, steps=24, strict=False)
    assert (second[0]["step"], end_of(second)["step"]) == (17, 24)
