"""Names of the blobs of several ranks."""

import pytest
from deltashard_checkpoint.format.blob_name import (
    blob_name,
    is_read_by,
    parse_blob_name,
    ranks_read_by,
)
from hypothesis import given
from hypothesis import strategies as st

RANKS = st.integers(0, 99_999)
NAMES = st.text(min_size=1).filter(lambda name: parse_blob_name(name)[0] is None)


@given(rank=RANKS, other=RANKS, name=NAMES)
def test_rank_reads_its_own_blobs_and_those_of_rank_0(rank: int, other: int, name: str) -> None:
    stored = blob_name(rank, name)
    assert parse_blob_name(stored) == ((None if rank == 0 else rank), name)
    world = max(rank, other) + 1
    assert is_read_by(rank, world, stored)
    assert is_read_by(other, world, stored) is (rank in (0, other))
    assert is_read_by(None, world, stored) is (rank == 0)


@given(saved=st.integers(1, 40), world=st.integers(1, 40))
def test_loader_blobs_of_removed_ranks_are_read_by_one_rank_each(saved: int, world: int) -> None:
    for owner in range(1, saved):
        readers = [rank for rank in range(world) if is_read_by(rank, world, blob_name(owner, "loader"))]
        assert readers == [owner % world]
        assert readers == [rank for rank in range(world) if owner in ranks_read_by(rank, world, saved)]
        for name in ("rng", "state/loader", "meta"):
            assert [r for r in range(world) if is_read_by(r, world, blob_name(owner, name))] == (
                [owner] if owner < world else []
            )


@pytest.mark.parametrize(
    "stored",
    [
        *("rank/", "rank/3", "rank/3/", "rank/03/rng", "rank/-1/rng", "rank/100000/rng", "rank/٣/rng"),
        "ranks/3/rng",
    ],
)
def test_unqualified_blob_name_is_read_by_all_ranks(stored: str) -> None:
    assert parse_blob_name(stored) == (None, stored)
