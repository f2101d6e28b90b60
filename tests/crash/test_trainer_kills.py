"""SIGKILL of the trainer at each of its crash points: the newest committed checkpoint is restored exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

FIRST, SECOND = 6, 10
POINTS = (
    "precopy.prepared", "precopy.first_batch", "snapshot.begun", "snapshot.first_batch", "snapshot.before_seal",
    "snapshot.after_seal", "restore.first_applied", "restore.before_dense",
)  # fmt: skip


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Return every point's result from trainer_kills.py."""
    work = tmp_path_factory.mktemp("kills")
    environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).parent / "trainer_kills.py"), str(work), *POINTS],
        env=environment, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return work, {each["point"]: each for each in results}, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first one waits for all of the processes
@pytest.mark.parametrize("point", POINTS)
def test_trainer_recovers_from_kill(point: str, kills: tuple[Path, dict[str, Any], str]) -> None:
    """An unsealed snapshot is discarded; the sidecar may commit a sealed one; the next save succeeds."""
    work, results, errors = kills
    assert point in results, errors
    result = results[point]
    # Once the snapshot is sealed the sidecar commits alone, unless the seal itself was lost with the process.
    assert result["step"] in ((FIRST, SECOND) if point == "snapshot.after_seal" else (FIRST,))
    assert result["exact"] is True
    assert (result["next"], result["closed"]) == (3, 5)
    if point.startswith("snapshot."):
        assert result["lost_steps"] == SECOND - result["step"]
    state = RunLog(open_store(f"file://{work / 'store'}"), point).refresh()
    newest = state.checkpoints[max(state.checkpoints)]
    assert newest.step == result["step"] + 5
