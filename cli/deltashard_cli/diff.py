"""`deltashard diff`: bitwise comparison of two checkpoints, row by row and blob by blob (NaN equals itself)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.format import element_type, typed_tree
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint

from deltashard_cli.directory import array_of, tensor_of, values_of
from deltashard_cli.output import Advance

Array = npt.NDArray[np.generic]
_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """Difference of a table's weights or of one of its fields."""

    table: str
    field: str = ""
    rows: int
    rows_differing: int | None = None
    """None if the table is in only one of the checkpoints, or differs in shape or type."""
    largest: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobDifference:
    """A blob that differs or is in only one of the checkpoints."""

    name: str
    bytes_a: int | None
    bytes_b: int | None
    largest: float | None
    """Largest absolute difference of two values; None if the blob is not a tensor in both."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences of two checkpoints."""

    run: str
    seq_a: int
    seq_b: int
    step_a: int
    step_b: int
    tables: tuple[TableDifference, ...]
    blobs: tuple[BlobDifference, ...]
    blobs_equal: int

    @property
    def equal(self) -> bool:
        return not self.blobs and all(table.rows_differing == 0 for table in self.tables)


def compare(a: OpenCheckpoint, b: OpenCheckpoint, *, advance: Advance) -> Difference:
    """Compare two checkpoints table by table, with two tables in memory at once."""
    in_a = {schema.fqn: schema for schema in a.entry.tables}
    in_b = {schema.fqn: schema for schema in b.entry.tables}
    tables: list[TableDifference] = []
    for fqn in sorted(in_a.keys() | in_b.keys()):
        if fqn not in in_a or fqn not in in_b:
            rows = (in_a.get(fqn) or in_b[fqn]).rows
            note = f"only in {a.entry.seq if fqn in in_a else b.entry.seq}"
            tables.append(TableDifference(table=fqn, rows=rows, note=note))
            continue
        (left,) = a.tables((in_a[fqn],), advance=advance)
        (right,) = b.tables((in_b[fqn],), advance=advance)
        tables += _table(left, right)
    blobs, equal = _blobs(a.blobs(a.blob_names, advance=advance), b.blobs(b.blob_names, advance=advance))
    return Difference(
        run=a.state.run,
        seq_a=a.entry.seq,
        seq_b=b.entry.seq,
        step_a=a.entry.step,
        step_b=b.entry.step,
        tables=tuple(tables),
        blobs=blobs,
        blobs_equal=equal,
    )


def _table(left: TableArrays, right: TableArrays) -> list[TableDifference]:
    names: list[str | None] = [None]
    names += sorted(left.fields.keys() | right.fields.keys())
    found = []
    for name in names:
        one = TableDifference(table=left.schema.fqn, field=name or "", rows=left.schema.rows)
        if name is not None and (name not in left.fields or name not in right.fields):
            found.append(replace(one, note="only in one of them"))
            continue
        (dtype_a, values_a), (dtype_b, values_b) = values_of(left, name), values_of(right, name)
        if dtype_a != dtype_b or values_a.shape != values_b.shape:
            found.append(
                replace(one, note=f"{dtype_a}{list(values_a.shape)} and {dtype_b}{list(values_b.shape)}")
            )
            continue
        differing, largest = differing_rows(dtype_a, values_a, values_b)
        found.append(replace(one, rows_differing=differing, largest=largest))
    return found


def differing_rows(dtype: str, a: Array, b: Array) -> tuple[int, float]:
    """Return (number of rows that differ in any bit, largest absolute difference) of arrays of equal shape and type."""
    rows, largest = 0, 0.0
    for at in range(0, max(len(a), 1), _CHUNK_ROWS):
        left, right = a[at : at + _CHUNK_ROWS], b[at : at + _CHUNK_ROWS]
        if left.size == 0:
            continue
        bits_a = np.ascontiguousarray(left).reshape(len(left), -1).view(np.uint8)
        bits_b = np.ascontiguousarray(right).reshape(len(right), -1).view(np.uint8)
        changed = np.flatnonzero((bits_a != bits_b).any(axis=1))
        rows += len(changed)
        if len(changed):
            with np.errstate(invalid="ignore"):
                gaps = np.abs(_numbers(dtype, left[changed]) - _numbers(dtype, right[changed]))
            same = (left[changed] == right[changed]) | np.isnan(gaps)
            largest = max(largest, float(np.where(same, 0.0, gaps).max(initial=0.0)))
    return rows, largest


def _numbers(dtype: str, values: Array) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def _blobs(
    a: Mapping[str, memoryview], b: Mapping[str, memoryview]
) -> tuple[tuple[BlobDifference, ...], int]:
    found = []
    equal = 0
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if left is not None and right is not None and left == right:
            equal += 1
            continue
        largest, note = None, "only in one of them"
        if left is not None and right is not None:
            largest, note = _tree(left, right)
        found.append(
            BlobDifference(
                name=name,
                bytes_a=None if left is None else len(left),
                bytes_b=None if right is None else len(right),
                largest=largest,
                note=note,
            )
        )
    return tuple(found), equal


def _tree(left: memoryview, right: memoryview) -> tuple[float | None, str]:
    a, b = tensor_of(typed_tree.decode(left)), tensor_of(typed_tree.decode(right))
    if a is None or b is None:
        return None, ""
    if a.dtype != b.dtype or a.shape != b.shape:
        return None, f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    if element_type.by_name(a.dtype).name.startswith(("float8", "complex")):
        return None, ""
    flat_a, flat_b = array_of(a).reshape(1, -1), array_of(b).reshape(1, -1)
    return differing_rows(a.dtype, flat_a, flat_b)[1], ""
