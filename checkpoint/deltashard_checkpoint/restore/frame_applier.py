"""Apply frames to arrays: the one implementation of "the newest frame of a row wins", for trainer, CLI and tests.

A `FrameApplier` has targets (rectangles of tables, as arrays) and receives frames newest first, in a plan's order. For
every target it records what is *provided*, per row and per column interval. A frame fills only rows and columns that no
newer frame has filled, so a newer frame of one column shard never hides the row's other columns. Rows are decoded and
scattered to their final place in one pass, under any saved sharding.

State with one value per row cannot be split by columns. If a target joins column shards s of widths D_s into D columns,
its value is m = sum_s (D_s / D) m_s; if a target is part of a shard, it copies m. (Row-wise Adagrad's m is a mean over
the row's columns, which this preserves.) A frame's value for a row is weighted by all columns of the row that the frame
fills, and a row with equal values in all frames keeps that value bit for bit, so splitting and joining restores the
original. Values that are not floats come from the newest frame.

A tombstone provides its rows as zeros, so older frames cannot restore them. Within one checkpoint a row wins over its
tombstone, because the plan has rows first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import decoder, quantizer
from deltashard_checkpoint.codecs.encoding import raw_encoding
from deltashard_checkpoint.errors import (
    CorruptObject,
    EnvironmentFault,
    InternalBug,
    InvalidCheckpoint,
    UserError,
)
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.frame import Frame, FrameKind, parse_frame
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.chain import describe, difference
from deltashard_checkpoint.restore.plan import SchemaMismatch, field_differences, overlaps
from deltashard_checkpoint.vocabulary import encoding_named

Array = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview
DEFAULT_MAX_BLOBS_BYTES = 1 << 37


class BlobsTooLarge(EnvironmentFault):
    """The blobs of a checkpoint exceed the limit or the memory of this process."""


@dataclass(slots=True, kw_only=True)
class TableTarget:
    """Arrays for the rows of one box of one table."""

    schema: TableSchema
    """Schema of the target's whole table: dtypes of the arrays and kinds of the fields."""
    box: Box
    weights: Array
    """[box rows, box columns] of the schema's dtype (bfloat16 as uint16); rows contiguous, possibly strided."""
    fields: Mapping[str, Array] = field(default_factory=dict)
    """Row-wise [box rows], point-wise [box rows, box columns]; omitted fields are not restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Rows of one target that a frame wrote, in all or some of their columns."""

    target: TableTarget
    rows: Rows
    """Global row ids, ascending."""


class FrameApplier:
    """Applies frames, newest first, to targets. Not thread-safe; use one applier per thread, with disjoint targets."""

    def __init__(
        self,
        targets: Iterable[TableTarget],
        *,
        mapping: Mapping[str, str] | None = None,
        strict: bool = True,
        max_blobs_bytes: int = DEFAULT_MAX_BLOBS_BYTES,
    ) -> None:
        """`mapping` gives the stored name of a renamed table by its target's name.

        With `strict` false a stored dtype may differ from the target's (it is converted) and a field may be absent (it
        is left unchanged); `notes` lists these cases. Raises `UserError` for arrays that do not fit their box.
        """
        self.notes: list[str] = []
        self.narrowed: dict[str, str] = {}
        """Tables with optimizer state that was stored in a narrower type than the target's, and that type."""
        self._strict = strict
        self._tables: dict[str, list[_Table]] = {}
        for target in targets:
            stored = (mapping or {}).get(target.box.table, target.box.table)
            self._tables.setdefault(stored, []).append(_Table(target))
        self._blobs: dict[str, _Blob] = {}
        self._blob_bytes = 0
        self._max_blobs_bytes = max_blobs_bytes

    def apply(  # noqa: C901
        self, frame: Frame | Buffer, tail: Buffer | None = None, *, verify: bool = False
    ) -> tuple[Applied, ...]:
        """Apply one frame with its tail and return the rows written, per target.

        The arguments may be bytes, which are parsed, and hash-checked with `verify`. Without its tail only weights are
        applied, to targets without fields. Frames of other tables are skipped. Raises `FormatError` for malformed bytes
        and `SchemaMismatch` if the stored table does not fit the target.
        """
        if not isinstance(frame, Frame):
            frame = parse_frame(frame, tail, verify=verify)
        if frame.info.kind is FrameKind.BLOB:
            self._apply_blob(frame)
            return ()
        tables = self._tables.get(frame.info.table)
        if not tables:
            return ()
        ids: Rows | None = None
        applied = []
        for table in tables:
            if not overlaps(frame.info, table.target.box):
                continue
            if ids is None:
                ids = frame.row_ids()
            faults, fatal = self._faults(frame, table.target)
            if faults:
                # A field may have been added after this frame was written; newer frames then hold all its rows.
                if not table.needs(frame, ids):
                    continue
                if fatal or self._strict:
                    raise SchemaMismatch(
                        "; ".join(faults),
                        where=table.target.schema.fqn,
                        remedy="only float types are converted"
                        if fatal
                        else "strict=False converts types and leaves absent fields alone",
                    )
                self.notes += [fault for fault in faults if fault not in self.notes]
            rows = table.apply(frame, ids)
            if len(rows):
                applied.append(Applied(target=table.target, rows=rows))
                for section in frame.fields:
                    if (
                        section.spec.name in table.target.fields
                        and section.stored_dtype != section.spec.dtype
                    ):
                        self.narrowed[table.target.schema.fqn] = section.stored_dtype
        return tuple(applied)

    @property
    def blobs(self) -> dict[str, memoryview]:
        """Blobs by name, 64-byte aligned; complete once `finish` has returned."""
        return {name: blob.view for name, blob in self._blobs.items()}

    def missing(self) -> list[Box]:
        return [box for tables in self._tables.values() for table in tables for box in table.missing()]

    def finish(self, *, initial: Iterable[Box] = (), blobs: Iterable[str] = ()) -> None:
        """Raise `InvalidCheckpoint` unless all targets except `initial` boxes, and all blobs, are complete.

        `blobs` names the required blobs. The plan covered them, so a gap invalidates the checkpoint.
        """
        rest = self.missing()
        for box in initial:
            rest = [piece for each in rest for piece in difference(each, box)]
        if rest:
            raise InvalidCheckpoint(f"no frame provided {describe(rest)}")
        absent = sorted(set(blobs) - set(self._blobs))
        torn = sorted(name for name, blob in self._blobs.items() if not blob.whole)
        if absent or torn:
            raise InvalidCheckpoint(f"blobs absent: {absent}, incomplete: {torn}")

    @staticmethod
    def _faults(frame: Frame, target: TableTarget) -> tuple[list[str], bool]:
        """Return the differences between stored and target schema, and whether no conversion resolves them."""
        table = frame.table
        assert table is not None
        fqn = target.schema.fqn
        if target.fields and frame.info.tail is not None and not frame.fields:
            raise InternalBug("a frame without its tail cannot restore optimizer state", where=table.fqn)
        if table.columns != target.schema.columns:
            raise SchemaMismatch(
                f"{table.columns} columns are stored, the model has {target.schema.columns}", where=fqn
            )
        faults: list[str] = []
        fatal: list[str] = []
        if frame.info.kind is FrameKind.ROWS:
            wanted = (spec for spec in target.schema.fields if spec.name in target.fields)
            faults, fatal = field_differences(wanted, table.fields)
        if table.dtype != target.schema.dtype:
            faults.insert(0, f"{table.dtype} is stored, the model has {target.schema.dtype}")
        return [f"{fqn}: {fault}" for fault in (*faults, *fatal)], bool(fatal)

    def _apply_blob(self, frame: Frame) -> None:
        info = frame.info
        blob = self._blobs.get(info.name)
        if blob is None:
            self._blob_bytes += info.blob_bytes
            if self._blob_bytes > self._max_blobs_bytes:
                raise BlobsTooLarge(
                    f"blobs of {self._blob_bytes} bytes, limit {self._max_blobs_bytes}",
                    where=info.name,
                    remedy="raise max_blobs_bytes if the dense state is really that large",
                )
            blob = self._blobs[info.name] = _Blob(info.name, info.blob_bytes)
        blob.put(info.blob_offset, info.blob_bytes, frame.chunk)


class _Blob:
    """A blob under assembly; its memory pages are touched only as chunks arrive."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        try:
            room = np.empty(size + 64, np.uint8)
        except MemoryError:
            raise BlobsTooLarge(f"no memory for a blob of {size} bytes", where=name) from None
        start = -room.ctypes.data % 64
        self.view = memoryview(room.data)[start : start + size]
        self._chunks: dict[int, int] = {}

    def put(self, offset: int, size: int, chunk: memoryview) -> None:
        if size != self.size:
            raise CorruptObject(
                f"chunks disagree on the blob's size: {self.size} and {size}", where=self.name
            )
        if offset in self._chunks:
            raise CorruptObject(f"chunk at {offset} occurs twice", where=self.name)
        self._chunks[offset] = len(chunk)
        self.view[offset : offset + len(chunk)] = chunk

    @property
    def whole(self) -> bool:
        at = 0
        for offset, length in sorted(self._chunks.items()):
            if offset != at:
                return False
            at += length
        return at == self.size


class _Table:
    """A target and its provided rows and columns."""

    def __init__(self, target: TableTarget) -> None:
        box = target.box
        self.target = target
        self.rows = box.row_stop - box.row_start
        self.width = box.col_stop - box.col_start
        if target.weights.shape != (self.rows, self.width):
            raise UserError(f"weights {list(target.weights.shape)} for box {box}")
        specs = {spec.name: spec for spec in target.schema.fields}
        for name, values in target.fields.items():
            if name not in specs:
                raise UserError(f"field {name} is not in the schema of {box.table}")
            shape = (self.rows,) if specs[name].kind == "rowwise" else (self.rows, self.width)
            if values.shape != shape:
                raise UserError(f"field {name} {list(values.shape)} for box {box}, {list(shape)} expected")
        self.specs = [specs[name] for name in target.fields]
        # Column intervals [start, stop) in the box's coordinates, with one flag per row; they cover all columns.
        self.intervals: list[tuple[int, int, Mask]] = [(0, self.width, np.zeros(self.rows, np.bool_))]
        self._merges: dict[str, _RowwiseMerge] = {}

    def needs(self, frame: Frame, ids: Rows) -> bool:
        box, info = self.target.box, frame.info
        at = ids[(ids >= box.row_start) & (ids < box.row_stop)] - box.row_start
        start, stop = info.col_start - box.col_start, info.col_stop - box.col_start
        return any(
            first < stop and last > start and not provided[at].all()
            for first, last, provided in self.intervals
        )

    def apply(self, frame: Frame, ids: Rows) -> Rows:
        """Write rows and columns that are not provided yet; return the global ids of the rows written."""
        box, info = self.target.box, frame.info
        positions = ids - box.row_start
        if self._is_first(frame, positions):
            fill = _Fill(rows=positions, take=None, first=0, last=self.width)
            self._write(frame, fill)
            self.intervals[0][2][_span(frame, positions)] = True
            self._write_rowwise(frame, positions, None)
            return ids
        inside: Mask | None = None
        if info.row_min < box.row_start or info.row_max >= box.row_stop:
            inside = (positions >= 0) & (positions < self.rows)
            if not inside.any():
                return ids[:0]
        start = max(info.col_start - box.col_start, 0)
        stop = min(info.col_stop - box.col_start, self.width)
        self._split_at(start)
        self._split_at(stop)
        at = positions if inside is None else np.where(inside, positions, 0)
        filled = np.zeros(len(ids), np.int64)
        for first, last, provided in self.intervals:
            if first < start or last > stop:
                continue
            take = ~provided[at]
            if inside is not None:
                take &= inside
            if not take.any():
                continue
            fill = _Fill(rows=positions, take=None if take.all() else take, first=first, last=last)
            self._write(frame, fill)
            provided[fill.taken_rows] = True
            filled += take * (last - first)
        self._write_rowwise(frame, positions, filled)
        written = filled > 0
        return ids if written.all() else ids[written]

    def _is_first(self, frame: Frame, positions: Rows) -> bool:
        """Return whether all rows of the frame are wanted, in all columns, and none is provided yet.

        This holds for most frames of a baseline, which then need no check per row.
        """
        box, info = self.target.box, frame.info
        return (
            len(self.intervals) == 1
            and box.row_start <= info.row_min
            and info.row_max < box.row_stop
            and info.col_start <= box.col_start
            and info.col_stop >= box.col_stop
            and not self.intervals[0][2][_span(frame, positions)].any()
        )

    def missing(self) -> list[Box]:
        box = self.target.box
        found = []
        for first, last, provided in self.intervals:
            edges = np.flatnonzero(np.diff(np.concatenate(([True], provided, [True])).view(np.int8)))
            for start, stop in edges.reshape(-1, 2):
                found.append(
                    Box(
                        table=box.table,
                        row_start=box.row_start + int(start),
                        row_stop=box.row_start + int(stop),
                        col_start=box.col_start + first,
                        col_stop=box.col_start + last,
                    )
                )
        return found

    def _split_at(self, column: int) -> None:
        for i, (first, last, provided) in enumerate(self.intervals):
            if first < column < last:
                self.intervals[i : i + 1] = [(first, column, provided), (column, last, provided.copy())]
                return

    def _write(self, frame: Frame, fill: _Fill) -> None:
        target, info = self.target, frame.info
        weights = target.weights[:, fill.first : fill.last]
        if info.kind is FrameKind.TOMBSTONE:
            weights[fill.taken_rows] = 0
            for spec in self.specs:
                values = target.fields[spec.name]
                if spec.kind == "pointwise":
                    values[fill.taken_rows, fill.first : fill.last] = 0
            return
        from_column = target.box.col_start + fill.first - info.col_start
        columns = info.col_stop - info.col_start
        decoder.decode_scatter(
            encoding_named(info.encoding), frame.scales, frame.biases, frame.codes, frame.exponent, out=weights,
            rows=fill.rows, take=fill.take, exceptions=frame.exceptions, dtype=target.schema.dtype, columns=columns,
            first_column=from_column,
        )  # fmt: skip
        stored = {section.spec.name: section for section in frame.fields}
        for spec in self.specs:
            section = stored.get(spec.name)
            if section is None or spec.kind == "rowwise":
                continue  # recorded by the applier, and written with all columns of its row
            out = target.fields[spec.name][:, fill.first : fill.last]
            if section.stored_dtype in element_type.WEIGHT_DTYPES:
                decoder.decode_scatter(
                    raw_encoding(section.stored_dtype), b"", b"", section.data, 0, out=out, rows=fill.rows,
                    take=fill.take, dtype=spec.dtype, columns=columns, first_column=from_column,
                )  # fmt: skip
            else:
                values = section.values(info.rows)[:, from_column : from_column + out.shape[1]]
                decoder.scatter(np.ascontiguousarray(values), out=out, rows=fill.rows, take=fill.take)

    def _write_rowwise(self, frame: Frame, rows: Rows, filled: Rows | None) -> None:
        """Merge the frame's row-wise values into rows (positions [n]) of which it has just filled `filled` [n] columns.

        `filled` None: all columns of all rows.
        """
        stored = {section.spec.name: section for section in frame.fields}
        alone: Mask | None = None  # None: all rows
        joins = rows[:0]
        if filled is not None and not (whole := filled == self.width).all():
            alone, joins = whole, np.flatnonzero((filled > 0) & ~whole)
        for spec in self.specs:
            if spec.kind != "rowwise":
                continue
            out = self.target.fields[spec.name]
            section = stored.get(spec.name)
            if frame.info.kind is FrameKind.TOMBSTONE:
                values, dtype = np.zeros(len(rows), out.dtype), spec.dtype
            elif section is not None:
                values, dtype = section.values(frame.info.rows), section.stored_dtype
            else:
                continue  # recorded by the applier
            if alone is None and frame.contiguous and values.dtype == out.dtype and dtype == spec.dtype:
                out[_span(frame, rows)] = values
            elif alone is None or alone.any():
                decoder.scatter(values, out=out, rows=rows, take=alone, values_dtype=dtype, dtype=spec.dtype)
            if filled is not None and len(joins):
                new_values = np.empty(len(joins), out.dtype)
                order = np.arange(len(new_values), dtype=np.int64)
                part = np.ascontiguousarray(values[joins])
                decoder.scatter(part, out=new_values, rows=order, values_dtype=dtype, dtype=spec.dtype)
                join = self._merges.get(spec.name)
                if join is None:
                    join = self._merges[spec.name] = _RowwiseMerge(self.target.schema.fqn, spec, self.rows)
                join.add(rows[joins], new_values, filled[joins], self.width, out)


def _span(frame: Frame, positions: Rows) -> slice | Rows:
    """Return the positions [n] of a frame's rows, as a slice if consecutive: indexing is many times faster."""
    if not frame.contiguous:
        return positions
    first = int(positions[0])
    return slice(first, first + len(positions))


class _RowwiseMerge:
    """A row-wise field of a target, for rows that several frames provide in part of the columns."""

    def __init__(self, table: str, spec: FieldSpec, rows: int) -> None:
        self._table = table
        self._spec = spec
        self._sums = np.zeros(rows, np.float64)
        self._initialized = np.zeros(rows, np.bool_)
        self._differing = np.zeros(rows, np.bool_)

    def add(self, at: Rows, new_values: Array, filled: Rows, width: int, out: Array) -> None:
        """Merge `new_values` [n] (of the field's type) into rows `at`; the frame fills `filled` of `width` columns.

        Raises `SchemaMismatch` for float8, which has no sums, if values differ between frames.
        """
        fresh = ~self._initialized[at]
        out[at[fresh]] = new_values[fresh]
        self._initialized[at] = True
        kind = element_type.by_name(self._spec.dtype)
        if not kind.floating:
            return
        bits = np.dtype(f"u{out.dtype.itemsize}")
        differ = out[at].view(bits) != new_values.view(bits)
        self._differing[at[differ]] = True
        if self._spec.dtype not in element_type.WEIGHT_DTYPES:
            if differ.any():
                raise SchemaMismatch(
                    f"row-wise state {self._spec.name} of type {self._spec.dtype} differs between column shards of a "
                    "row, and cannot be averaged",
                    where=self._table,
                    remedy="restore with the column sharding of the save",
                )
            return
        self._sums[at] += quantizer.widened(new_values, self._spec.dtype).astype(np.float64) * (
            filled / width
        )
        mixed = at[self._differing[at]]
        out[mixed] = quantizer.narrowed_once(self._sums[mixed], self._spec.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """Mapping of a frame's rows to columns [first, last) of the target's box."""

    rows: Rows
    """Position in the target of each row of the frame; undefined for rows not taken."""
    take: Mask | None
    """[n]; None: all rows."""
    first: int
    last: int

    @property
    def taken_rows(self) -> Rows:
        return self.rows if self.take is None else self.rows[self.take]
