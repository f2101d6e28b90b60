"""The trainer of the Kubernetes examples, laid out as in its image: told to stop, it saves; started again, it goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.published import PUBLISHED
from tests.support.server.minio_server import ROOT

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """train.py among the files of the image, at their places."""
    image = next(each for each in PUBLISHED if each.target == "example")
    for inside, outside in image.files.items():
        target = tmp_path / "image" / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / outside).is_dir():
            shutil.copytree(ROOT / outside, target)
        else:
            shutil.copy(ROOT / outside, target)
    return tmp_path / "image" / image.entrypoint[-1].lstrip("/")


@pytest.fixture
def train(script: Path, tmp_path: Path) -> Iterator[object]:
    """Starts the trainer with these arguments; returns the process and its log."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"log-{len(started)}"
        store = f"--url=file://{tmp_path / 'store'}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, script, store, "--run=baskets", "--log-every=1", *arguments],
                stdout=file,
                stderr=file,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        started.append(process)
        return process, log

    yield start
    for process in started:
        process.kill()
        process.wait(30)


def _steps(log: Path) -> list[int]:
    return [int(n) for n in re.findall(r"train INFO step (\d+), loss", log.read_text())]


def test_stopped_and_started_again(train: object) -> None:
    """SIGTERM: the last step is saved and the process does not exit 0; the next one restores it and says from where."""
    process, log = train("--steps=1000000")  # type: ignore[operator]
    eventually(lambda: len(_steps(log)) >= 10 or process.poll() is not None, what="ten steps", timeout_s=600)
    assert "begins at step 0" in log.read_text(), log.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) in {-signal.SIGTERM, 128 + signal.SIGTERM}
    reached = _steps(log)[-1]

    process, again = train(f"--steps={reached + 5}")  # type: ignore[operator]
    assert process.wait(600) == 0, again.read_text()
    (restored, source) = re.findall(r"restored step (\d+) from the (\w+) in", again.read_text())[0]
    assert int(restored) == reached
    assert source in {"cache", "store"}
    assert _steps(again) == list(range(reached + 1, reached + 6))
    assert f"done: step {reached + 5}, AUC 0." in again.read_text()
