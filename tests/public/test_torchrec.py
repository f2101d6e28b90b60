"""TorchRec's random dataset under its sparse pipeline, on one rank and on two: killed and resumed, it is exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.public.torchrec_ranks import PASS, STEPS
from tests.support.trainer.rank_zygote import RankZygote
from tests.support.trainer.verdict import differing, reported_lines

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(rank_zygote: RankZygote) -> Run:
    return partial(rank_zygote.run, "tests.public.torchrec_ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "endless", "tower"), [(1, True, False), (1, False, False), (2, False, False), (2, True, True)]
)
def test_random_dataset_under_sparse_pipeline(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, endless: bool, tower: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kill = random.Random(f"{world} {endless}").randrange(PASS + 3, STEPS - 2)
    options = {"endless": endless, "tower": tower}
    whole = run(tmp_path / "whole", world, "train", **options)
    assert run(tmp_path / "killed", world, "train", **options, kill=kill, agent=True) == [None] * world
    resumed = run(tmp_path / "killed", world, "train", **options)

    for one, other in zip(whole, resumed, strict=True):
        assert other["resumed_at"] == kill - 2
        assert len(one["digests"]) > 10
        assert not differing(one["digests"], other["digests"])
        assert not reported_lines(other["reported"])
