"""Runs a victim module in a process that is killed at a crash point."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def killed(victim: str, directory: Path, action: str, point: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.crash.{victim}", str(directory), action],
        env={**os.environ, "DELTASHARD_CRASH_AT": point}, cwd=Path(__file__).parents[2], capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, f"it did not pass {point}: {done.stderr}"
