"""ResumableSampler without worker processes: its shares of an order, and every sample once after any failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deltashard
import pytest
from deltashard import ResumableSampler
from deltashard.errors import CheckpointMismatch, UserError
from deltashard.loader.registry import LoaderRegistry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from tests.support.trainer.sampler_attempts import (
    Data,
    SamplerAttempt,
    SamplerRank,
    check_each_once,
    order,
    resume,
    trained_samples,
)
from tests.support.trainer.step_count import StepCount


@given(
    samples=st.integers(0, 40),
    used=st.integers(0, 40),
    world=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_shares_cover_the_remaining_order(
    samples: int, used: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    """All ranks get the same number of samples. The last samples are dropped, or the first ones of the epoch are repeated."""
    shares = [
        list(
            ResumableSampler(
                samples, seed=5, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world
            ).share(2, used)
        )
        for rank in range(world)
    ]
    whole = order(Data(samples=samples, seed=5, shuffle=shuffle), 2)
    rest = whole[used:]
    if drop_last:
        rest = rest[: len(rest) // world * world]
    elif rest:
        while len(rest) % world:
            rest += whole[: world - len(rest) % world]
    assert shares == [rest[rank::world] for rank in range(world)]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    data=st.builds(
        Data,
        samples=st.integers(20, 45),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        drop_batch=st.booleans(),
        distributed=st.booleans(),
    ),
    attempts=st.lists(
        st.builds(
            SamplerAttempt,
            saved=st.integers(0, 12),
            lost=st.integers(0, 2),
            world=st.integers(1, 4),
            batch_size=st.integers(1, 5),
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_every_sample_is_trained_on_once_an_epoch(data: Data, attempts: list[SamplerAttempt]) -> None:
    """Any number of ranks and batch size may resume, with this sampler or torch's. No sample is read twice."""
    if data.distributed:  # the same number of ranks with another batch size counts as another loader
        attempts = [replace(each, batch_size=attempts[0].batch_size) for each in attempts]
    check_each_once(data, attempts, trained_samples(data, attempts))


@settings(max_examples=12, deadline=None)
@given(
    snapshots=st.lists(st.integers(0, 12), min_size=2, max_size=3),
    world=st.integers(1, 3),
    samples=st.integers(20, 40),
    lost=st.integers(0, 2),
)
def test_resumed_run_sees_the_same_batches(snapshots: list[int], world: int, samples: int, lost: int) -> None:
    """With the same number of ranks and batch size, the padded batches at the end are also the same."""
    data = Data(samples=samples)
    whole = resume(data, SamplerAttempt(saved=0, world=world, batch_size=3), [])
    for rank in whole:
        rank.take(sum(snapshots))
    trees: list[dict[str, Any]] = []
    seen: list[list[int]] = [[] for _ in range(world)]
    for steps in snapshots:
        ranks = resume(data, SamplerAttempt(saved=steps, world=world, batch_size=3), trees)
        for number, rank in enumerate(ranks):
            rank.take(steps)
            seen[number] += [sample for epoch in rank.seen.values() for sample in epoch]
        trees = [rank.tree() for rank in ranks]
        for rank in ranks:
            rank.take(lost)
    assert seen == [[sample for epoch in rank.seen.values() for sample in epoch] for rank in whole]


def resume_at(registry: LoaderRegistry, tree: dict[str, Any]) -> None:
    """Resume the loader at the position in `tree`; raise if the position is refused."""
    registry.resume({"loader": tree}, None, step=registry.clock(), on_change="refuse")


def test_sampler_works_in_a_batch_sampler_and_without_batching() -> None:
    steps = StepCount()
    for options in (
        {"batch_sampler": BatchSampler(ResumableSampler(20, seed=3), 4, drop_last=False)},
        {"batch_size": None, "sampler": ResumableSampler(20, seed=3)},
    ):
        registry = LoaderRegistry(steps)
        iterator = iter(registry.wrap(DataLoader(list(range(20)), **options)))
        for _ in range(3):
            next(iterator)
            steps.now += 1
        tree = registry.capture()[1]["loader"]
        assert tree["samples"] == (3 if "batch_size" in options else 12)
        again = LoaderRegistry(steps)
        loader = again.wrap(DataLoader(list(range(20)), batch_size=5, sampler=ResumableSampler(20, seed=3)))
        resume_at(again, tree)
        rest = [i for batch in loader for i in batch.tolist()]
        assert rest == order(Data(samples=20), 0)[tree["samples"] :]


def test_replay_fetches_the_same_order() -> None:
    """The replay has `skip="replay"` and one batch size."""
    data = Data(samples=20)
    (lost,) = resume(data, SamplerAttempt(saved=0), [], skip="replay")
    lost.take(14)
    (again,) = resume(data, SamplerAttempt(saved=0), [lost.tree()], skip="replay")
    again.take(3)
    assert again.seen[1] == order(data, 1)[8:14]
    assert int(again.data.reads().sum()) == 14
    with pytest.raises(CheckpointMismatch, match="batch_size was 2 and is 3"):
        resume(data, SamplerAttempt(saved=0, batch_size=3), [lost.tree()], skip="replay")


@pytest.mark.parametrize(
    ("what", "live"),
    [
        ("samples was 20 and is 21", Data(samples=21)),
        ("seed=3, .* and is .*seed=4", Data(samples=20, seed=4)),
        ("shuffle=True.* and is .*shuffle=False", Data(samples=20, shuffle=False)),
    ],
)
def test_changed_order_is_refused_within_an_epoch(what: str, live: Data) -> None:
    """Another order would skip some samples and repeat others. Between epochs every option may change."""
    (lost,) = resume(Data(samples=20), SamplerAttempt(saved=0), [])
    lost.take(3)
    with pytest.raises(CheckpointMismatch, match=what):
        resume(live, SamplerAttempt(saved=0), [lost.tree()])
    lost.take(7)
    (again,) = resume(live, SamplerAttempt(saved=0), [lost.tree()])
    again.rest_of_epoch()
    assert again.seen[1] == order(live, 1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"data": -1}, "data="),
        ({"data": 1.5}, "data="),
        ({"seed": -1}, "seed="),
        ({"seed": None}, "seed="),
        ({"seed": True}, "seed="),
        ({"rank": 0}, "must be given together"),
        ({"rank": 2, "world_size": 2}, "rank="),
        ({"rank": 0, "world_size": 0}, "world_size="),
    ],
)
def test_invalid_sampler_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        deltashard.ResumableSampler(**{"data": 5, "seed": 0} | options)
    with pytest.raises(UserError, match="epoch="):
        deltashard.ResumableSampler(5, seed=0).set_epoch(-1)
    with pytest.raises(UserError, match="all ranks iterate the same batches"):
        SamplerRank(Data(samples=24), SamplerAttempt(saved=0, world=2), 0, shared=True)
