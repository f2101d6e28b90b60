"""A child sidecar's log file has a bounded size, and an unwritable log affects nothing else."""

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
    """After many events there are two files of about the limit with the newest lines.

    A redirected stderr is unchanged.
    """
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
os.write(1, b"the process continues")
os._exit(0)
"""


def test_full_log_disk_raises_nothing() -> None:
    """The kernel returns ENOSPC for every line. A save that logs must not fail because of it."""
    with Path("/dev/full").open("ab") as full:
        command = [sys.executable, "-c", FULL]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, b"the process continues")
