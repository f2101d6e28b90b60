"""Programs of public libraries, killed in mid-epoch and resumed: each is exact, or a warning reports the difference."""

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
from tests.support.trainer.verdict import differing, explanations

EXACT = set(PROGRAMS) - {"accelerate_stateful", "accelerate_seedable"}
"""The other programs get a warning: Accelerate's stateful loaders store no state of the generator of their order, and
its seedable sampler counts epochs from 0 in each process.
"""


KILL_STEPS = {
    name: 2 * random.Random(name).randrange(STEPS_PER_EPOCH // 2 + 2, STEPS_PER_EPOCH) for name in PROGRAMS
}
"""A step inside the second epoch that differs between programs; even, for programs that accumulate."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, int]]]:
    work = tmp_path_factory.mktemp("libraries")
    environment = os.environ | {"XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    results = subprocess.run(
        [sys.executable, "-m", "tests.public.libraries", str(work), json.dumps(KILL_STEPS)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s(400), check=False,
    )  # fmt: skip
    assert results.returncode == 0, results.stderr
    return work, json.loads(results.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first test waits for all programs
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_library_program_resumes(name: str, results: tuple[Path, dict[str, dict[str, int]]]) -> None:
    kill = KILL_STEPS[name]
    assert STEPS_PER_EPOCH < kill - 2 < kill < STEPS_PER_EPOCH * (EPOCHS - 1)
    work, codes = results[0] / name, results[1][name]
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(work.glob("*.log")))
    assert codes == {"whole": 0, "killed": -9, "resumed": 0}, logs
    whole, resumed = (pickle.loads((work / process).read_bytes()) for process in ("whole", "resumed"))
    assert resumed["resumed_at"] == kill - 2, logs

    reported = explanations(resumed["reported"])
    if resumed["bits"] is None:
        assert reported, logs
        assert name not in EXACT, reported
        return
    differs = differing(whole["bits"], resumed["bits"])
    assert not differs or reported, f"silently different: {differs}\n{logs}"
    assert (name in EXACT) == (not differs), f"{differs}\n{reported}"
