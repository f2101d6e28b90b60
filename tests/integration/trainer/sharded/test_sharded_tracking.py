"""Tables that TorchRec shards over ranks: found whole, and no changed row is ever missed, under every pipeline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.tool import ROOT
from tests.support.trainer import sharded_case

pytestmark = pytest.mark.timeout(1800)


@cache
def _results(world: int) -> list[tuple[dict[str, str], str]]:
    """What each of `world` ranks says of each case, and its log; all cases run in one set of processes."""
    folder = Path(mkdtemp())
    module = "tests.support.trainer.sharded_case"
    ranks = []
    try:
        for rank in range(world):
            command = [
                sys.executable,
                "-m",
                module,
                folder / f"{rank}.json",
                str(rank),
                str(world),
                folder / "store",
            ]
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        for process in ranks:
            process.wait(timeout=1500)
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
    outs = [folder / f"{rank}.json" for rank in range(world)]
    logs = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(world)]
    said = [json.loads(out.read_text()) if out.exists() else {} for out in outs]
    shutil.rmtree(folder)
    return list(zip(said, logs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "case"), [(world, str(case)) for world in (1, 2, 4) for case in sharded_case.cases(world)]
)
def test_no_changed_row_is_missed(world: int, case: str) -> None:
    """Marks after each step: all rows that changed; exactly those that were updated, where lookups tell."""
    for rank, (results, log) in enumerate(_results(world)):
        assert results.get(case, f"it was not reached: {log}") == "", f"rank {rank}"
