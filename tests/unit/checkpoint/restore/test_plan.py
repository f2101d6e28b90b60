"""Plans: what is fetched, in which order, and what is refused before any byte is read."""

from dataclasses import replace

import numpy as np
import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.frame_encoder import encode_blob, encode_blob_frames
from deltashard_checkpoint.format.index import Index, Pack, Place
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.chain import ChainLink
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.restore import plan as plans
from deltashard_checkpoint.restore.plan import IncompletePlan, SchemaMismatch, Want, restore_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import RUN, SampleModel, box, schema, tombstone, whole

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
        run=RUN, attempt=1, snapshot_id=seq, step=seq, rank=0, token=TOKEN, tables=(table,),
        packs=tuple(
            Pack(key=object_key.pack_key(attempt=1, snapshot_id=seq, rank=0, token=TOKEN, n=0, state=state), bytes=end + 1)
            for state, end in ((False, at), (True, tail_at))
        ),
        places=tuple(places), boxes=boxes, covers=covers, raw_bytes=0,
    )  # fmt: skip
    key = object_key.index_key(attempt=1, snapshot_id=seq, rank=0, token=TOKEN, xxh3=f"{seq:032x}")
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


def test_plan_is_newest_first_and_merges_adjacent_frames() -> None:
    model = SampleModel(schema())
    table = model.table
    removed = tombstone(table, np.array([7], np.int64), step=2)
    new = _part(table, [removed, *model.frames(range(20), step=2, per_frame=5)], seq=2, covers=1)
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
    ], "rows and their tails, the tombstone stored before them, the baseline and its tails"  # fmt: skip
    assert sum(request.length for request in plan.requests) == plan.bytes


def test_compacted_frames_are_ordered_by_step() -> None:
    model = SampleModel(schema())
    table = model.table
    mixed = [
        *model.frames(range(200), step=1),
        *model.frames(range(20), step=3),
        *model.frames(range(30), step=2),
    ]
    plan = _plan([_part(table, mixed, seq=3, covers=None)], [_want(table)])
    assert [frame.info.step for request in plan.requests for frame in request.frames] == [3, 2, 1]


@settings(max_examples=50, deadline=None)
@given(
    gap=st.sampled_from([0, 64, plans.MAX_GAP_BYTES, plans.MAX_GAP_BYTES + 64]), per_frame=st.integers(1, 100)
)
def test_requests_cover_exactly_the_frames_within_the_size_limit(gap: int, per_frame: int) -> None:
    model = SampleModel(schema())
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


def test_box_without_a_baseline_is_refused() -> None:
    model = SampleModel(schema())
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


def test_schema_differences_are_reported_and_may_be_allowed() -> None:
    model = SampleModel(schema())
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
    model = SampleModel(schema("old.name"))
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


@pytest.mark.parametrize("what", ["missing", "repeated", "tombstones"])
def test_a_baseline_with_fewer_rows_than_its_boxes_is_invalid(what):
    """Ten rows are absent, replaced by repeated rows, or named in a tombstone."""
    model = SampleModel(schema())
    more = {"missing": [], "repeated": model.frames(range(10)), "tombstones": [tombstone(model.table, np.arange(190, 200), step=1)]}  # fmt: skip
    link, index = _part(model.table, [*model.frames(range(190)), *more[what]], seq=1, covers=None)
    if what == "repeated":
        *places, last = index.places
        _plan([(link, index)], [_want(model.table)])
        index = replace(index, places=(*places, replace(last, since=0, duplicated_rows=10)))
        assert index.rows == 190
    with pytest.raises(InvalidCheckpoint, match="1520 of 1600 weights"):
        _plan([(link, index)], [_want(model.table)])


def test_resent_copy_of_a_row_takes_precedence():
    model = SampleModel(schema())
    frames = [*model.frames(range(200)), *model.frames(range(10))]
    link, index = _part(model.table, frames, seq=1, covers=None)
    *places, last = index.places
    index = replace(index, places=(*places, replace(last, since=0, duplicated_rows=10)))
    plan = _plan([(link, index)], [_want(model.table)])
    assert (plan.requests[0].frames[0].info.rows, plan.frames) == (10, len(index.places))


def test_blob_with_missing_or_duplicate_chunks_is_invalid():
    """Memory for the whole blob is allocated with its first chunk."""
    model = SampleModel(schema())
    chunks = list(encode_blob_frames(name="rng", data=bytes(9000), step=1, chunk_bytes=4096))
    huge = encode_blob(name="rng", offset=0, blob_bytes=1 << 40, chunk=bytes(100), step=1)
    for wrong, why in ((chunks[1:], "rng"), ([*chunks, chunks[1]], "rng"), ([huge], "1099511627776 bytes in chunks of 256")):  # fmt: skip
        link, index = _part(model.table, [*model.frames(range(200)), *wrong], seq=1, covers=None)
        with pytest.raises(InvalidCheckpoint, match=why):
            _plan([(link, index)], [_want(model.table)], blob_parts=[link.part])
