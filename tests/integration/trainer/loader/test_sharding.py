"""An epoch that some ranks began and another number of them ends, as positions of loaders alone; no process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from deltashard.errors import CheckpointMismatch
from deltashard.loader.registry import LoaderRegistry, OnChange
from deltashard.loader.sharding import ResumePositions
from deltashard.state.value import decode_value, encode_value
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.trainer.step_count import StepCount


class Rank:
    """One rank's loader; every batch is a step."""

    def __init__(
        self, rank: int, world: int, *, samples: int = 48, batch_size: int = 2, **options: Any
    ) -> None:
        self.steps = StepCount()
        self.seen: list[int] = []
        loader_options = {k: options.pop(k) for k in ("num_workers", "drop_last") if k in options}
        data = list(range(samples))
        sampler: DistributedSampler[int] = DistributedSampler(
            data, world, rank, shuffle=options.pop("shuffle", True), seed=options.pop("seed", 3)
        )
        self.registry = LoaderRegistry(self.steps)
        self.loader = self.registry.wrap(
            DataLoader(data, batch_size=batch_size, sampler=sampler, **loader_options), name="x", **options
        )

    def take(self, steps: int) -> None:
        """So many steps, over epochs."""
        until = self.steps.now + steps
        while self.steps.now < until:
            epoch = self.loader.epoch
            self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.seen += batch.tolist()
                self.steps.now += 1
                if self.steps.now == until:
                    return

    def rest_of_epoch(self) -> None:
        self.loader.sampler.set_epoch(self.loader.epoch)
        for batch in self.loader:
            self.seen += batch.tolist()
            self.steps.now += 1

    def tree(self) -> dict[str, Any]:
        """As a checkpoint would hold it."""
        return decode_value(encode_value(self.registry.capture()[1]).to_bytes())["x"]

    def resume(self, tree: dict[str, Any], on_change: OnChange = "refuse") -> None:
        """Where `tree` stood."""
        self.registry.resume({"x": tree}, None, step=self.steps.now, on_change=on_change)


def taken_over(
    trees: dict[int, Any], *, rank: int = 0, saved: int = 2, world: int = 1
) -> tuple[dict[str, Any], str]:
    """The position of a loader and the note on it; raises why there is none."""
    found = ResumePositions({"x": trees.get(rank) or trees.get(0)})
    found.take_over("x", trees, rank=rank, saved=saved, world=world)
    if found.refused:
        raise CheckpointMismatch(found.refused["x"])
    return found.positions["x"], "".join(found.notes)


def resumed(trees: list[dict[str, Any]], world: int, **options: Any) -> list[Rank]:
    """`world` ranks that go on where `trees` stood, each with what it would have read."""
    saved = len(trees)
    ranks = [Rank(rank, world, **options) for rank in range(world)]
    for rank, each in enumerate(ranks):
        mine: dict[int, Any] = {0: trees[0]} | {peer: trees[peer] for peer in range(rank, saved, world)}
        tree = trees[rank] if world == saved else taken_over(mine, rank=rank, saved=saved, world=world)[0]
        each.resume(tree)
    return ranks


@given(
    data=st.data(),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    batch_size=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_each_sample_is_seen_once_whoever_takes_over(
    data: st.DataObject, worlds: list[int], batch_size: int, shuffle: bool
) -> None:
    """In an epoch that several worlds share; but for what torch's sampler repeats, so that all ranks get as many."""
    samples = data.draw(st.integers(20, 60))
    options = {"samples": samples, "batch_size": batch_size, "shuffle": shuffle}
    ranks = [Rank(rank, worlds[0], **options) for rank in range(worlds[0])]
    seen: Counter[int] = Counter()
    used = 0
    *before, last = worlds
    for n, world in enumerate(before):
        left = (samples - used) // (world * batch_size)
        steps = data.draw(st.integers(0 if n else 1, max(0, left - 1))) if left > 1 else 0
        if not used + steps:  # nothing of the epoch is used up: it begins anew
            return
        for rank in ranks:
            rank.take(steps)
            seen.update(rank.seen)
        used += steps * world * batch_size
        ranks = resumed([rank.tree() for rank in ranks], worlds[n + 1], **options)
    for rank in ranks:
        rank.rest_of_epoch()
        seen.update(rank.seen)
    assert set(seen) == set(range(samples))
    padding = -(samples - used) % last
    assert sum(seen.values()) == samples + padding
    for rank in ranks:
        rank.seen.clear()
        rank.rest_of_epoch()
    whole = Counter(number for rank in ranks for number in rank.seen)
    assert set(whole) == set(range(samples))
    assert sum(whole.values()) == samples + -samples % last


def test_workers_prefetch_and_the_rest_is_dealt_out_all_the_same() -> None:
    ranks = [Rank(rank, 2, num_workers=2) for rank in range(2)]
    for rank in ranks:
        rank.take(5)
    used = [number for rank in ranks for number in rank.seen]
    (alone,) = resumed([rank.tree() for rank in ranks], 1, num_workers=2)
    assert alone.loader.delivered == 5
    alone.take(4)
    # The same world once more, from within what was dealt out.
    (again,) = resumed([alone.tree()], 1, num_workers=2)
    again.rest_of_epoch()
    assert sorted(used + alone.seen + again.seen) == list(range(48))
    for rank in (*ranks, alone, again):
        rank.registry.close()  # or the collector ends their workers, and torch waits 5 s for each


def test_another_batch_size_takes_the_same_samples() -> None:
    """As who keeps the batch of all ranks together constant does."""
    ranks = [Rank(rank, 4, batch_size=3) for rank in range(4)]
    for rank in ranks:
        rank.take(2)
    used = [number for rank in ranks for number in rank.seen]
    ranks = resumed([rank.tree() for rank in ranks], 2, batch_size=6)
    for rank in ranks:
        rank.rest_of_epoch()
    assert sorted(used + [number for rank in ranks for number in rank.seen]) == list(range(48))


def test_a_pipeline_is_behind_what_it_was_handed() -> None:
    """Of the batches that were fetched ahead none is used up, not even where the next epoch has begun with them."""
    ranks = [Rank(rank, 2, samples=16, pipelined=True) for rank in range(2)]
    trees = []
    for rank in ranks:
        rank.loader.sampler.set_epoch(0)
        fetched = iter(rank.loader)
        batches = [next(fetched) for _ in range(4)]
        assert next(fetched, None) is None
        rank.loader.sampler.set_epoch(1)
        next(iter(rank.loader))
        rank.steps.now = 3
        rank.seen = [number for batch in batches[:3] for number in batch.tolist()]
        trees.append(rank.tree())
    (alone,) = resumed(trees, 1, samples=16)
    assert alone.loader.epoch == 0
    used = [number for rank in ranks for number in rank.seen]
    alone.rest_of_epoch()
    assert sorted(used + alone.seen) == list(range(16))


def test_what_cannot_be_shared_is_refused() -> None:
    ranks = [Rank(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.take(3)
    trees = [rank.tree() for rank in ranks]

    def refused(what: str, trees: dict[int, Any], *, saved: int = 2, world: int = 1) -> None:
        with pytest.raises(CheckpointMismatch, match=what) as caught:
            taken_over(trees, saved=saved, world=world)
        assert "ResumableSampler" in str(caught.value)

    ranks[1].take(1)
    refused("rank 1 was elsewhere than rank 0", {0: trees[0], 1: ranks[1].tree()})
    refused("the position of rank 1 was not read", {0: trees[0]})
    refused("it was not on every rank", {0: trees[0], 1: None})
    refused("it is unknown which samples were used up", {0: {**trees[0], "order": None}, 1: trees[1]})
    refused("its sampler had 2 shares for 4 ranks", dict(enumerate(trees * 2)), saved=4)
    tree, note = taken_over(dict(enumerate(trees)))
    assert note.startswith(
        "loader 'x' was within epoch 0 when 2 ranks saved: the 36 samples that are left of it"
    )
    for what, other in {
        "samples was 48 and is 50": Rank(0, 1, samples=50),
        "seed=3, .* and is .*seed=4": Rank(0, 1, seed=4),
        "shares was 1 and is 2": Rank(0, 2),
        'skip="replay" reads a whole epoch again': Rank(0, 1, skip="replay"),
    }.items():
        with pytest.raises(CheckpointMismatch, match=what):
            other.resume(tree)


def test_what_one_rank_cannot_take_over_begins_again_on_all() -> None:
    """Rank 0 sees nothing wrong, rank 1 that rank 3 was elsewhere."""
    ranks = [Rank(rank, 4) for rank in range(4)]
    for rank, each in enumerate(ranks):
        each.take(13 if rank < 3 else 14)  # 24 samples of 12 a rank: within the third epoch
    trees = dict(enumerate(rank.tree() for rank in ranks))
    found = [ResumePositions({"x": trees[rank]}) for rank in range(2)]
    for rank, each in enumerate(found):
        mine = {peer: trees[peer] for peer in (0, *range(rank, 4, 2))}
        each.take_over("x", mine, rank=rank, saved=4, world=2)
    assert [sorted(each.refused) for each in found] == [[], ["x"]]
    for each in found:
        each.restart_epochs(["x"], each.refused)
        assert each.notes[0].startswith("loader 'x' cannot resume within epoch 2, which begins again")
        again = Rank(0, 2)
        again.resume(each.positions["x"])
        assert (again.loader.epoch, again.loader.delivered) == (2, 0)


def test_all_ranks_share_the_batches_of_one_order() -> None:
    """Whoever goes on does it with rank 0's position, in an order that is the same on all; another order is seen."""

    def loader(seed: int) -> LoaderRegistry:
        generator = torch.Generator().manual_seed(seed)
        registry = LoaderRegistry(StepCount())
        registry.wrap(
            DataLoader(list(range(24)), batch_size=3, shuffle=True, generator=generator),
            name="x",
            shared=True,
        )
        return registry

    def five(seed: int) -> tuple[list[int], dict[str, Any]]:
        registry, seen = loader(seed), []
        for number, batch in enumerate(registry.loaders["x"], 1):
            seen += batch.tolist()
            registry.clock.now += 1
            if number == 5:
                break
        return seen, registry.capture()[1]["x"]

    (seen, zero), (_, one), (_, strange) = five(7), five(7), five(8)
    tree, note = taken_over({0: zero, 1: one})
    assert note == "loader 'x' resumes at batch 5, as on 2 ranks"
    back = loader(99)
    back.resume({"x": tree}, None, step=5)
    assert sorted(seen + [number for batch in back.loaders["x"] for number in batch.tolist()]) == list(
        range(24)
    )
    with pytest.raises(CheckpointMismatch, match="or had other batches"):
        taken_over({0: zero, 1: strange})
