"""ResumableSampler with worker processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.trainer.sampler_lives import Data, SamplerLife, check_each_once, trained_samples


@pytest.mark.parametrize(
    "lives",
    [
        # Samples that workers fetched and did not deliver are not used up. 40 samples are 20 batches.
        [
            SamplerLife(saved=3, lost=2, workers=2),
            SamplerLife(saved=4, workers=1),
            SamplerLife(saved=1, batch_size=3),
        ],
        [
            SamplerLife(saved=3, lost=1, workers=1, persistent=True),
            SamplerLife(saved=24, workers=1, persistent=True),
        ],
        [
            SamplerLife(saved=3, world=2, workers=1),
            SamplerLife(saved=2, workers=1),
            SamplerLife(saved=2, world=2, batch_size=4),
        ],
    ],
    ids=["workers", "persistent", "ranks"],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_prefetching_workers_train_each_sample_once(lives: list[SamplerLife], distributed: bool) -> None:
    data = Data(samples=40, distributed=distributed)
    lives = [replace(each, batch_size=2) if distributed else each for each in lives]
    check_each_once(data, lives, trained_samples(data, lives))
