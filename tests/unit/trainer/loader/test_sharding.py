"""An epoch that one number of ranks begins and another number ends: the loader restarts the epoch or refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard.errors import CheckpointMismatch
from deltashard.loader.sharding import ResumePositions

from tests.support.trainer.sampler_attempts import Data, SamplerAttempt, SamplerRank

DATA = Data(samples=48, distributed=True)


def rank_of(rank: int, world: int, data: Data = DATA, **options: Any) -> SamplerRank:
    return SamplerRank(data, SamplerAttempt(saved=0, world=world), rank, **options)


def taken_over(
    trees: dict[int, Any], *, rank: int = 0, saved: int = 2, world: int = 1
) -> tuple[dict[str, Any], str]:
    """Return the position of a loader and its note; raise if the position cannot be shared."""
    found = ResumePositions({"loader": trees.get(rank) or trees.get(0)})
    found.reshard("loader", trees, rank=rank, saved=saved, world=world)
    if found.refused:
        raise CheckpointMismatch(found.refused["loader"])
    return found.positions["loader"], "".join(found.notes)


def test_unshareable_position_is_refused() -> None:
    ranks = [rank_of(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.take(3)
    trees = [rank.tree() for rank in ranks]

    def refused(what: str, trees: dict[int, Any], *, saved: int = 2) -> None:
        with pytest.raises(CheckpointMismatch, match=what) as caught:
            taken_over(trees, saved=saved)
        assert "ResumableSampler" in str(caught.value)

    ranks[1].take(1)
    refused("rank 1 had another position or other batches than rank 0", {0: trees[0], 1: ranks[1].tree()})
    refused("the position of rank 1 was not read", {0: trees[0]})
    refused("it was not on every rank", {0: trees[0], 1: None})
    refused("it is unknown which samples were used up", {0: {**trees[0], "order": None}, 1: trees[1]})
    refused("its sampler had 2 shares for 4 ranks", dict(enumerate(trees * 2)), saved=4)
    tree, note = taken_over(dict(enumerate(trees)))
    assert "was within epoch 0 when 2 ranks saved: the 36 remaining samples" in note
    for what, other in {
        "samples was 48 and is 50": rank_of(0, 1, replace(DATA, samples=50)),
        "seed=3, .* and is .*seed=4": rank_of(0, 1, replace(DATA, seed=4)),
        "shares was 1 and is 2": rank_of(0, 2),
        'skip="replay" rereads a whole epoch': rank_of(0, 1, skip="replay"),
    }.items():
        with pytest.raises(CheckpointMismatch, match=what):
            other.resume(tree)
