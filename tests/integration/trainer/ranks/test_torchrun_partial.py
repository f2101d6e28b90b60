"""Under torchrun: survivors of a lost rank wait in a collective that cannot finish, and SIGTERM still ends them.

gloo waits for half an hour. torchrun waits for 30 s before it sends SIGKILL, which it logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.integration.trainer.ranks.torchrun_partial import KILL_AT, LOST, SAVE_AT, WORLD
from tests.support.machine import limit_s
from tests.support.sidecar_process import SidecarProcess
from tests.support.tool import ROOT
from tests.support.trainer.rank_zygote import RankZygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


PROGRAM = "tests.integration.trainer.ranks.torchrun_partial"


def _torchrun(workdir: Path, recovery: str, where: str) -> tuple[int, str]:
    """Run torchrun without restarts to its end and return the exit code and the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
    command += ["--max-restarts", "0", "--monitor-interval", "0.2"]
    command += ["-m", PROGRAM, str(workdir), recovery, where]
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=limit_s(200),
        check=False,
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(("recovery", "where"), [("full", "machine"), ("partial", "pods")])
def test_blocked_collective_is_terminated(
    rank_zygote: RankZygote, tmp_path: Path, recovery: str, where: str
) -> None:
    """The signal's default action ends it immediately. Survivors' rows are staged, or all roll back to the checkpoint.

    In pods no rank sees another's process, so the missing heartbeats show that a rank is dead.
    """
    (tmp_path / "store").mkdir()
    with ExitStack() as stack:
        for pod in [tmp_path / f"pod-{rank}" for rank in range(WORLD)] if where == "pods" else []:
            pod.mkdir()
            sidecar = SidecarProcess(pod, (tmp_path / "store").as_uri(), run="partial", encoding="fp32")
            stack.callback(sidecar.kill)
        code, output = _torchrun(tmp_path, recovery, where)
        begun = rank_zygote.run(PROGRAM, tmp_path, WORLD, "train", recovery=recovery, where=where)
    assert code != 0
    assert output.count("(SIGTERM)") >= WORLD - 1, output
    assert "forcefully exiting" not in output  # no process had to be killed
    assert output.count("rows of step 6 are staged on top of checkpoint 2") == (
        WORLD - 1 if recovery == "partial" else 0
    )
    assert begun == [[KILL_AT if recovery == "partial" else SAVE_AT, recovery]] * WORLD
    for rank in range(WORLD):
        kept = "saved" if recovery == "full" or rank == LOST else "held"
        found, wanted = np.load(tmp_path / f"begun-{rank}.npz"), np.load(tmp_path / f"{kept}-{rank}.npz")
        rows = [name for name in wanted if not name.startswith("dense|")]
        assert rows
        for name in rows:
            np.testing.assert_array_equal(found[name], wanted[name], f"rank {rank}: {name}")
