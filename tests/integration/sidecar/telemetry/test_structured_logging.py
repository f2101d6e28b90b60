"""The log file of a child sidecar stays small, and a log that cannot be written costs nothing but itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from deltashard_sidecar.telemetry.structured_logging import bound, configure

path, turned = Path(sys.argv[1]), 0
log = configure("info", run="r")
for i in range(300):
    log.info("event", i=i)
    os.write(1, b"out\\n")
    turned += bound(path, limit_bytes=8192)
assert not bound(path.with_name("other"), limit_bytes=1)
log.info("turned", times=turned)
"""


def test_a_log_file_is_moved_aside_and_one_is_kept(tmp_path: Path) -> None:
    """Many events: two files of about the limit, stdout and stderr both follow, the newest lines are all there."""
    path = tmp_path / "sidecar.log"
    with path.open("ab") as out:
        subprocess.run([sys.executable, "-c", PROGRAM, path], stdout=out, stderr=out, timeout=240, check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sidecar.log", "sidecar.log.1"]
    assert path.stat().st_size < 10_000
    assert 8192 <= (tmp_path / "sidecar.log.1").stat().st_size < 10_000
    lines = ((tmp_path / "sidecar.log.1").read_text() + path.read_text()).splitlines()
    assert lines[-2] == "out"
    assert '"event": "turned"' in lines[-1]
    assert '"times": 0' not in lines[-1]
    events = [line for line in lines if '"event": "event"' in line]
    assert len(events) > 50
    assert '"i": 299' in events[-1]


def test_a_stderr_that_is_another_file_is_left_alone(tmp_path: Path) -> None:
    """A pod's stderr is the container's: nothing is moved."""
    elsewhere = tmp_path / "stderr"
    with elsewhere.open("ab") as out:
        path = tmp_path / "sidecar.log"
        path.write_text("mine")
        subprocess.run([sys.executable, "-c", PROGRAM, path], stdout=out, stderr=out, timeout=240, check=True)
    assert path.read_text() == "mine"
    assert not (tmp_path / "sidecar.log.1").exists()
    assert '"times": 0' in elsewhere.read_text().splitlines()[-1]


FULL = """
import os
from deltashard_sidecar.telemetry.structured_logging import configure

log = configure("info", run="r")
for i in range(10_000):
    log.info("event", i=i)
os.write(1, b"it goes on")
os._exit(0)
"""


def test_a_log_that_is_full_raises_nothing() -> None:
    """ENOSPC from the kernel at every line: a save that would log it must not fail of that."""
    with Path("/dev/full").open("ab") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL], stdout=subprocess.PIPE, stderr=full, timeout=240, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"it goes on")
