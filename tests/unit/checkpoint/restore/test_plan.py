"""Plans: what is fetched, in which order, and what is refused before a byte is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.index import Index, Pack, Place
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.chain import ChainLink
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.restore import checkpoint_reader
from deltashard_checkpoint.restore import plan as plans
from deltashard_checkpoint.restore.plan import IncompletePlan, SchemaMismatch, Want, restore_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import RUN, Model, Run, box, schema, tombstone, whole

TOKEN = "0123456789abcdef"


def _part(
    table: TableSchema, frames, *, seq: int, covers: int | None, gap: int = 0, boxes=None
) -> tuple[ChainLink, Index]:
    places, at, tail_at = [], 0, 0
    for frame in frames:
        place = Place(pack=0, offset=at, info=frame.info)
        at += frame.info.length + gap
        if frame.info.tail is not None:
            place = replace(place, tail_pack=1, tail_offset=tail_at)
            tail_at += frame.info.tail.length + gap
        places.append(place)
    boxes = tuple(boxes or (whole(table),))
    index = Index(
        run=RUN, attempt=1, cut=seq, step=seq, rank=0, token=TOKEN, tables=(table,),
        packs=tuple(
            Pack(key=object_key.pack_key(attempt=1, cut=seq, rank=0, token=TOKEN, n=0, state=state), bytes=end + 1)
            for state, end in ((False, at), (True, tail_at))
        ),
        places=tuple(places), boxes=boxes, covers=covers, raw_bytes=0,
    )  # fmt: skip
    key = object_key.index_key(attempt=1, cut=seq, rank=0, token=TOKEN, xxh3=f"{seq:032x}")
    return ChainLink(
        seq=seq, part=Part(rank=0, index_key=key, boxes=boxes, stored_bytes=at, covers=covers), boxes=boxes
    ), index


def _plan(parts, wants, **options):
    links = [link for link, _ in parts]
    return restore_plan(
        links, {link.part.index_key: index for link, index in parts}, wants, seq=links[0].seq, **options
    )


def _want(table: TableSchema, *boxes: Box) -> Want:
    return Want(schema=table, boxes=boxes or (whole(table),))


def test_newest_first_rows_before_tombstones_and_neighbours_joined() -> None:
    """The order is the applier's contract."""
    model = Model(schema())
    table = model.table
    dead = tombstone(table, np.array([7], np.int64), step=2)
    new = _part(table, [dead, *model.frames(range(20), step=2, per_frame=5)], seq=2, covers=1)
    old = _part(table, model.frames(range(200), step=1, per_frame=20), seq=1, covers=None)
    plan = _plan([new, old], [_want(table)])
    order = [
        (frame.seq, frame.info.kind, frame.baseline) for request in plan.requests for frame in request.frames
    ]
    assert (
        order
        == [(2, FrameKind.ROWS, False)] * 4
        + [(2, FrameKind.TOMBSTONE, False)]
        + [(1, FrameKind.ROWS, True)] * 10
    )
    assert plan.chain == (2, 1)
    assert plan.frames == 15
    assert [(len(each.frames), len(each.tails)) for each in plan.requests] == [
        (4, 0), (0, 4), (1, 0), (10, 0), (0, 10)
    ], "rows and their tails, the tombstone that lies before them, the baseline and its tails"  # fmt: skip
    assert sum(request.length for request in plan.requests) == plan.bytes


def test_weights_alone_are_read_without_a_byte_of_state() -> None:
    model = Model(schema())
    part = _part(model.table, model.frames(range(200), per_frame=20), seq=1, covers=None)
    plan = _plan([part], [_want(model.table)], weights_only=True)
    assert not any(each.tails or object_key.parse_pack_key(each.key).state for each in plan.requests)
    assert plan.bytes == sum(place.info.length for place in part[1].places)
    assert not any(frame.state for each in plan.requests for frame in each.frames)


def test_a_compactions_frames_go_by_their_steps() -> None:
    """It holds frames of many cuts in one part; newer steps win."""
    model = Model(schema())
    table = model.table
    mixed = [
        *model.frames(range(200), step=1),
        *model.frames(range(20), step=3),
        *model.frames(range(30), step=2),
    ]
    plan = _plan([_part(table, mixed, seq=3, covers=None)], [_want(table)])
    assert [frame.info.step for request in plan.requests for frame in request.frames] == [3, 2, 1]


def test_only_frames_that_meet_the_wanted_boxes_are_fetched() -> None:
    """Byte ranges of other ranks' rows and columns are left out."""
    model = Model(schema())
    table = model.table
    frames = [f for c in (0, 4) for f in model.frames(range(200), box(table, 0, 200, c, c + 4), per_frame=20)]
    plan = _plan([_part(table, frames, seq=1, covers=None)], [_want(table, box(table, 30, 50, 5, 6))])
    chosen = [frame.info for request in plan.requests for frame in request.frames]
    assert [(info.row_min, info.row_max, info.col_start) for info in chosen] == [(20, 39, 4), (40, 59, 4)]


@settings(max_examples=50, deadline=None)
@given(
    gap=st.sampled_from([0, 64, plans.MAX_GAP_BYTES, plans.MAX_GAP_BYTES + 64]), per_frame=st.integers(1, 100)
)
def test_requests_cover_exactly_the_frames_and_stay_small(gap: int, per_frame: int) -> None:
    """Whatever is joined, every frame lies inside its request where it says."""
    model = Model(schema())
    table = model.table
    part = _part(table, model.frames(range(200), per_frame=per_frame), seq=1, covers=None, gap=gap)
    plan = _plan([part], [_want(table)])
    places, tails = iter(part[1].places), iter(part[1].places)
    for request in plan.requests:
        assert request.length <= plans.MAX_REQUEST_BYTES
        for tail in request.tails:
            place = next(tails)
            assert (request.key, tail.info) == (part[1].packs[1].key, place.info)
            assert request.offset + tail.offset == place.tail_offset
            assert tail.offset + tail.info.tail.length <= request.length
        for frame in request.frames:
            assert request.offset + frame.offset == next(places).offset
            assert frame.offset % 64 == 0
            assert frame.offset + frame.info.length <= request.length
    assert next(places, None) is next(tails, None) is None
    assert (len(plan.requests) == 2 * plan.frames) is (gap > plans.MAX_GAP_BYTES or plan.frames == 1)


def test_a_box_that_no_baseline_reaches_is_refused_by_rows_and_columns() -> None:
    """A delta alone restores nothing."""
    model = Model(schema())
    table = model.table
    delta = _part(table, model.frames(range(20)), seq=2, covers=1)
    half = box(table, 0, 100, 0, 8)
    base = _part(table, model.frames(range(100), half), seq=1, covers=None, boxes=[half])
    with pytest.raises(
        IncompletePlan, match=r"does not hold embeddings.items.weight\[100:200, 0:8\]"
    ) as caught:
        _plan([delta, base], [_want(table)])
    assert caught.value.missing == (box(table, 100, 200, 0, 8),)
    with pytest.raises(IncompletePlan):
        _plan([delta], [_want(table)], strict=False)


def test_a_baseline_with_fewer_rows_than_its_boxes_is_invalid() -> None:
    """Its log entry was written too early, or an index of another cut was found."""
    model = Model(schema())
    with pytest.raises(InvalidCheckpoint, match="1520 of 1600 weights"):
        _plan([_part(model.table, model.frames(range(190)), seq=1, covers=None)], [_want(model.table)])


def test_rows_that_a_frame_repeats_count_for_nothing_in_a_baseline() -> None:
    """Ten rows are missing, and ten are there twice."""
    model = Model(schema())
    link, index = _part(
        model.table, [*model.frames(range(190)), *model.frames(range(10))], seq=1, covers=None
    )
    _plan([(link, index)], [_want(model.table)])
    *places, last = index.places
    index = replace(index, places=(*places, replace(last, since=0, again=10)))
    assert index.rows == 190
    with pytest.raises(InvalidCheckpoint, match="1520 of 1600 weights"):
        _plan([(link, index)], [_want(model.table)])


def test_of_two_copies_of_a_row_the_one_in_a_frame_of_again_comes_first() -> None:
    """Wherever it lies: a follower reads no other."""
    model = Model(schema())
    link, index = _part(
        model.table, [*model.frames(range(200)), *model.frames(range(10))], seq=1, covers=None
    )
    *places, last = index.places
    index = replace(index, places=(*places, replace(last, since=0, again=10)))
    plan = _plan([(link, index)], [_want(model.table)])
    first = plan.requests[0].frames[0]
    assert (first.info.rows, plan.frames) == (10, len(index.places))


def test_tombstones_count_for_nothing_in_a_baseline() -> None:
    """A few bytes name any number of them; memory is given by what a baseline is taken to hold."""
    model = Model(schema())
    frames = [*model.frames(range(190)), tombstone(model.table, np.arange(190, 200), step=1)]
    with pytest.raises(InvalidCheckpoint, match="1520 of 1600 weights"):
        _plan([_part(model.table, frames, seq=1, covers=None)], [_want(model.table)])


def test_differences_of_schema_are_named_and_may_be_allowed() -> None:
    """Grown, shrunk, new, renamed, retyped: refused by default, said when allowed."""
    model = Model(schema())
    stored = model.table
    parts = [_part(stored, model.frames(range(200)), seq=1, covers=None)]
    grown = replace(stored, rows=250)
    with pytest.raises(IncompletePlan, match=r"\[200:250, 0:8\].*strict=False"):
        _plan(parts, [_want(grown)])
    plan = _plan(parts, [_want(grown)], strict=False)
    assert plan.initial == (box(grown, 200, 250, 0, 8),)
    assert "200 rows are stored, the model has 250" in plan.notes[0]
    with pytest.raises(SchemaMismatch, match="the others are dropped"):
        _plan(parts, [_want(replace(stored, rows=150))])
    assert _plan(parts, [_want(replace(stored, rows=150))], strict=False).initial == ()
    with pytest.raises(SchemaMismatch, match="8 columns are stored, the model has 9"):
        _plan(parts, [_want(replace(stored, columns=9))], strict=False)
    other = replace(
        stored,
        fields=(
            FieldSpec(name="sum", kind="rowwise", dtype="float64"),
            FieldSpec(name="new", kind="rowwise", dtype="float32"),
        ),
    )
    with pytest.raises(
        SchemaMismatch, match="exp_avg is stored.*new is not stored.*sum is stored as float32"
    ):
        _plan(parts, [_want(other)])
    assert len(_plan(parts, [_want(other)], strict=False).notes) == 3
    assert _plan(parts, [_want(replace(stored, fields=()))], weights_only=True).notes == ()
    with pytest.raises(SchemaMismatch, match="field sum is stored rowwise"):
        _plan(
            parts,
            [_want(replace(stored, fields=(FieldSpec(name="sum", kind="pointwise", dtype="float32"),)))],
            strict=False,
        )


def test_renamed_and_new_tables() -> None:
    """A mapping follows a rename; a new table keeps its initial values only when allowed."""
    model = Model(schema("old.name"))
    parts = [_part(model.table, model.frames(range(200)), seq=1, covers=None)]
    renamed = schema("new.name")
    with pytest.raises(IncompletePlan, match=r"new.name\[0:200, 0:8\]"):
        _plan(parts, [_want(renamed)])
    plan = _plan(parts, [_want(renamed)], mapping={"new.name": "old.name"})
    assert plan.frames == 1
    assert plan.initial == ()
    plan = _plan(parts, [_want(renamed)], strict=False)
    assert plan.frames == 0
    assert plan.initial == (whole(renamed),)


def test_blobs_come_from_the_newest_checkpoint_only(tmp_path: Path) -> None:
    """Those asked for; absent ones are refused."""
    run, model = Run(tmp_path), Model(schema())
    table = model.table
    base = run.save(
        [table], [([whole(table)], model.frames(range(200)))], step=1, blobs={"a": b"1", "old": b"2"}
    )
    seq = run.save(
        [table],
        [([whole(table)], model.frames(model.train()))],
        step=2,
        covers=base,
        blobs={"a": b"3" * 9000, "b": b""},
    )
    state = run.log.refresh()

    def plan(blobs):
        return checkpoint_reader.plan_restore(run.store, state, seq, [_want(table)], blobs=blobs)

    assert plan(True).blobs == ("a", "b")
    assert plan(["a"]).blobs == ("a",)
    assert plan(False).blobs == ()
    with pytest.raises(IncompletePlan, match="old"):
        plan(["old"])
    planned = [f for r in plan(True).requests for f in r.frames]
    assert {f.seq for f in planned if f.info.kind is FrameKind.BLOB} == {seq}
    first_row = next(i for i, f in enumerate(planned) if f.info.kind is FrameKind.ROWS)
    assert all(f.info.kind is not FrameKind.BLOB for f in planned[first_row:]), "blobs come before rows"


def test_a_rank_reads_the_blobs_for_all_and_its_own_whatever_parts_hold_them(tmp_path: Path) -> None:
    """No frame of another rank's is fetched; a rank that was not there, and nobody, read what is for all."""
    run, model = Run(tmp_path), Model(schema())
    table = model.table
    blobs = {
        "meta": b"0",
        "dense/w": b"7" * 9000,
        "rank/1/rng": b"1",
        "rank/12/rng": b"12",
        "rank/x": b"user's",
    }
    seq = run.save([table], [([whole(table)], model.frames(range(200)))], step=1, blobs=blobs)
    state = run.log.refresh()

    def read(rank: int | None, names=True) -> set[str]:
        plan = checkpoint_reader.plan_restore(run.store, state, seq, [_want(table)], blobs=names, rank=rank)
        fetched = {f.info.name for r in plan.requests for f in r.frames if f.info.kind is FrameKind.BLOB}
        assert set(plan.blobs) == fetched
        return fetched

    common = {"meta", "dense/w", "rank/x"}
    assert read(None) == read(0) == read(2) == common
    assert read(1) == common | {"rank/1/rng"}
    assert read(12) == common | {"rank/12/rng"}
    assert read(0, ["rank/12/rng"]) == {"rank/12/rng"}, "named is wanted"


def test_a_blob_that_its_chunks_cannot_carry_is_invalid() -> None:
    """Memory for all of it is taken with the first chunk."""
    model = Model(schema())
    from deltashard_checkpoint.format.frame_encoder import encode_blob

    chunk = encode_blob(name="rng", offset=0, blob_bytes=1 << 40, chunk=bytes(100), step=1)
    link, index = _part(model.table, [*model.frames(range(200)), chunk], seq=1, covers=None)
    with pytest.raises(InvalidCheckpoint, match="1099511627776 bytes in chunks of 256"):
        _plan([(link, index)], [_want(model.table)], blob_parts=[link.part])


def test_a_hole_in_a_blob_is_invalid() -> None:
    """Its first chunk is missing, or one occurs twice."""
    model = Model(schema())
    from deltashard_checkpoint.format.frame_encoder import encode_blob_frames

    chunks = list(encode_blob_frames(name="rng", data=bytes(9000), step=1, chunk_bytes=4096))
    for wrong in (chunks[1:], [*chunks, chunks[1]]):
        link, index = _part(model.table, [*model.frames(range(200)), *wrong], seq=1, covers=None)
        with pytest.raises(InvalidCheckpoint, match="rng"):
            _plan([(link, index)], [_want(model.table)], blob_parts=[link.part])
