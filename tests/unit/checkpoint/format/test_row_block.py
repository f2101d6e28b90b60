"""Blocks of rows: arrays that do not match the schema are refused."""

from dataclasses import replace

import numpy as np
import pytest
from deltashard_checkpoint.format.row_block import FrameEncodeError, RowBlock
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema

TABLE = TableSchema(
    fqn="t",
    rows=10,
    columns=4,
    dtype="bfloat16",
    fields=(
        FieldSpec(name="sum", kind="rowwise", dtype="float32"),
        FieldSpec(name="m", kind="pointwise", dtype="float32"),
    ),
)


def block() -> RowBlock:
    return RowBlock(
        schema=TABLE, ids=np.array([2, 5, 9]), weights=np.zeros((3, 2), np.uint16),
        fields={"sum": np.arange(3, dtype=np.float32), "m": np.ones((3, 2), np.float32)}, columns=range(1, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"columns": range(3, 5)}, "columns 3:5 of 4"),
        ({"columns": range(2, 2)}, "columns 2:2 of 4"),
        ({"columns": range(0, 4, 2)}, "columns 0:4 of 4"),
        ({"columns": range(1, 4)}, r"weights uint16\[3, 2\] for 3 rows of 3 bfloat16"),
        ({"weights": np.zeros((3, 2), np.float32)}, r"weights float32\[3, 2\] for 3 rows of 2 bfloat16"),
        ({"ids": range(0)}, "for 0 rows"),
        ({"ids": range(8, 11)}, "rows 8 to 10 of 10"),
        ({"ids": np.array([-1, 0, 1])}, "rows -1 to 1 of 10"),
        (
            {"fields": {"sum": np.zeros(3, np.float32)}},
            r"fields \['sum'\] given, the schema has \['m', 'sum'\]",
        ),
        (
            {"fields": {"sum": np.zeros(3, np.float32), "m": np.zeros(3, np.float32)}},
            r"field float32\[3\], float32\[3, 2\] expected \[t.m\]",
        ),
        (
            {"fields": {"sum": np.zeros(3), "m": np.zeros((3, 2), np.float32)}},
            r"field float64\[3\], float32\[3\] expected \[t.sum\]",
        ),
    ],
)
def test_arrays_not_matching_the_schema_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(FrameEncodeError, match=what):
        replace(block(), **change)  # type: ignore[arg-type]


def test_slice_keeps_columns() -> None:
    whole = block()
    part = whole[1:]
    assert (list(part.ids), part.row_span, part.columns) == ([5, 9], (5, 9), range(1, 3))
    assert part.fields["sum"].tolist() == [1, 2]
    assert np.shares_memory(part.weights, whole.weights)
