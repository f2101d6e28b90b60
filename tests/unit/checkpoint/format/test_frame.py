"""Frames: round trips of every kind, golden bytes, refusals, and packs that are readable without an index."""

import struct
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, InternalBug, UnsupportedVersion
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.frame import checked_tail, digest_of, parse_frame
from deltashard_checkpoint.format.frame_encoder import (
    FRAME_WEIGHT_BYTES,
    encode_blob_frames,
    encode_row_frames,
    encode_rows,
)
from deltashard_checkpoint.format.frame_layout import MAX_FRAME_BYTES
from deltashard_checkpoint.format.row_block import EncodeOptions, FrameEncodeError, RowBlock, stored_row_bytes
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.vocabulary import ENCODINGS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import SampleModel, sample_frames, schema, whole

GOLDEN = Path(__file__).parents[3] / "golden" / "v1"


@pytest.mark.parametrize("name", sorted(sample_frames()))
def test_writer_reproduces_version_1_golden_bytes(name: str) -> None:
    """The bytes of version 1 never change. A difference here needs a new version of the format."""
    golden = (GOLDEN / f"{name}.frame").read_bytes()
    frame = sample_frames()[name]
    assert bytes(frame.data) == golden
    assert parse_frame(golden).info == frame.info
    tail = GOLDEN / f"{name}.tail"
    assert tail.exists() == (frame.tail is not None)
    if frame.tail is not None:
        assert bytes(frame.tail) == tail.read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300), columns=st.integers(1, 20), share=st.floats(0.01, 1),
    encoding=st.sampled_from(["fp32", "fp16", "bf16", "q8", "q4", "q3", "q2"]),
    state=st.sampled_from(["fp32", "bf16"]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_rows_round_trip(rows, columns, share, encoding, state, seed):
    """Ids, step, encoding and row-wise state are exact. A frame is never larger than its raw rows."""
    table = schema(rows=rows, columns=columns)
    model = SampleModel(table, seed)
    ids = np.flatnonzero(model.rng.random(rows) < share).astype(np.int64)
    if not len(ids):
        ids = np.array([rows - 1], np.int64)
    frame = encode_rows(
        model.block(ids), EncodeOptions(encoding=ENCODINGS[encoding], state_encoding=state), step=seed
    )
    parsed = parse_frame(frame.data, frame.tail)
    assert parsed.info == frame.info
    assert parsed.table == table
    np.testing.assert_array_equal(parsed.row_ids(), ids)
    target = TableTarget(
        schema=table, box=whole(table), weights=np.zeros((rows, columns), np.float32),
        fields={"sum": np.zeros(rows, np.float32), "exp_avg": np.zeros((rows, columns), np.float32)},
    )  # fmt: skip
    FrameApplier([target]).apply(parsed)
    np.testing.assert_array_equal(target.fields["sum"][ids], model.fields["sum"][ids])
    np.testing.assert_allclose(
        target.fields["exp_avg"][ids], model.fields["exp_avg"][ids], rtol=0 if state == "fp32" else 2**-8
    )
    assert frame.info.stored_bytes <= frame.raw_bytes + 64 * 20 + 9 * len(ids) + 400


def test_rows_are_split_into_frames_below_the_limit() -> None:
    table = TableSchema(
        fqn="wide", rows=4000, columns=2048, dtype="float32",
        fields=(FieldSpec(name="m", kind="pointwise", dtype="float32"),),
    )  # fmt: skip
    weights = np.zeros((1200, 2048), np.float32)
    exact = EncodeOptions(encoding=ENCODINGS["fp32"])
    found = list(
        encode_row_frames(
            RowBlock.of_whole_rows(table, range(100, 1300), weights, {"m": weights}), exact, step=1
        )
    )
    assert {frame.info.rows for frame in found} == {120}
    assert all(frame.info.rows * 8192 <= FRAME_WEIGHT_BYTES for frame in found)
    assert found[0].info.row_min == 100
    assert sum(f.info.rows for f in found) == 1200
    with pytest.raises(FrameEncodeError, match="split the rows"):
        encode_rows(RowBlock.of_whole_rows(table, range(1200), weights, {"m": weights}), exact, step=1)


@pytest.mark.parametrize(("encoding", "rows"), [("q8", 1 << 20), ("q2", 1 << 20)])
def test_frames_are_split_by_weight_or_tail_size(encoding: str, rows: int) -> None:
    """Frames are also split when the state or raw weights of 1 MiB of encoded rows exceed a frame."""
    for fields in ((), (FieldSpec(name="m", kind="pointwise", dtype="float64"),)):
        table = TableSchema(fqn="t", rows=rows, columns=32, dtype="float32", fields=fields)
        n = frame_encoder.rows_per_frame(table, 32, ENCODINGS[encoding])
        stored = stored_row_bytes(table, 32, ENCODINGS[encoding], "fp32") - 256 * len(fields)
        raw, state = (
            32 * 4 + 3,
            32 * 8 * len(fields),
        )  # bytes of a row that cannot be encoded, with its id; bytes of its state
        limits = FRAME_WEIGHT_BYTES // stored, MAX_FRAME_BYTES // max(raw, state)
        assert n <= min(limits) <= 1.01 * n


def test_only_the_named_tail_is_accepted() -> None:
    """A tail of other rows, of another step or of other values is refused, and so is the frame itself."""
    model = SampleModel(schema())
    one = model.frames(range(5))[0]
    parse_frame(one.data, one.tail)
    checked_tail(one.tail, one.info)
    others = [model.frames(range(6))[0], model.frames(range(5), step=2)[0]]
    model.fields["sum"][3] += 1
    others.append(model.frames(range(5))[0])
    assert bytes(others[-1].tail) != bytes(one.tail)
    for other in others:
        with pytest.raises(ForeignObject, match="is not that of the frame"):
            parse_frame(one.data, other.tail)
        with pytest.raises(CorruptObject, match="hash"):
            checked_tail(other.tail, one.info)
    with pytest.raises(CorruptObject, match="found another frame"):
        parse_frame(one.data, one.data)
    with pytest.raises(CorruptObject, match="found a tail"):
        parse_frame(one.tail)


def test_weights_are_readable_without_the_tail_and_state_is_not() -> None:
    table = schema()
    frame = SampleModel(table).frames(range(5))[0]
    weights = np.zeros((200, 8), np.float32)
    FrameApplier([TableTarget(schema=table, box=whole(table), weights=weights)]).apply(frame.data)
    assert weights[:5].any()
    fields = {"sum": np.zeros(200, np.float32)}
    wanted = FrameApplier(
        [TableTarget(schema=table, box=whole(table), weights=weights, fields=fields)], strict=False
    )
    with pytest.raises(InternalBug, match="without its tail"):
        wanted.apply(frame.data)


def test_blobs_are_chunked_and_may_be_empty() -> None:
    data = np.random.default_rng(0).bytes(10_000)
    found = list(encode_blob_frames(name="rng", data=data, step=3, chunk_bytes=4096))
    assert [f.info.blob_offset for f in found] == [0, 4096, 8192]
    applier = FrameApplier([])
    for frame in (*reversed(found), *encode_blob_frames(name="none", data=b"", step=3)):
        applier.apply(frame.data, frame.tail, verify=True)
    applier.finish(blobs=["rng", "none"])
    assert applier.blobs["rng"] == data
    with pytest.raises(CorruptObject, match="twice"):
        applier.apply(found[0].data, found[0].tail)
    lacking = FrameApplier([])
    lacking.apply(found[0].data, found[0].tail)
    with pytest.raises(Exception, match="incomplete: \\['rng'\\]"):
        lacking.finish()


def test_newer_version_and_truncated_frame_are_refused() -> None:
    data = bytes(SampleModel(schema()).frames(range(5))[0].data)
    newer = bytearray(data)
    struct.pack_into("<H", newer, 4, 2)
    with pytest.raises(UnsupportedVersion, match="version 2"):
        parse_frame(newer)
    for stop in (0, 10, 63, 64, len(data) - 64):
        with pytest.raises(CorruptObject):
            parse_frame(data[:stop])
    assert digest_of(memoryview(data)) == data[48:64]
