"""Chains: rows without an owner are an error, and boxes are subtracted into boxes."""

import itertools
import random

import pytest
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import (
    ChainIncomplete,
    CheckpointNotFound,
    chain,
    difference,
    intersection,
    missing,
)

from tests.support.checkpoint.run_builder import WHOLE, rows, started_run


def test_uncovered_box_is_an_error_or_omitted():
    run, attempt = started_run()
    last = run.commit(attempt, 1)
    with pytest.raises(ChainIncomplete, match=r"t\[8:10"):
        chain(run.log.state, last, [rows(7, 10)])
    assert chain(run.log.state, last, [rows(7, 10)], strict=False)[0].boxes == (rows(7, 8),)
    wanted = [rows(7, 10), rows(0, 1, "new")]
    assert set(missing(run.log.state, last, wanted)) == {rows(8, 10), wanted[1]}
    with pytest.raises(CheckpointNotFound, match="no live checkpoint 99"):
        chain(run.log.state, 99)


def test_difference_and_intersection_tile_the_box():
    rnd = random.Random(1)

    def draw() -> Box:
        r, c = sorted(rnd.sample(range(7), 2)), sorted(rnd.sample(range(7), 2))
        return Box(table="t", row_start=r[0], row_stop=r[1], col_start=c[0], col_stop=c[1])

    def cells(*boxes: Box) -> list[tuple[int, int]]:
        spans = [(range(b.row_start, b.row_stop), range(b.col_start, b.col_stop)) for b in boxes]
        return sorted(cell for span in spans for cell in itertools.product(*span))

    for _ in range(500):
        a, b = draw(), draw()
        common = [found] if (found := intersection(a, b)) else []
        assert cells(*difference(a, b), *common) == cells(a)
        assert cells(*common) == sorted({*cells(a)} & {*cells(b)})
    assert intersection(WHOLE, rows(0, 8, "other")) is None
