"""A layout: the boxes of every table that each rank of a group holds. A separate object, named by its hash.

A group keeps its layout for its whole attempt, and most attempts have the same layout as the one before, so a layout is
stored once and log entries reference it. It contains only shapes and boxes: optimizer state may appear later, and the
assignment of blobs to ranks does not matter to readers.

The boxes of all ranks *tile* every table: no gap and no overlap (`check_tiling`). A replicated table has one owner.

At scale (4,096 ranks, 800 tables) there are millions of boxes. They are numpy columns in memory and bytes on the store;
`Box` objects are created for one rank at a time. The columns of a decoded layout are views of its bytes, so it is in
memory once; checks run over slices of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from deltashard_checkpoint.errors import CorruptObject, UnsupportedVersion, UserError
from deltashard_checkpoint.format.schema import Box

MAGIC = b"DSLAYOUT"
VERSION = 1
MAX_RANKS = 10**5
MAX_TABLES = 10**6
MAX_BOXES = 10**8
MAX_ROWS, MAX_COLUMNS = 1 << 48, 1 << 20
_HEADER = struct.Struct("<8sIIIIQ")
_TABLE = struct.Struct("<QII")
_COLUMNS = (
    ("rank", np.dtype("<u4")),
    ("table", np.dtype("<u4")),
    ("row_start", np.dtype("<u8")),
    ("row_stop", np.dtype("<u8")),
    ("col_start", np.dtype("<u4")),
    ("col_stop", np.dtype("<u4")),
)
_MAX_CELLS = 1 << 23
"""Maximum number of pieces when all boxes of a table are split at all row edges. No real sharding needs more."""

_SLICE = 1 << 16
"""Boxes checked at once."""

Ints = npt.NDArray[np.integer[Any]]


class NotTiled(UserError):
    """The boxes of a layout leave a gap in a table or overlap."""


def layout_key(digest: str) -> str:
    return f"layout/{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Name and shape of a table of a layout."""

    fqn: str
    rows: int
    columns: int


class Layout:
    """World size, tables, and rank, table, rows and columns per box: sorted integer columns [n] for n boxes."""

    def __init__(self, *, world_size: int, tables: Sequence[TableShape], columns: Mapping[str, Ints]) -> None:
        """`tables` are sorted by name; `columns` as in `_COLUMNS`, sorted lexicographically. See `of` and `decode`."""
        self.world_size = world_size
        self.tables = tuple(tables)
        self.rank = columns["rank"]
        self.table = columns["table"]
        self.row_start = columns["row_start"]
        self.row_stop = columns["row_stop"]
        self.col_start = columns["col_start"]
        self.col_stop = columns["col_stop"]

    @classmethod
    def of(
        cls,
        world_size: int,
        tables: Mapping[str, tuple[int, int]],
        boxes: Mapping[int, Iterable[Box]],
    ) -> Layout:
        """Build from shapes (rows, columns) by table and boxes by rank, without checks (see `check`)."""
        names = sorted(tables)
        position = {name: i for i, name in enumerate(names)}
        rows = sorted(
            (rank, position[b.table], b.row_start, b.row_stop, b.col_start, b.col_stop)
            for rank, held in boxes.items()
            for b in held
        )
        found = np.array(rows, np.int64).reshape(-1, len(_COLUMNS))
        return cls(
            world_size=world_size,
            tables=[TableShape(fqn=name, rows=tables[name][0], columns=tables[name][1]) for name in names],
            columns={name: np.ascontiguousarray(found[:, i]) for i, (name, _) in enumerate(_COLUMNS)},
        )

    def __len__(self) -> int:
        return len(self.rank)

    def _column(self, name: str) -> Ints:
        found: Ints = getattr(self, name)
        return found

    # Bytes

    @cached_property
    def data(self) -> bytes:
        """The stored bytes: equal layouts have equal bytes."""
        out = [_HEADER.pack(MAGIC, VERSION, self.world_size, len(self.tables), 0, len(self))]
        for table in self.tables:
            name = table.fqn.encode()
            out.append(_TABLE.pack(table.rows, table.columns, len(name)) + name)
        out.append(_padding(sum(map(len, out))))
        for each, dtype in _COLUMNS:
            column = self._column(each).astype(dtype).tobytes()
            out += [column, _padding(len(column))]
        return b"".join(out)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the bytes, 32 hexadecimal digits: the layout's name."""
        return xxhash.xxh3_128_hexdigest(self.data)

    @property
    def key(self) -> str:
        return layout_key(self.digest)

    @classmethod
    def decode(cls, data: bytes, *, digest: str | None = None) -> Layout:
        """Decode and check a layout; `digest` is the hash in its name.

        Raises `CorruptObject` (wrong hash, or not a valid layout) or `UnsupportedVersion`.
        """
        where = "a layout" if digest is None else layout_key(digest)
        if digest is not None and xxhash.xxh3_128_hexdigest(data) != digest:
            raise CorruptObject("a layout does not match the hash in its name", where=where)
        try:
            found = cls._decode(data, where)
            found.check()
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptObject(f"not a layout: {error}", where=where) from None
        except UserError as error:
            raise CorruptObject(f"not a layout: {error.what}", where=where) from None
        found.__dict__["data"] = data  # the decoded bytes are canonical
        return found

    @classmethod
    def _decode(cls, data: bytes, where: str) -> Layout:
        magic, version, world_size, tables, zero, boxes = _HEADER.unpack_from(data)
        if magic != MAGIC or zero:
            raise CorruptObject("not a layout", where=where)
        if version != VERSION:
            raise UnsupportedVersion(f"layout of version {version}", where=where, remedy="upgrade deltashard")
        at, shapes = _HEADER.size, []
        if tables * _TABLE.size + boxes * 32 > len(data):
            raise CorruptObject(f"{tables} tables and {boxes} boxes in {len(data)} bytes", where=where)
        for _ in range(tables):
            rows, columns, length = _TABLE.unpack_from(data, at)
            at += _TABLE.size
            shapes.append(TableShape(fqn=data[at : at + length].decode(), rows=rows, columns=columns))
            at += length
        at = _after_padding(data, at, where)
        columns_of: dict[str, Ints] = {}
        for name, dtype in _COLUMNS:
            size = boxes * dtype.itemsize
            if at + size > len(data):
                raise CorruptObject("a layout ends too early", where=where)
            column: Ints = np.frombuffer(data, dtype, boxes, at)
            if dtype.itemsize == 8 and boxes and int(column.max()) > MAX_ROWS:
                raise CorruptObject("a box has too many rows", where=where)
            columns_of[name] = column
            at = _after_padding(data, at + size, where)
        if at != len(data):
            raise CorruptObject(f"{len(data) - at} bytes too many", where=where)
        return cls(world_size=world_size, tables=shapes, columns=columns_of)

    # Queries

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        first, stop = np.searchsorted(self.rank, (rank, rank + 1))
        return tuple(
            Box(table=self.tables[t].fqn, row_start=a, row_stop=b, col_start=c, col_stop=d)
            for t, a, b, c, d in zip(
                *(self._column(name)[first:stop].tolist() for name, _ in _COLUMNS[1:]), strict=True
            )
        )

    def ranks_overlapping(self, boxes: Iterable[Box]) -> tuple[int, ...]:
        """Return the ranks that hold some cell of `boxes`, ascending."""
        position = {table.fqn: i for i, table in enumerate(self.tables)}
        by_table: dict[int, list[Box]] = {}
        for box in boxes:
            if box.table in position:
                by_table.setdefault(position[box.table], []).append(box)
        found: set[int] = set()
        order, starts = self._by_table
        for table, wanted in by_table.items():
            at = order[starts[table] : starts[table + 1]]
            for box in wanted:
                overlaps = (
                    (self.row_start[at] < box.row_stop)
                    & (self.row_stop[at] > box.row_start)
                    & (self.col_start[at] < box.col_stop)
                    & (self.col_stop[at] > box.col_start)
                )
                found.update(np.unique(self.rank[at[overlaps]]).tolist())
        return tuple(sorted(found))

    @cached_property
    def _by_table(self) -> tuple[Ints, Ints]:
        """Box positions sorted by table, and the start of each table's boxes [tables + 1]."""
        order = np.argsort(self.table, kind="stable").astype(np.int32)  # there are at most MAX_BOXES
        count = np.bincount(self.table, minlength=len(self.tables))
        return order, np.concatenate(([0], np.cumsum(count)))

    def check(self) -> None:
        """Raise `UserError` unless numbers are in bounds and boxes sorted, `NotTiled` unless they tile all tables."""
        if not 1 <= self.world_size <= MAX_RANKS or len(self.tables) > MAX_TABLES or len(self) > MAX_BOXES:
            raise UserError(
                f"{self.world_size} ranks, {len(self.tables)} tables, {len(self)} boxes", where="layout"
            )
        names = [table.fqn for table in self.tables]
        if names != sorted(set(names)) or not all(names):
            raise UserError("tables are not sorted by name, or one occurs twice", where="layout")
        for table in self.tables:
            if not (0 < table.rows <= MAX_ROWS and 0 < table.columns <= MAX_COLUMNS):
                raise UserError(f"invalid table shape [{table.rows}, {table.columns}]", where=table.fqn)
        if len(self) and (
            int(self.rank.max()) >= self.world_size or int(self.table.max()) >= len(self.tables)
        ):
            raise UserError("a box is of no rank or of no table", where="layout")
        shapes = np.array([(t.rows, t.columns) for t in self.tables], np.int64).reshape(-1, 2)
        for at in range(0, len(self), _SLICE):
            self._check_boxes(slice(at, at + _SLICE), shapes)
            # Include the last box of the previous slice, to check the order across slices.
            if not self._in_order(slice(max(at - 1, 0), at + _SLICE)):
                raise UserError("boxes are not sorted by rank, table, rows and columns", where="layout")
        self.check_tiling()

    def _check_boxes(self, which: slice, shapes: npt.NDArray[np.int64]) -> None:
        """Check that a slice of boxes is inside their tables, whose rows and columns are `shapes` [tables, 2]."""
        a, b, c, d = (self._column(name)[which].astype(np.int64) for name, _ in _COLUMNS[2:])
        shape = shapes[self.table[which]]
        inside = (a < b) & (b <= shape[:, 0]) & (c < d) & (d <= shape[:, 1])
        if not inside.all():
            wrong = which.start + int(np.argmin(inside))
            raise UserError(f"box {self._named(wrong)} is in no table", where="layout")

    def _in_order(self, which: slice) -> bool:
        """Whether a slice of boxes is strictly sorted: `boxes_of` uses binary search."""
        same: npt.NDArray[np.bool_] | None = None
        for name, _ in _COLUMNS:
            column = self._column(name)[which]
            less, equal = column[1:] < column[:-1], column[1:] == column[:-1]
            if bool((less if same is None else same & less).any()):
                return False
            same = equal if same is None else same & equal
        return True

    def check_tiling(self) -> None:
        """Raise `NotTiled`, with the table, the location and the ranks, for a gap or an overlap."""
        order, starts = self._by_table
        for position, table in enumerate(self.tables):
            self._check_table(table, order[starts[position] : starts[position + 1]])

    def _check_table(self, table: TableShape, at: Ints) -> None:
        """Check the boxes `at` of one table: in each band of rows, its columns must be contiguous."""
        row_start, row_stop, col_start, col_stop = (
            self._column(name)[at].astype(np.int64) for name, _ in _COLUMNS[2:]
        )
        edges = np.unique(np.concatenate(([0, table.rows], row_start, row_stop)))
        first = np.searchsorted(edges, row_start)
        bands = np.searchsorted(edges, row_stop) - first
        if int(bands.sum()) > _MAX_CELLS:
            raise NotTiled(f"{len(at)} boxes cut the table's rows too finely", where=table.fqn)
        box = np.repeat(np.arange(len(at)), bands)
        band = np.arange(len(box)) - np.repeat(np.cumsum(bands) - bands, bands) + np.repeat(first, bands)
        order = np.lexsort((col_start[box], band))
        band, box = band[order], box[order]
        start, stop = col_start[box], col_stop[box]
        begins = np.ones(len(band), np.bool_)
        begins[1:] = band[1:] != band[:-1]
        expected = np.where(begins, 0, np.concatenate(([0], stop[:-1])) if len(stop) else stop)
        ends = np.ones(len(band), np.bool_)
        ends[:-1] = begins[1:]
        wrong = (start != expected) | (ends & (stop != table.columns))
        if wrong.any():
            i = int(np.argmax(wrong))
            if start[i] < expected[i]:
                raise NotTiled(
                    f"{self._named(int(at[box[i]]))} overlaps {self._named(int(at[box[i - 1]]))}",
                    where=table.fqn,
                    remedy="exactly one rank must hold each cell of a table",
                )
            gap = (expected[i], start[i]) if start[i] > expected[i] else (stop[i], table.columns)
            raise self._gap(table, int(edges[band[i]]), int(edges[band[i] + 1]), int(gap[0]), int(gap[1]))
        covered = np.unique(band)
        if len(covered) != len(edges) - 1:
            missing = int(np.setdiff1d(np.arange(len(edges) - 1), covered)[0])
            raise self._gap(table, int(edges[missing]), int(edges[missing + 1]), 0, table.columns)

    def _gap(
        self, table: TableShape, row_start: int, row_stop: int, col_start: int, col_stop: int
    ) -> NotTiled:
        return NotTiled(
            f"no rank holds rows {row_start} to {row_stop - 1}, columns {col_start} to {col_stop - 1}",
            where=table.fqn,
            remedy="exactly one rank must hold each cell of a table",
        )

    def _named(self, i: int) -> str:
        return (
            f"rank {self.rank[i]}'s [{self.row_start[i]}:{self.row_stop[i]}, "
            f"{self.col_start[i]}:{self.col_stop[i]}] of {self.tables[int(self.table[i])].fqn}"
        )


def _after_padding(data: bytes, at: int, where: str) -> int:
    """Return the next multiple of 8; only zeros may precede it."""
    padding = _padding(at)
    if data[at : at + len(padding)] != padding:
        raise CorruptObject("a layout is not in its canonical form", where=where)
    return at + len(padding)


def _padding(length: int) -> bytes:
    return bytes(-length % 8)
