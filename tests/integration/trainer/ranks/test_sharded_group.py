"""Any sharding to any sharding over any number of ranks: weights and optimizer state match in each cell."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.sidecar_process import SidecarProcess
from tests.support.trainer.rank_zygote import RankZygote

RunRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.timeout(1800)

OF_ANY = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise")
OF_HOSTS = ("table_row_wise", "grid_shard")
FULL = os.environ.get("DELTASHARD_TEST_RESHARD") == "full"
"""Test every pair of shardings and worlds with each optimizer and encoding, instead of a selection."""


@pytest.fixture(scope="module")
def run(rank_zygote: RankZygote) -> RunRanks:
    """Return the results of all ranks of a scenario of `sharded_group`."""
    return partial(rank_zygote.run, "tests.integration.trainer.ranks.sharded_group")


def shardings(world: int, optimizer: str) -> tuple[str, ...]:
    """Return the shardings for a world of this size. The dense optimizer's rule updates a data-parallel table."""
    found = OF_ANY + (OF_HOSTS if world == 4 else ())
    return found if optimizer == "adagrad" else found[1:]


def _expected(workdir: Path, run: str, world: int, encoding: str) -> None:
    """Write a run's expected content.

    Sections are `table|section`, and `table|section|rows|columns` of one value for each row.

    It is assembled from the ranks' data. Lossy encodings are applied with the plain reader's decoding.
    """
    found: dict[str, np.ndarray] = {}
    for rank in range(world):
        for place, values in np.load(workdir / f"{run}-{rank}.npz").items():
            table, rows, columns, section = place.split("|")
            (a, b), (c, d) = (map(int, each.split(":")) for each in (rows, columns))
            if values.size == b - a:
                found[f"{table}|{section}|{rows}|{columns}"] = values.reshape(-1)
                continue
            whole = found.setdefault(f"{table}|{section}", np.full((128, 32), np.nan, np.float32))
            whole[a:b, c:d] = values
    if encoding != "fp32":
        with open_store((workdir / "store").as_uri()) as store:
            read = read_checkpoint(store, run, "latest")
        for name, table in read.tables.items():
            found |= {f"{name}|weights": table.weights}
            found |= {f"{name}|{f}": v for f, v in table.fields.items() if v.ndim == 2}
    np.savez(workdir / f"expected-{run}.npz", **found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "encoding"),
    [("rowwise", "q8"), *([("adagrad", "fp32"), ("adagrad", "q8"), ("rowwise", "fp32")] if FULL else ())],
)
def test_any_sharding_to_any_sharding(run: RunRanks, tmp_path: Path, optimizer: str, encoding: str) -> None:
    """All rows, and then a delta, of every sharding are restored into every other."""
    (tmp_path / "store").mkdir()
    worlds = (1, 2, 4)
    sources: dict[int, list[str]] = {}
    for world in worlds:
        for sharding in shardings(world, optimizer):
            if not FULL and (world == 1 or (world == 2) != (sharding in ("column_wise", "table_wise"))):
                continue
            name = f"{sharding}-{world}"
            saved = run(
                tmp_path, world, "save", sharding=sharding, optimizer=optimizer, encoding=encoding, run=name
            )
            assert all(each["commits"] == 2 for each in saved)
            _expected(tmp_path, name, world, encoding)
            sources.setdefault(world, []).append(name)
    sidecar = SidecarProcess(tmp_path, (tmp_path / "store").as_uri(), run="target", arena_bytes="256MiB")
    try:
        for world in worlds:
            runs = ",".join(itertools.chain.from_iterable(sources.values()))
            into = shardings(world, optimizer)
            if not FULL:
                into = into[:2] if world == 1 else into[-2:] if world == 4 else into[2:4]
            read = run(
                tmp_path,
                world,
                "read",
                socket=sidecar.socket,
                runs=runs,
                shardings=",".join(into),
                optimizer=optimizer,
            )
            assert all(each["compared"] for each in read)
    finally:
        sidecar.kill()
