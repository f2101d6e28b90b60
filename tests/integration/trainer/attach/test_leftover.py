"""Arenas of killed sidecars are freed when they are idle and unlocked, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from deltashard.attach.lock import free_arenas, hold_file, release_file

HOLD = """
import fcntl, sys
held = open(sys.argv[1], "r+")
fcntl.lockf(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def home(base: Path, name: str, *, age_s: float) -> Path:
    """Create a runtime directory of a killed sidecar in which every file is `age_s` old."""
    made = base / name
    made.mkdir()
    (made / "arena").write_bytes(bytes(4096))
    for other in ("LOCK", "trainer-0.lock", "sidecar.log"):
        (made / other).touch()
    for path in (*made.iterdir(), made):
        os.utime(path, (time.time() - age_s,) * 2)
    return made


def test_only_idle_unlocked_arenas_are_freed(tmp_path: Path) -> None:
    """Recent arenas, the caller's own, and those with a live sidecar or trainer remain. A freed arena keeps its log."""
    old = 25 * 3600.0
    gone = home(tmp_path, "gone", age_s=old)
    mine = home(tmp_path, "mine", age_s=old)
    recent = home(tmp_path, "recent", age_s=60.0)
    served = home(tmp_path, "served", age_s=old)
    trained = home(tmp_path, "trained", age_s=old)
    here = home(tmp_path, "here", age_s=old)
    hold_file(here / "trainer-0.lock")
    os.utime(here / "trainer-0.lock", (time.time() - old,) * 2)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for path in (served / "LOCK", trained / "trainer-0.lock")
    ]
    try:
        for holder in holders:
            assert holder.stdout.readline() == "held\n"
        assert free_arenas(tmp_path, keep=mine) == 4096
        assert [
            h.name for h in (gone, mine, recent, served, trained, here) if not (h / "arena").exists()
        ] == ["gone"]
        assert (gone / "sidecar.log").exists()
        # The scan did not release the lock that this process holds.
        probe = subprocess.run(
            [sys.executable, "-c", "import fcntl,sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
             here / "trainer-0.lock"], capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert probe.returncode != 0
    finally:
        for holder in holders:
            holder.communicate()
        release_file(here / "trainer-0.lock")
    assert free_arenas(tmp_path, keep=mine) == 3 * 4096
