"""The permutation of (seed, epoch)."""

from __future__ import annotations

import numpy as np
from deltashard.loader.permutation import Permutation
from hypothesis import given
from hypothesis import strategies as st


def _all(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    order = Permutation(samples=samples, seed=seed, epoch=epoch)
    return order.at(np.arange(samples, dtype=np.uint64)).tolist()


@given(samples=st.integers(0, 3000), seed=st.integers(0, (1 << 63) - 1), epoch=st.integers(0, (1 << 63) - 1))
def test_permutation_has_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert sorted(_all(samples, seed, epoch)) == list(range(samples))


def test_permutation_is_stable_across_versions() -> None:
    """A checkpoint that an older version took within an epoch continues in this order."""
    assert _all(12, 7, 3) == [9, 2, 8, 11, 3, 1, 7, 6, 0, 10, 5, 4]
    far = Permutation(samples=10**12, seed=(1 << 63) - 1, epoch=1)
    assert far.at(np.array([0, 1, 10**12 - 1], dtype=np.uint64)).tolist() == [
        177171332290,
        400686828073,
        942693268912,
    ]
