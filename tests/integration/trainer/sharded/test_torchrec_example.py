"""The example that trains a DLRM of TorchRec: killed in the middle of training, it goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.tool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Start = Callable[..., tuple["subprocess.Popen[bytes]", Path]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Start]:
    """Starts the example as the only rank, with these arguments, into `store`; returns the process and its log."""
    started: list[subprocess.Popen[bytes]] = []

    def start(store: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"log-{len(started)}"
        said = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }  # as torchrun says it
        said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
        said |= {"DELTASHARD_URL": f"file://{tmp_path / store}", "DELTASHARD_RUN": "clicks"}
        with log.open("wb") as file:
            script = ROOT / "examples" / "torchrec" / "train.py"
            command = [sys.executable, script, "--encoding=fp32", "--every-s=0.2", *arguments]
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | said))
        return started[-1], log

    yield start
    for process in started:
        process.kill()
        process.wait(30)


def _losses(log: Path) -> dict[int, str]:
    return {
        int(step): loss
        for step, loss in re.findall(r"^step (\d+), loss (\S+)$", log.read_text(), re.MULTILINE)
    }


def test_killed_and_started_again(train: Start, tmp_path: Path) -> None:
    """Every step after the restore has the loss that it has without a crash, to the last bit."""
    process, log = train("store", "--steps=1000000")
    entries = tmp_path / "store" / "clicks" / "log"

    def well_begun() -> bool:
        return (
            len(_losses(log)) >= 40 and len(list(entries.glob("*.json"))) >= 3
        )  # the attempt, two checkpoints

    eventually(lambda: well_begun() or process.poll() is not None, what="checkpoints", timeout_s=600)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    reached = max(_losses(log), default=0)
    assert reached >= 40, log.read_text()

    process, again = train("store", f"--steps={reached + 20}")
    assert process.wait(900) == 0, again.read_text()
    restored = int(re.findall(r"begins at step (\d+)", again.read_text())[0])
    assert 0 < restored <= reached
    process, undisturbed = train("other", f"--steps={reached + 20}")
    assert process.wait(900) == 0, undisturbed.read_text()
    whole = _losses(undisturbed)
    assert _losses(again) == {step: whole[step] for step in range(restored + 1, reached + 21)}
