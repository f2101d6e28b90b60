"""An epoch that some ranks began and another number of them ends: what cannot be shared begins again, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deltashard.errors import CheckpointMismatch
from deltashard.loader.registry import LoaderRegistry
from deltashard.loader.sharding import ResumePositions
from torch.utils.data import DataLoader

from tests.support.trainer.sampler_lives import Data, Life, Rank
from tests.support.trainer.step_count import StepCount

DATA = Data(samples=48, distributed=True)


def rank_of(rank: int, world: int, data: Data = DATA, **options: Any) -> Rank:
    return Rank(data, Life(saved=0, world=world), rank, **options)


def taken_over(
    trees: dict[int, Any], *, rank: int = 0, saved: int = 2, world: int = 1
) -> tuple[dict[str, Any], str]:
    """The position of a loader and the note on it; raises why there is none."""
    found = ResumePositions({"loader": trees.get(rank) or trees.get(0)})
    found.take_over("loader", trees, rank=rank, saved=saved, world=world)
    if found.refused:
        raise CheckpointMismatch(found.refused["loader"])
    return found.positions["loader"], "".join(found.notes)


def test_what_cannot_be_shared_is_refused() -> None:
    ranks = [rank_of(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.take(3)
    trees = [rank.tree() for rank in ranks]

    def refused(what: str, trees: dict[int, Any], *, saved: int = 2) -> None:
        with pytest.raises(CheckpointMismatch, match=what) as caught:
            taken_over(trees, saved=saved)
        assert "ResumableSampler" in str(caught.value)

    ranks[1].take(1)
    refused("rank 1 was elsewhere than rank 0", {0: trees[0], 1: ranks[1].tree()})
    refused("the position of rank 1 was not read", {0: trees[0]})
    refused("it was not on every rank", {0: trees[0], 1: None})
    refused("it is unknown which samples were used up", {0: {**trees[0], "order": None}, 1: trees[1]})
    refused("its sampler had 2 shares for 4 ranks", dict(enumerate(trees * 2)), saved=4)
    tree, note = taken_over(dict(enumerate(trees)))
    assert "was within epoch 0 when 2 ranks saved: the 36 samples that are left of it" in note
    for what, other in {
        "samples was 48 and is 50": rank_of(0, 1, replace(DATA, samples=50)),
        "seed=3, .* and is .*seed=4": rank_of(0, 1, replace(DATA, seed=4)),
        "shares was 1 and is 2": rank_of(0, 2),
        'skip="replay" reads a whole epoch again': rank_of(0, 1, skip="replay"),
    }.items():
        with pytest.raises(CheckpointMismatch, match=what):
            other.resume(tree)


def test_what_one_rank_cannot_take_over_begins_again_on_all() -> None:
    """Rank 0 sees nothing wrong, rank 1 that rank 3 was elsewhere."""
    ranks = [rank_of(rank, 4) for rank in range(4)]
    for rank, each in enumerate(ranks):
        each.take(13 if rank < 3 else 14)  # 24 samples of 12 a rank: within the third epoch
    trees = dict(enumerate(rank.tree() for rank in ranks))
    found = [ResumePositions({"loader": trees[rank]}) for rank in range(2)]
    for rank, each in enumerate(found):
        mine = {peer: trees[peer] for peer in (0, *range(rank, 4, 2))}
        each.take_over("loader", mine, rank=rank, saved=4, world=2)
    assert [sorted(each.refused) for each in found] == [[], ["loader"]]
    for each in found:
        each.restart_epochs(["loader"], each.refused)
        assert each.notes[0].startswith("loader 'loader' cannot resume within epoch 2, which begins again")
        again = rank_of(0, 2)
        again.resume(each.positions["loader"])
        assert (again.loader.epoch, again.loader.delivered) == (2, 0)


def test_all_ranks_share_the_batches_of_one_order() -> None:
    """Whoever goes on does it with rank 0's position, in an order that is the same on all; another order is seen."""

    def five(seed: int, tree: dict[str, Any] | None = None) -> tuple[list[int], dict[str, Any]]:
        """What a rank sees of an order, from a position on, or of its first five batches; its position then."""
        registry, seen = LoaderRegistry(StepCount()), []
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(list(range(24)), batch_size=3, shuffle=True, generator=generator)
        wrapped = registry.wrap(loader, shared=True)
        if tree is not None:
            registry.resume({"loader": tree}, None, step=5)
        for number, batch in enumerate(wrapped, 1):
            seen += batch.tolist()
            registry.clock.now += 1
            if tree is None and number == 5:
                break
        return seen, registry.capture()[1]["loader"]

    (seen, zero), (_, one), (_, strange) = five(7), five(7), five(8)
    tree, note = taken_over({0: zero, 1: one})
    assert note == "loader 'loader' resumes at batch 5, as on 2 ranks"
    assert sorted(seen + five(99, tree)[0]) == list(range(24))
    with pytest.raises(CheckpointMismatch, match="or had other batches"):
        taken_over({0: zero, 1: strange})
