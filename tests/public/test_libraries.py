"""Programs of public libraries, killed in the middle of an epoch and resumed: exact, or told; never a crash, never silent."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.public.libraries import EPOCHS, PROGRAMS, STEPS_PER_EPOCH
from tests.support.machine import limit_s
from tests.support.tool import ROOT
from tests.support.trainer.verdict import differing, explaining

EXACT = set(PROGRAMS) - {"accelerate_stateful", "accelerate_seedable"}
"""The others are told: Accelerate's stateful loaders keep no state of the generator that their order comes from, and its
seedable sampler counts epochs from 0 in each process."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_program_of_a_public_library_comes_back(name: str, tmp_path: Path) -> None:
    # Inside the second epoch, at a step that differs from program to program; even, for those that accumulate.
    kill = 2 * random.Random(name).randrange(STEPS_PER_EPOCH // 2 + 2, STEPS_PER_EPOCH)
    assert STEPS_PER_EPOCH < kill - 2 < kill < STEPS_PER_EPOCH * (EPOCHS - 1)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.public.libraries", str(tmp_path), name, str(kill)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s(120), check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log")))
    assert codes == {"whole": 0, "killed": -9, "resumed": 0}, logs
    whole, resumed = (pickle.loads((tmp_path / life).read_bytes()) for life in ("whole", "resumed"))
    assert resumed["resumed_at"] == kill - 2, logs

    told = explaining(resumed["told"])
    if resumed["bits"] is None:
        assert told, logs
        assert name not in EXACT, told
        return
    differs = differing(whole["bits"], resumed["bits"])
    assert not differs or told, f"silently different: {differs}\n{logs}"
    assert (name in EXACT) == (not differs), f"{differs}\n{told}"
