"""Chains follow `covers` per part and box by box, within a lineage; compactions end them."""

import itertools
import random

import pytest
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import (
    ChainIncomplete,
    CheckpointNotFound,
    chain,
    closure,
    difference,
    in_lineage,
    intersection,
    lineage,
    missing,
    parts_of,
)

from tests.support.checkpoint.run_builder import WHOLE, Run, begun, part, rows


def walked(run: Run, seq: int, boxes=None) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [
        (link.seq, link.part.rank, [(b.row_start, b.row_stop) for b in link.boxes])
        for link in chain(run.log.state, seq, boxes)
    ]


def resharded() -> tuple[Run, int, int, int]:
    """Two ranks, a baseline and a delta; then three ranks, whose first delta covers the two ranks' delta."""
    run, first = begun(world_size=2)
    halves = [rows(0, 4), rows(4, 8)]
    base = run.append_checkpoint(
        [part(first, 1, r, [halves[r]], None) for r in range(2)], attempt=first, cut=1
    )
    delta = run.append_checkpoint(
        [part(first, 2, 0, [halves[0]], base), part(first, 2, 1, [halves[1]], None)], attempt=first, cut=2
    )
    second = run.open(world_size=3).attempt
    thirds = [rows(0, 3), rows(3, 6), rows(6, 8)]
    covers = [delta, delta, None]
    last = run.append_checkpoint(
        [part(second, 1, r, [thirds[r]], covers[r]) for r in range(3)], attempt=second, cut=1
    )
    return run, base, delta, last


def test_a_chain_is_followed_per_part_and_box_by_box_across_a_resharding_for_the_wanted_boxes():
    run, base, delta, last = resharded()
    assert walked(run, last) == [
        *((last, 0, [(0, 3)]), (last, 1, [(3, 6)]), (last, 2, [(6, 8)])),
        *((delta, 0, [(0, 3), (3, 4)]), (delta, 1, [(4, 6)]), (base, 0, [(0, 3), (3, 4)])),
    ]
    assert closure(run.log.state, [last]) == {base, delta, last}
    assert walked(run, last, [rows(4, 5)]) == [(last, 1, [(4, 5)]), (delta, 1, [(4, 5)])]
    assert walked(run, last, [rows(7, 8)]) == [(last, 2, [(7, 8)])]


def test_a_box_that_nobody_holds_is_an_error_or_left_out():
    run, *_, last = resharded()
    with pytest.raises(ChainIncomplete, match=r"t\[8:10"):
        chain(run.log.state, last, [rows(7, 10)])
    assert chain(run.log.state, last, [rows(7, 10)], strict=False)[0].boxes == (rows(7, 8),)
    wanted = [rows(7, 10), rows(0, 1, "new")]
    assert set(missing(run.log.state, last, wanted)) == {rows(8, 10), wanted[1]}
    with pytest.raises(CheckpointNotFound, match="no live checkpoint 99"):
        chain(run.log.state, 99)


def test_a_compaction_ends_the_chain_at_its_checkpoint():
    run, base, delta, last = resharded()
    run.compacted(delta, [b for p in parts_of(run.log.state, delta) for b in p.boxes])
    assert walked(run, last)[3:] == [(delta, 0, [(0, 3), (3, 4), (4, 6)])]
    assert closure(run.log.state, [last]) == {delta, last}
    assert base in run.log.state.checkpoints


def test_a_lineage_is_its_own_commits_and_those_it_resumed_from():
    run, first = begun()
    a, b, c = (run.commit(first, cut) for cut in (1, 2, 3))
    second = run.open(which=f"seq:{b}").attempt
    d = run.commit(second, 1, b)
    third = run.open().attempt
    assert list(lineage(run.log.state, second)) == [d, b, a]
    assert list(lineage(run.log.state, third)) == [d, b, a]
    assert list(lineage(run.log.state, first)) == [c, b, a]
    for attempt in (first, second, third):
        for seq in (a, b, c, d):
            assert in_lineage(run.log.state, attempt, seq) == (seq in set(lineage(run.log.state, attempt)))


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
