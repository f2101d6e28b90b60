"""Frames, the unit of storage: rows of one table shard, their tail, a chunk of a blob, or tombstones.

Layout and parsing. The *tail* of a row frame holds the optimizer state of its rows. It is a separate frame in another
pack, so readers of weights alone skip it.

    offset size  header, little-endian, 64 bytes
         0    4  magic "DSFR"
         4    2  version, 1
         6    1  kind: 1 rows, 2 blob, 3 tombstone, 4 tail
         7    1  encoding of the weights (`vocabulary.ENCODINGS`), 0 where there are none
         8    1  kind of the row ids (`codecs.rowids`)
         9    1  exponent, signed
        10    2  0
        12    4  bytes of the meta section
        16    4  bytes of the row ids
        20    4  bytes of the exceptions
        24    4  rows
        28    4  length of the whole frame: header, sections and padding
        32    8  step of the rows
        40    8  0
        48   16  xxh3-128, big-endian, of bytes [0, 48) and [64, length)

Then the sections, each at a multiple of 64 bytes with zero padding: meta | ids | scales | biases | codes | exceptions.
A tail has: meta | one section per optimizer-state field, for the same rows in the same order; a blob: meta | bytes. The
meta section names the table, its shape and the column range (or the blob), so frames can be read, and packs salvaged,
without an index. A row frame's meta has length and hash of its tail; a tail's meta has the fields. Section sizes follow
from rows, columns and types, and must add up to `length` exactly. The hash covers the header too, so one pass verifies
that a frame matches its index.

Parsing does not copy and trusts nothing: bounds are checked before use, and every rejection is a `FormatError`. An
older library rejects a newer version with `UnsupportedVersion`. `frame_encoder` writes frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deltashard_checkpoint.codecs import row_id
from deltashard_checkpoint.codecs.encoding import MAX_COLUMNS, section_bytes
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, InternalBug, UnsupportedVersion
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.frame_layout import (
    ALIGN,
    BLOB_META,
    DIGEST_AT,
    HEADER,
    HEADER_BYTES,
    KIND_AT,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_ROWS,
    MAX_TABLE_ROWS,
    TABLE_META,
    TAIL_META,
    VERSION,
    MetaReader,
    Sections,
)
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.vocabulary import ENCODING_OF_CODE


class FrameKind(IntEnum):
    """Content of a frame; the numbers equal the index's `FrameKind`, which has no tails."""

    ROWS = 1
    BLOB = 2
    TOMBSTONE = 3
    TAIL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TailInfo:
    """Reference to a tail, in its row frame and in the index."""

    length: int
    digest: bytes
    """The tail's own xxh3-128, 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """An index's description of a frame, without its location."""

    kind: FrameKind
    length: int
    digest: bytes
    """The frame's own xxh3-128, 16 bytes."""
    step: int
    table: str = ""
    """FQN; empty for blobs."""
    row_min: int = 0
    row_max: int = 0
    """Greatest row, inclusive."""
    rows: int = 0
    col_start: int = 0
    col_stop: int = 0
    encoding: str = ""
    tail: TailInfo | None = None
    """None: the rows have no optimizer state."""
    name: str = ""
    """Name of the blob."""
    blob_offset: int = 0
    blob_bytes: int = 0
    """Bytes of the whole blob."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the frame and its tail."""
        return self.length + (0 if self.tail is None else self.tail.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSection:
    """One optimizer-state field of a frame's rows: values [rows] (row-wise) or [rows, columns], C order."""

    spec: FieldSpec
    stored_dtype: str
    """Dtype of the bytes: the field's own type, or bfloat16 if the policy chose it."""
    data: memoryview

    def values(self, rows: int) -> npt.NDArray[np.generic]:
        """Return a view [rows] or [rows, columns]; bfloat16 as uint16 (see `element_type`)."""
        flat = np.frombuffer(self.data, element_type.by_name(self.stored_dtype).carrier)
        return flat if self.spec.kind == "rowwise" else flat.reshape(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A parsed frame; all memoryviews refer to the parsed buffer."""

    info: FrameInfo
    table: TableSchema | None
    """The writer's table: shape, dtype, and the tail's fields if the tail was parsed. None for blobs."""
    ids_kind: int
    ids: memoryview
    exponent: int
    scales: memoryview
    biases: memoryview
    codes: memoryview
    exceptions: memoryview
    fields: tuple[FieldSection, ...]
    """Fields of the tail; empty if it was not parsed."""
    chunk: memoryview
    """A blob's bytes [info.blob_offset, + len(chunk)); empty otherwise."""

    def row_ids(self) -> npt.NDArray[np.int64]:
        """Return the global row ids: int64 [rows], strictly increasing from `row_min` to `row_max`.

        Raises `CorruptObject` if the stored ids differ from that.
        """
        info = self.info
        ids = row_id.decode_ids(self.ids_kind, self.ids, info.rows, (info.row_min, info.row_max + 1))
        if ids[0] != info.row_min or ids[-1] != info.row_max:
            raise CorruptObject("row ids do not match the frame's row range", where=info.table)
        return ids

    @property
    def contiguous(self) -> bool:
        """Whether the frame has all rows in [row_min, row_max]."""
        return self.info.rows == self.info.row_max - self.info.row_min + 1


def digest_of(frame: memoryview) -> bytes:
    """Return the xxh3-128 of a frame, excluding the digest itself. One pass at GB/s, without the GIL."""
    state = xxhash.xxh3_128(frame[:DIGEST_AT])
    state.update(frame[HEADER_BYTES:])
    return state.digest()


def check_digest(frame: memoryview, digest: bytes) -> None:
    """Raise `CorruptObject` unless the bytes hash to `digest` and contain it."""
    if len(frame) < HEADER_BYTES or digest_of(frame) != digest or frame[DIGEST_AT:HEADER_BYTES] != digest:
        raise CorruptObject("a frame's bytes do not match its hash")


FrameBytes = tuple[memoryview, memoryview | None]
"""A frame and its tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A parsed tail; its memoryviews refer to the parsed buffer."""

    info: TailInfo
    step: int
    rows: int
    row_span: tuple[int, int]
    """Smallest and largest row, both inclusive."""
    columns: tuple[int, int]
    table: TableSchema
    """The writer's table: shape, dtype and the fields of this tail."""
    fields: tuple[FieldSection, ...]


def parse_frame(
    buffer: bytes | bytearray | memoryview,
    tail: bytes | bytearray | memoryview | None = None,
    *,
    verify: bool = True,
) -> Frame:
    """Parse the frame of rows, tombstones or a blob chunk in `buffer`, with the `tail` of its rows, without copying.

    `verify=False` skips the hashes of bytes that were just checked; everything else is always checked.
    Raises `CorruptObject`, `UnsupportedVersion`, or `ForeignObject` for the tail of another frame.
    """
    header, sections = _opened(buffer, verify=verify)
    if header.kind is FrameKind.BLOB:
        frame = _parse_blob(header, sections)
    elif header.kind is FrameKind.TAIL:
        raise CorruptObject("found a tail, expected a frame of rows, tombstones or a blob")
    else:
        frame = _parse_rows(header, sections)
    sections.end()
    return frame if tail is None else with_tail(frame, parse_tail(tail, verify=verify))


def with_tail(frame: Frame, tail: Tail) -> Frame:
    """Return the frame with its rows' state; raises `ForeignObject` for the tail of another frame."""
    _check_tail(tail, frame.info)
    if replace(tail.table, fields=()) != frame.table:
        raise ForeignObject(f"a tail and its frame differ in the shape of table {frame.info.table}")
    return replace(frame, table=tail.table, fields=tail.fields)


def parse_tail(buffer: bytes | bytearray | memoryview, *, verify: bool = True) -> Tail:
    """Parse the tail in `buffer`, like `parse_frame`."""
    header, sections = _opened(buffer, verify=verify)
    if header.kind is not FrameKind.TAIL:
        raise CorruptObject("found another frame, expected a tail")
    if header.encoding or header.ids_kind or header.exponent or header.ids_bytes or header.exceptions_bytes:
        raise CorruptObject("a tail claims weights")
    meta = MetaReader(sections.take(header.meta_bytes))
    table, columns, row_span = _table_meta(meta)
    _check_rows(header.rows, row_span, table.fqn)
    specs, stored = _field_meta(meta, table.fqn)
    width = columns[1] - columns[0]
    fields = []
    for spec, dtype in zip(specs, stored, strict=True):
        data = sections.take(header.rows * spec.values(width) * element_type.by_name(dtype).itemsize_bytes)
        fields.append(FieldSection(spec=spec, stored_dtype=dtype, data=data))
    sections.end()
    return Tail(
        info=TailInfo(length=header.length, digest=header.digest), step=header.step, rows=header.rows,
        row_span=row_span, columns=columns, table=replace(table, fields=specs), fields=tuple(fields),
    )  # fmt: skip


class _Header(NamedTuple):
    kind: FrameKind
    encoding: int
    ids_kind: int
    exponent: int
    meta_bytes: int
    ids_bytes: int
    exceptions_bytes: int
    rows: int
    length: int
    step: int
    digest: bytes


def _opened(buffer: bytes | bytearray | memoryview, *, verify: bool) -> tuple[_Header, Sections]:
    view = memoryview(buffer).cast("B").toreadonly()
    length = frame_length(view)
    if length != len(view):
        raise CorruptObject(f"frame of {length} bytes in {len(view)} bytes")
    (_, _, kind, encoding, ids_kind, exponent, zero16, meta_bytes, ids_bytes, exceptions_bytes, rows, _,
     step, zero64, digest) = HEADER.unpack_from(view)  # fmt: skip
    if verify:
        check_digest(view, digest)
    if zero16 or zero64 or kind not in (1, 2, 3, 4):
        raise CorruptObject(f"frame of unknown kind {kind}, or reserved bytes are not zero")
    header = _Header(
        FrameKind(kind), encoding, ids_kind, exponent, meta_bytes, ids_bytes, exceptions_bytes, rows, length,
        step, digest,
    )  # fmt: skip
    return header, Sections(view)


def _parse_blob(header: _Header, sections: Sections) -> Frame:
    if (
        header.encoding
        or header.ids_kind
        or header.exponent
        or header.ids_bytes
        or header.exceptions_bytes
        or header.rows
    ):
        raise CorruptObject("a blob frame claims rows")
    name, offset, blob_bytes, chunk_bytes = _blob_meta(sections.take(header.meta_bytes))
    info = FrameInfo(
        kind=header.kind, length=header.length, digest=header.digest, step=header.step, name=name,
        blob_offset=offset, blob_bytes=blob_bytes,
    )  # fmt: skip
    none = sections.take(0)
    return Frame(
        info=info, table=None, ids_kind=0, ids=none, exponent=0, scales=none, biases=none, codes=none,
        exceptions=none, fields=(), chunk=sections.take(chunk_bytes),
    )  # fmt: skip


def _parse_rows(header: _Header, sections: Sections) -> Frame:
    """Parse rows or tombstones."""
    rows = header.rows
    meta = MetaReader(sections.take(header.meta_bytes))
    table, columns, row_span = _table_meta(meta)
    tail_length, tail_digest = TAIL_META.unpack(meta.take(TAIL_META.size))
    meta.end()
    _check_rows(rows, row_span, table.fqn)
    tail = TailInfo(length=tail_length, digest=tail_digest) if tail_length else None
    if tail is None and any(tail_digest):
        raise CorruptObject("a tail has a hash but no length", where=table.fqn)
    ids = sections.take(header.ids_bytes)
    encoding = ""
    scale_bytes = bias_bytes = code_bytes = 0
    if header.kind is FrameKind.ROWS:
        named = ENCODING_OF_CODE.get(header.encoding)
        if named is None:
            raise UnsupportedVersion(
                f"unknown encoding {header.encoding}", where=table.fqn, remedy="update deltashard"
            )
        encoding = named.name
        scale_bytes, bias_bytes, code_bytes = section_bytes(named, rows, columns[1] - columns[0])
    elif header.encoding or header.exponent or header.exceptions_bytes or tail is not None:
        raise CorruptObject("a tombstone claims weights or a tail", where=table.fqn)
    scales, biases, codes = sections.take(scale_bytes), sections.take(bias_bytes), sections.take(code_bytes)
    exceptions = sections.take(header.exceptions_bytes)
    info = FrameInfo(
        kind=header.kind, length=header.length, digest=header.digest, step=header.step, table=table.fqn,
        row_min=row_span[0], row_max=row_span[1], rows=rows, col_start=columns[0], col_stop=columns[1],
        encoding=encoding, tail=tail,
    )  # fmt: skip
    return Frame(
        info=info, table=table, ids_kind=header.ids_kind, ids=ids, exponent=header.exponent, scales=scales,
        biases=biases, codes=codes, exceptions=exceptions, fields=(), chunk=ids[:0],
    )  # fmt: skip


def frame_length(view: memoryview) -> int:
    """Return the length, from its header, of the frame at the start of `view`; raises like `parse_frame`."""
    if len(view) < HEADER_BYTES:
        raise CorruptObject(f"{len(view)} bytes are too few for a frame")
    magic, version = struct.unpack_from("<4sH", view)
    if magic != MAGIC:
        raise CorruptObject("not a frame: wrong magic")
    if version != VERSION:
        raise UnsupportedVersion(
            f"frame of version {version}, this library reads {VERSION}", remedy="update deltashard"
        )
    (length,) = struct.unpack_from("<I", view, 28)
    if not HEADER_BYTES < length <= MAX_FRAME_BYTES or length % ALIGN:
        raise CorruptObject(f"a frame cannot be {length} bytes long")
    return int(length)


def scan_pack(pack: bytes | bytearray | memoryview) -> Iterator[tuple[int, Frame | Tail]]:
    """Yield (offset, frame or tail) for a whole pack, without an index, by following the headers' lengths.

    Raises like `parse_frame` at bytes that are not a frame.
    """
    view = memoryview(pack).cast("B")
    at = 0
    while at < len(view):
        length = frame_length(view[at:])
        data = view[at : at + length]
        yield at, parse_tail(data) if data[KIND_AT] == FrameKind.TAIL else parse_frame(data)
        at += length


def check_info(frame: Frame, expected: FrameInfo) -> None:
    """Raise `ForeignObject` if an intact frame is not the one an index or plan describes."""
    if frame.info != expected:
        raise ForeignObject(
            f"frame of {frame.info.table or frame.info.name!r} is where the index has "
            f"{expected.table or expected.name!r}, or they differ in rows, columns or step"
        )


def checked_frame(data: memoryview, expected: FrameInfo) -> Frame:
    """Parse and verify the frame in `data` against an index's description.

    Raises `CorruptObject`, `ForeignObject` or `UnsupportedVersion`.
    """
    check_digest(data, expected.digest)
    frame = parse_frame(data, verify=False)
    check_info(frame, expected)
    return frame


def checked_tail(data: memoryview, expected: FrameInfo) -> Tail:
    """Parse and verify the tail in `data` of the frame an index describes, like `checked_frame`."""
    if expected.tail is None:
        raise InternalBug("a tail of a frame that has none", where=expected.table)
    check_digest(data, expected.tail.digest)
    tail = parse_tail(data, verify=False)
    _check_tail(tail, expected)
    return tail


def _check_tail(tail: Tail, info: FrameInfo) -> None:
    """Raise `ForeignObject` if an intact tail does not belong to the frame."""
    expected = (
        info.tail,
        info.table,
        info.step,
        info.rows,
        (info.row_min, info.row_max),
        (info.col_start, info.col_stop),
    )
    if (tail.info, tail.table.fqn, tail.step, tail.rows, tail.row_span, tail.columns) != expected:
        raise ForeignObject(
            f"a tail of table {tail.table.fqn!r} is not that of the frame of {info.table!r} it should belong to"
        )


def _check_rows(rows: int, row_span: tuple[int, int], where: str) -> None:
    if not 1 <= rows <= min(MAX_ROWS, row_span[1] - row_span[0] + 1):
        raise CorruptObject(f"{rows} rows between {row_span[0]} and {row_span[1]}", where=where)


def _blob_meta(view: memoryview) -> tuple[str, int, int, int]:
    meta = MetaReader(view)
    name = meta.name()
    offset, blob_bytes, chunk_bytes = BLOB_META.unpack(meta.take(BLOB_META.size))
    meta.end()
    if blob_bytes > MAX_BLOB_BYTES or chunk_bytes > MAX_FRAME_BYTES or offset + chunk_bytes > blob_bytes:
        raise CorruptObject(f"chunk [{offset}, +{chunk_bytes}) of a blob of {blob_bytes} bytes", where=name)
    return name, offset, blob_bytes, chunk_bytes


def _table_meta(meta: MetaReader) -> tuple[TableSchema, tuple[int, int], tuple[int, int]]:
    """Return (schema without fields, column range, (row min, row max))."""
    fqn = meta.name()
    rows, columns, dtype, col_start, col_stop, row_min, row_max = TABLE_META.unpack(
        meta.take(TABLE_META.size)
    )
    if not (rows <= MAX_TABLE_ROWS and columns <= MAX_COLUMNS and col_start < col_stop <= columns):
        raise CorruptObject(f"columns {col_start}:{col_stop} of a table [{rows}, {columns}]", where=fqn)
    if not row_min <= row_max < rows:
        raise CorruptObject(f"rows {row_min} to {row_max} of a table of {rows}", where=fqn)
    weights = element_type.by_code(dtype).name
    if weights not in element_type.WEIGHT_DTYPES:
        raise CorruptObject(f"weights of type {weights}", where=fqn)
    table = TableSchema(fqn=fqn, rows=rows, columns=columns, dtype=weights)
    return table, (col_start, col_stop), (row_min, row_max)


def _field_meta(meta: MetaReader, fqn: str) -> tuple[tuple[FieldSpec, ...], list[str]]:
    """Return the fields of a tail, at least one, and their stored dtypes; rejects trailing bytes."""
    fields, stored = [], []
    for _ in range(meta.take(1)[0]):
        name = meta.name("<B")
        pointwise, logical, held = meta.take(3)
        if pointwise > 1:
            raise CorruptObject(f"field of unknown kind {pointwise}", where=f"{fqn}.{name}")
        spec = FieldSpec(
            name=name, kind="pointwise" if pointwise else "rowwise", dtype=element_type.by_code(logical).name
        )
        stored.append(element_type.by_code(held).name)
        if held != logical and (spec.dtype, stored[-1]) != ("float32", "bfloat16"):
            raise CorruptObject(f"{spec.dtype} stored as {stored[-1]}", where=f"{fqn}.{name}")
        fields.append(spec)
    meta.end()
    if not fields or len({spec.name for spec in fields}) != len(fields):
        raise CorruptObject("a tail has no field, or a field occurs twice", where=fqn)
    return tuple(fields), stored
