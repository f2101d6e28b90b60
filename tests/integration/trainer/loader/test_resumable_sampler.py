"""ResumableSampler with worker processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.trainer.sampler_attempts import Data, SamplerAttempt, check_each_once, trained_samples


@pytest.mark.parametrize(
    "attempts",
    [
        # Samples that workers fetched and did not deliver are not used up. 40 samples are 20 batches.
        [
            SamplerAttempt(saved=3, lost=2, workers=2),
            SamplerAttempt(saved=4, workers=1),
            SamplerAttempt(saved=1, batch_size=3),
        ],
        [
            SamplerAttempt(saved=3, lost=1, workers=1, persistent=True),
            SamplerAttempt(saved=24, workers=1, persistent=True),
        ],
        [
            SamplerAttempt(saved=3, world=2, workers=1),
            SamplerAttempt(saved=2, workers=1),
            SamplerAttempt(saved=2, world=2, batch_size=4),
        ],
    ],
    ids=["workers", "persistent", "ranks"],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_prefetching_workers_train_each_sample_once(
    attempts: list[SamplerAttempt], distributed: bool
) -> None:
    data = Data(samples=40, distributed=distributed)
    attempts = [replace(each, batch_size=2) if distributed else each for each in attempts]
    check_each_once(data, attempts, trained_samples(data, attempts))
