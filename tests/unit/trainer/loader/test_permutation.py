"""The shuffle of (seed, epoch)."""

from __future__ import annotations

import numpy as np
from deltashard.loader.permutation import Permutation
from hypothesis import given
from hypothesis import strategies as st


def _all(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    order = Permutation(samples=samples, seed=seed, epoch=epoch)
    return order.at(np.arange(samples, dtype=np.uint64)).tolist()


@given(samples=st.integers(0, 3000), seed=st.integers(0, (1 << 63) - 1), epoch=st.integers(0, (1 << 63) - 1))
def test_it_has_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert sorted(_all(samples, seed, epoch)) == list(range(samples))


def test_neighbours_are_strangers() -> None:
    """Of one epoch, of two, and of two seeds: no more pairs in their places than by chance (one, on the average)."""
    one, next_epoch, next_seed = np.array(_all(5000)), np.array(_all(5000, 0, 1)), np.array(_all(5000, 1, 0))
    for other in (np.arange(5000), next_epoch, next_seed):
        assert (one == other).sum() < 10
    assert (np.abs(np.diff(one)) == 1).sum() < 15
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.07
    assert abs(np.corrcoef(one, next_epoch)[0, 1]) < 0.07


def test_a_billion_samples_take_no_memory() -> None:
    """Any part of the order, at once."""
    order = Permutation(samples=1 << 40, seed=1, epoch=2)
    far = order.at(np.arange((1 << 40) - 100, 1 << 40, dtype=np.uint64))
    assert len(set(far.tolist())) == 100
    assert int(far.max()) < 1 << 40
    assert (
        far[40:60].tolist() == order.at(np.arange((1 << 40) - 60, (1 << 40) - 40, dtype=np.uint64)).tolist()
    )


def test_it_stays_what_it_is() -> None:
    """A checkpoint within an epoch, of an older version, goes on in this very order."""
    assert _all(12, 7, 3) == [9, 2, 8, 11, 3, 1, 7, 6, 0, 10, 5, 4]
    far = Permutation(samples=10**12, seed=(1 << 63) - 1, epoch=1)
    assert far.at(np.array([0, 1, 10**12 - 1], dtype=np.uint64)).tolist() == [
        177171332290,
        400686828073,
        942693268912,
    ]
