"""Descriptors of a trainer: any descriptor that reaches outside its block or table is refused by name."""

import numpy as np
import pytest
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.arena.batch import BadBatch, check_blob, rows_of
from hypothesis import given
from hypothesis import strategies as st

BLOCK = 8 << 20
WHOLE = (Box(table="t", row_start=0, row_stop=1000, col_start=0, col_stop=8),)
TABLES = (
    TableSchema(
        fqn="t",
        rows=1000,
        columns=8,
        dtype="bfloat16",
        fields=(
            FieldSpec(name="sum", kind="rowwise", dtype="float32"),
            FieldSpec(name="m", kind="pointwise", dtype="float32"),
        ),
    ),
)


def test_batch_layout_matches_the_contract() -> None:
    """Ids, weights and fields start at multiples of 64 and are read as views."""
    batch = rows_of(pb.RowBatch(offset=64, rows=3, col_start=2, col_stop=6), TABLES, WHOLE, BLOCK)
    assert (batch.offsets, batch.length) == ((0, 64, 128, 192), 256)
    data = bytearray(batch.length)
    data[0:24] = np.array([4, 5, 900]).tobytes()
    data[64:88] = np.arange(12, dtype=np.uint16).tobytes()
    data[128:140] = np.float32([1, 2, 3]).tobytes()
    data[192:240] = np.arange(12, dtype=np.float32).tobytes()
    block = batch.block(memoryview(data))
    assert list(block.ids) == [4, 5, 900]
    assert (block.row_span, block.columns) == ((4, 900), range(2, 6))
    assert block.weights.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert block.fields["sum"].tolist() == [1, 2, 3]
    assert block.fields["m"].tolist() == np.arange(12).reshape(3, 4).tolist()
    assert np.shares_memory(block.weights, np.frombuffer(data, np.uint8))


def test_only_changed_rows_are_sent_again() -> None:
    place = {"rows": 1, "col_start": 0, "col_stop": 8}
    batch = rows_of(pb.RowBatch(fresh=True, duplicated=True, **place), TABLES, WHOLE, BLOCK)
    assert (batch.fresh, batch.duplicate) == (True, True)
    with pytest.raises(BadBatch, match="did not change"):
        rows_of(pb.RowBatch(duplicated=True, **place), TABLES, WHOLE, BLOCK)


SHARDS = (
    Box(table="t", row_start=0, row_stop=100, col_start=0, col_stop=4),
    Box(table="t", row_start=500, row_stop=600, col_start=0, col_stop=4),
    Box(table="other", row_start=0, row_stop=1000, col_start=0, col_stop=8),
)


@pytest.mark.parametrize(
    ("row_start", "rows", "columns"),
    [(90, 20, (0, 4)), (100, 1, (0, 4)), (0, 600, (0, 4)), (0, 1, (4, 8)), (0, 1, (2, 6))],
)
def test_rows_and_columns_outside_the_boxes_are_refused(
    row_start: int, rows: int, columns: tuple[int, int]
) -> None:
    place = {"rows": rows, "col_start": columns[0], "col_stop": columns[1]}
    with pytest.raises(BadBatch, match="are not in any box of this trainer"):
        rows_of(pb.RowBatch(contiguous=True, row_start=row_start, **place), TABLES, SHARDS, BLOCK)


def test_listed_rows_outside_the_boxes_are_refused() -> None:
    """One box must contain the first and the last id."""
    batch = rows_of(pb.RowBatch(rows=2, col_start=0, col_stop=4), TABLES, SHARDS, BLOCK)
    data = bytearray(batch.length)
    for ids in ((99, 100), (99, 500), (300, 301)):
        data[:16] = np.array(ids).tobytes()
        with pytest.raises(BadBatch, match="are not in any box of this trainer"):
            batch.block(memoryview(data))
    data[:16] = np.array((500, 599)).tobytes()
    assert batch.block(memoryview(data)).row_span == (500, 599)


@given(
    table=st.integers(0, 3),
    rows=st.integers(0, 2**64 - 1) | st.integers(0, 2000),
    row_start=st.integers(0, 2**64 - 1) | st.integers(0, 2000),
    offset=st.integers(0, 2**64 - 1) | st.integers(0, 1 << 17).map(lambda n: n * 64),
    col_start=st.integers(0, 9),
    col_stop=st.integers(0, 2**64 - 1) | st.integers(0, 9),
    contiguous=st.booleans(),
)
def test_descriptors_stay_within_block_and_table(
    table: int, rows: int, row_start: int, offset: int, col_start: int, col_stop: int, contiguous: bool
) -> None:
    descriptor = pb.RowBatch(
        table=table, rows=rows, row_start=row_start, offset=offset, col_start=col_start, col_stop=col_stop,
        contiguous=contiguous,
    )  # fmt: skip
    try:
        batch = rows_of(descriptor, TABLES, WHOLE, BLOCK)
    except BadBatch:
        return
    assert table == 0
    assert 0 < batch.rows <= 1000
    assert 0 <= batch.col_start < batch.col_stop <= 8
    assert offset + batch.length <= BLOCK
    assert batch.row_start is None or batch.row_start + batch.rows <= 1000


@pytest.mark.parametrize(
    "chunk",
    [
        {"name": ""},
        {"name": "x" * 2000},
        {"offset": 1},
        {"offset": BLOCK},
        {"length": 101},
        {"length": BLOCK, "blob_bytes": BLOCK},
        {"blob_offset": 1},
        {"length": 0},
    ],
)
def test_invalid_chunks_are_refused(chunk: dict[str, object]) -> None:
    good = {"name": "meta", "offset": 0, "length": 100, "blob_offset": 0, "blob_bytes": 100}
    check_blob(pb.BlobChunk(**good), BLOCK)  # type: ignore[arg-type]
    with pytest.raises(BadBatch):
        check_blob(pb.BlobChunk(**{**good, **chunk}), BLOCK)  # type: ignore[arg-type]
