"""Chains follow `covers` per part and box by box, within a lineage; compactions end them."""

import random

import pytest
from deltashard_checkpoint.format.object_key import compaction_index_key
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import (
    SAID,
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
    those_live,
)
from deltashard_checkpoint.log.entry import Compacted, Part

from tests.support.checkpoint.run_builder import WHOLE, Run, part, rows


def walked(run: Run, seq: int, boxes=None) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [
        (link.seq, link.part.rank, [(b.row_start, b.row_stop) for b in link.boxes])
        for link in chain(run.log.state, seq, boxes)
    ]


def resharded() -> tuple[Run, int, int, int]:
    """Two ranks, a baseline and a delta; then three ranks, whose first delta covers the two ranks' delta."""
    run = Run()
    first = run.open(world_size=2).attempt
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


def test_a_chain_is_followed_per_part_and_box_by_box_across_a_resharding():
    run, base, delta, last = resharded()
    assert walked(run, last) == [
        (last, 0, [(0, 3)]),
        (last, 1, [(3, 6)]),
        (last, 2, [(6, 8)]),
        (delta, 0, [(0, 3), (3, 4)]),
        (delta, 1, [(4, 6)]),
        (base, 0, [(0, 3), (3, 4)]),
    ]
    assert closure(run.log.state, [last]) == {base, delta, last}


def test_only_the_wanted_boxes_are_walked():
    run, _, delta, last = resharded()
    assert walked(run, last, [rows(4, 5)]) == [(last, 1, [(4, 5)]), (delta, 1, [(4, 5)])]
    assert walked(run, last, [rows(7, 8)]) == [(last, 2, [(7, 8)])]


def test_a_box_that_nobody_holds_is_an_error_or_left_out():
    run, *_, last = resharded()
    with pytest.raises(ChainIncomplete, match=r"t\[8:10"):
        chain(run.log.state, last, [rows(7, 10)])
    assert chain(run.log.state, last, [rows(7, 10)], strict=False)[0].boxes == (rows(7, 8),)
    assert set(missing(run.log.state, last, [rows(7, 10), rows(0, 1, "new")])) == {
        rows(8, 10),
        rows(0, 1, "new"),
    }


def test_a_retired_or_unknown_checkpoint_is_not_found():
    run, *_ = resharded()
    with pytest.raises(CheckpointNotFound, match="no live checkpoint 99"):
        chain(run.log.state, 99)


@pytest.mark.parametrize("live", [0, 1, SAID, SAID + 4])
def test_the_newest_live_checkpoints_are_named_and_all_are_counted(live):
    run = Run()
    attempt = run.open().attempt
    for cut in range(live):
        run.append_checkpoint([part(attempt, cut, 0, [WHOLE], None)], attempt=attempt, cut=cut, step=10 * cut)
    said = those_live(run.log.state.checkpoints.values())
    counted = f"live, the newest {SAID} of {live}: " if live > SAID else "live: "
    newest = sorted(run.log.state.checkpoints)[-SAID:]
    assert said.startswith(counted)
    assert [int(part.split()[0]) for part in said.split("seq ")[1:]] == newest
    assert said.endswith(f"seq {newest[-1]} (step {10 * (live - 1)})" if live else ": none")


def test_a_compaction_ends_the_chain_at_its_checkpoint():
    run, base, delta, last = resharded()
    key = compaction_index_key(token="c0ffee00c0ffee00", xxh3="1" * 32)
    boxes = tuple(b for p in parts_of(run.log.state, delta) for b in p.boxes)
    whole = Part(rank=0, index_key=key, boxes=boxes, stored_bytes=1, covers=None)
    run.append(
        lambda state, seq, writer: Compacted(
            seq=seq,
            previous="",
            writer=writer,
            at_s=0.0,
            replaces=delta,
            parts=(whole,),
            encodings={},
            rows=8,
            stored_bytes=1,
        )
    )
    assert walked(run, last)[3:] == [(delta, 0, [(0, 3), (3, 4), (4, 6)])]
    assert closure(run.log.state, [last]) == {delta, last}
    assert base in run.log.state.checkpoints


def test_a_lineage_is_its_own_commits_and_those_it_resumed_from():
    run = Run()
    first = run.open().attempt
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

    def cells(box: Box) -> list[tuple[int, int]]:
        return [
            (r, c) for r in range(box.row_start, box.row_stop) for c in range(box.col_start, box.col_stop)
        ]

    for _ in range(500):
        a, b = draw(), draw()
        common = intersection(a, b)
        pieces = difference(a, b) + ([common] if common else [])
        assert sorted(cell for piece in pieces for cell in cells(piece)) == sorted(cells(a))
        assert (sorted(cells(common)) if common else []) == sorted(set(cells(a)) & set(cells(b)))
    assert intersection(WHOLE, rows(0, 8, "other")) is None
