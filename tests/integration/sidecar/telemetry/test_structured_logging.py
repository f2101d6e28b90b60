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
log.info("turned", times=turned)
"""


def run(path: Path, out: Path) -> list[str]:
    with out.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, path], stdout=file, stderr=file, timeout=240, check=True
        )
    return out.read_text().splitlines()


def test_log_file_is_rotated_with_one_backup(tmp_path: Path) -> None:
    """Many events: two files of about the limit, the newest lines are all there. A stderr that is another's is left."""
    path = tmp_path / "sidecar.log"
    lines = run(path, path)
    assert path.stat().st_size < 10_000
    assert 8192 <= (tmp_path / "sidecar.log.1").stat().st_size < 10_000
    assert '"times": 0' not in lines[-1]
    events = [
        line for line in (tmp_path / "sidecar.log.1").read_text().splitlines() + lines if '"event"' in line
    ]
    assert len(events) > 50
    assert '"i": 299' in events[-2]
    assert '"times": 0' in run(path, tmp_path / "stderr")[-1]
    assert len(list(tmp_path.iterdir())) == 3


FULL = """
import os
from deltashard_sidecar.telemetry.structured_logging import configure

log = configure("info", run="r")
for i in range(10_000):
    log.info("event", i=i)
os.write(1, b"it goes on")
os._exit(0)
"""


def test_full_log_disk_raises_nothing() -> None:
    """ENOSPC from the kernel at every line: a save that would log it must not fail of that."""
    with Path("/dev/full").open("ab") as full:
        command = [sys.executable, "-c", FULL]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, b"it goes on")
