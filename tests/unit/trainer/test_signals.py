"""SIGTERM after the urgent save, also for the first process of a container."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from deltashard.signals import TermHandler

heard = []
handler = TermHandler(grace_s=60.0, notice=lambda: heard.append(True))
assert handler.install()
signal.raise_signal(signal.SIGTERM)
assert heard and handler.left_s > 0
print("saved", os.getpid())
handler.chain()
print("still here")
sys.exit(0)
"""


def test_the_default_action_ends_the_process() -> None:
    """Without a handler of the user's, SIGTERM does what it always does."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "still here" not in done.stdout


def test_the_first_process_of_a_container_ends_as_well() -> None:
    """Process 1 cannot be ended by its own SIGTERM: it exits with 143, never with 0, and loses no output."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no new pid namespace can be made here (unshare)")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 143, (done.stdout, done.stderr)
    assert done.stdout == "saved 1\n"
