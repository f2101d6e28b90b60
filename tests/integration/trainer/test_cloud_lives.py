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
from tests.support.tool import ROOT


def said(machine: Path) -> dict[str, str]:
    """What a life said, by its first words."""
    lines = (machine / "said").read_text().splitlines()
    return {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines}


def test_what_was_committed_is_what_another_machine_goes_on_from(
    google: CloudServer, azure: CloudServer, tmp_path: Path
) -> None:
    """To the bit, and it trains on to the same weights as the life that was killed."""
    urls = [cloud.url(cloud.new_bucket(), "runs") for cloud in (google, azure)]
    environment = {name: value for name, value in os.environ.items() if name != "DELTASHARD_SOCKET"}
    command = [sys.executable, "-m", "tests.integration.trainer.cloud_life", tmp_path, *urls]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=500)
    for n, url in enumerate(urls):
        first, second = said(tmp_path / f"first-{n}"), said(tmp_path / f"second-{n}")
        assert first["ended"] == str(-signal.SIGKILL), first
        assert first["saved"] == "10"
        assert second["ended"] == "0", second
        with open_store(url) as store:
            assert RunLog(store, "cloud").refresh().newest().step == 16
        resumed = next(each for each in second if each.startswith("resumed"))
        at = int(resumed.split()[1])
        assert at in {10, 12}  # the save that nobody waited for may have got through
        assert second[resumed] == first[f"step {at}"]
        for step in range(at + 1, 17):
            assert second[f"step {step}"] == first[f"step {step}"]
