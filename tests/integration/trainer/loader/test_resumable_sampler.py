"""ResumableSampler with worker processes, and in a training that is killed and resumed by a Checkpointer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.loader.sampler_training import LIVES, SAMPLES
from tests.support.trainer.sampler_lives import Data, Life, check_each_once, lived, order


@pytest.mark.parametrize(
    "lives",
    [
        # What workers had fetched and nobody was handed is not used up; 40 samples are 20 batches.
        [Life(saved=3, lost=2, workers=2), Life(saved=4, workers=1), Life(saved=1, batch_size=3)],
        [Life(saved=3, lost=1, workers=1, persistent=True), Life(saved=24, workers=1, persistent=True)],
        [Life(saved=3, world=2, workers=1), Life(saved=2, workers=1), Life(saved=2, world=2, batch_size=4)],
    ],
    ids=["workers", "persistent", "ranks"],
)
def test_workers_fetch_ahead_and_every_sample_is_trained_on_once(lives: list[Life]) -> None:
    data = Data(samples=40)
    check_each_once(data, lives, lived(data, lives))


class Run:
    """What sampler_training.py left behind."""

    def __init__(self, work: Path) -> None:
        self.restored = [json.loads((work / f"restored-{n}.json").read_text()) for n in range(len(LIVES))]
        self.reads = [[int(i) for i in (work / f"reads-{n}").read_text().split()] for n in range(len(LIVES))]
        self.steps: list[list[tuple[int, int, list[int]]]] = [
            [tuple(json.loads(line)) for line in (work / f"steps-{n}").read_text().splitlines()]
            for n in range(len(LIVES))
        ]

    def trained(self, lives: range) -> dict[int, list[int]]:
        """Samples by epoch, of the steps that the next life knows of."""
        found: dict[int, list[int]] = defaultdict(list)
        for life in lives:
            last = LIVES[life][4] or 1 << 30
            for step, epoch, samples in self.steps[life]:
                if step <= last:
                    found[epoch] += samples
        return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work = tmp_path_factory.mktemp("sampled")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.integration.trainer.loader.sampler_training", str(work)],
        env={**os.environ, "XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(work)


@pytest.mark.slow
def test_a_killed_training_goes_on_at_the_very_next_sample(killed: Run) -> None:
    """In the order of seed and epoch, over three lives with batches of two sizes."""
    assert [facts and (facts["step"], facts["refused"]) for facts in killed.restored[:3]] == [
        None,
        (6, ""),
        (11, ""),
    ]
    trained = killed.trained(range(3))
    assert trained[0] == order(Data(samples=SAMPLES, seed=7), 0)
    assert trained[1] == order(Data(samples=SAMPLES, seed=7), 1)[: 4 * 6]


@pytest.mark.slow
def test_nothing_that_was_used_up_is_read_again(killed: Run) -> None:
    """But for the last batch, which is compared; nor by workers."""
    used = set(killed.trained(range(1))[0])
    assert len(used) == 24
    assert killed.reads[1] == order(Data(samples=SAMPLES, seed=7), 0)[20 : 24 + 4 * 6]
    used |= set(killed.trained(range(2))[0])
    own = Counter(killed.reads[2])
    # Its next epoch reads them once; 12 + 30 samples at least, with what its workers fetched ahead.
    last = set(order(Data(samples=SAMPLES, seed=7), 0)[40:44])
    assert all(own[i] <= 1 + (i in last) for i in used)
    assert sum(own[i] for i in set(range(SAMPLES)) - used) >= SAMPLES - len(used)


@pytest.mark.slow
def test_another_seed_within_an_epoch_is_refused_or_begins_it_again(killed: Run) -> None:
    """Never mixed; and the life after that continues in what was begun."""
    facts = killed.restored[3]
    assert (
        "order was ResumableSampler(seed=7, shuffle=True) and is ResumableSampler(seed=8" in facts["refused"]
    )
    (note,) = facts["notes"]
    assert note.startswith("loader 'loader' cannot resume within epoch 1, which begins again")
    trained: Any = killed.trained(range(3, 5))
    assert trained == {epoch: order(Data(samples=SAMPLES, seed=8), epoch) for epoch in (1, 2)}
