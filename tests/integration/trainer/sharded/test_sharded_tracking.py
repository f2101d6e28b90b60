"""Tables that TorchRec shards over ranks: every table is found, and no changed row is missed under any pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from tests.support.trainer import sharded_case
from tests.support.trainer.rank_zygote import RankZygote

pytestmark = pytest.mark.timeout(1800)

Results = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def results(rank_zygote: RankZygote, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return each rank's results for all cases, which run in one set of processes."""
    run = partial(rank_zygote.run, "tests.support.trainer.sharded_case")
    workdir = tmp_path_factory.mktemp("ranks")
    return cache(lambda world: run(workdir / str(world), world, "every_case"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "case"), [(world, str(case)) for world in (1, 2, 4) for case in sharded_case.cases(world)]
)
def test_no_changed_row_is_missed(results: Results, world: int, case: str) -> None:
    """After each step the marks contain all changed rows, and exactly the updated rows where lookups show them."""
    for rank, found in enumerate(results(world)):
        assert found.get(case, "it was not reached") == "", f"rank {rank}"
