"""Training on Google's and Azure's storage: a save, trainer and sidecar killed at once, another machine goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.server.cloud_server import CloudServer

LIFE = Path(__file__).parent / "cloud_life.py"


def live(machine: Path, url: str, steps: int, save_at: int = 0) -> tuple[int, dict[str, str]]:
    """(exit code, what it said by its first words) of one life on a machine of its own."""
    machine.mkdir()
    environment = os.environ | {"XDG_CACHE_HOME": str(machine), "TMPDIR": str(machine)}
    environment.pop("DELTASHARD_SOCKET", None)
    done = subprocess.run(
        [sys.executable, LIFE, url, str(steps), str(save_at)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in done.stdout.splitlines()}
    assert said, done.stderr[-3000:]
    return done.returncode, said


def test_what_was_committed_is_what_another_machine_goes_on_from(cloud: CloudServer, tmp_path: Path) -> None:
    """To the bit, and it trains on to the same weights as the life that was killed."""
    url = cloud.url(cloud.new_bucket(), "runs")
    code, first = live(tmp_path / "first", url, 20, save_at=10)
    assert code == -signal.SIGKILL
    assert first["saved"] == "10"
    code, second = live(tmp_path / "second", url, 16)
    assert code == 0
    with open_store(url) as store:
        assert RunLog(store, "cloud").refresh().newest().step == 16
    resumed = next(each for each in second if each.startswith("resumed"))
    at = int(resumed.split()[1])
    assert at in {10, 12}  # the save that nobody waited for may have got through
    assert second[resumed] == first[f"step {at}"]
    for step in range(at + 1, 17):
        assert second[f"step {step}"] == first[f"step {step}"]
