"""Frames, the unit of everything stored: rows of one table shard, a chunk of a blob, or tombstones. Layout and parsing.

    offset size  header, little-endian, 64 bytes
         0    4  magic "DSFR"
         4    2  version, 1
         6    1  kind: 1 rows, 2 blob, 3 tombstone
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

Then the sections, each at a multiple of 64 bytes with zeros between: meta | ids | scales | biases | codes | one per
optimizer-state field | exceptions. A blob's are: meta | bytes. The meta section names the table, its shape, the column
range and the fields (or the blob), so a frame can be read, and a pack salvaged, without any index. Sizes follow from
rows, columns and types; they must add up to `length` exactly. The hash covers the header too, so one pass tells that a
frame is what its index says.

Parsing copies nothing and believes nothing: bounds come before use, and every refusal is a `FormatError`. An older
library refuses a newer version by name. Writing is in `frame_encoder`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash
from deltashard_proto import arena_layout

from deltashard_checkpoint.codecs import row_id
from deltashard_checkpoint.codecs.encoding import MAX_COLUMNS, section_bytes
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.vocabulary import ENCODING_OF_CODE

MAGIC = b"DSFR"
VERSION = 1
MAX_FRAME_BYTES = arena_layout.MAX_FRAME_BYTES
"""A frame is never larger, so that one arena block always holds one."""
ALIGN = 64
HEADER = struct.Struct("<4sHBBBbHIIIIIQQ16s")
HEADER_BYTES = 64
DIGEST_AT = 48
MAX_ROWS = MAX_FRAME_BYTES
MAX_TABLE_ROWS = 1 << 48
MAX_NAME_BYTES = 4096
MAX_BLOB_BYTES = 1 << 44

TABLE_META = struct.Struct("<QIBIIQQB")  # table rows, columns, dtype, column range, row min, row max, fields
BLOB_META = struct.Struct("<QQQ")  # offset in the blob, bytes of the whole blob, bytes of this chunk


class FrameKind(IntEnum):
    """What a frame holds; the numbers are those of the index's `FrameKind`."""

    ROWS = 1
    BLOB = 2
    TOMBSTONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """What an index says of a frame, its place aside."""

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
    name: str = ""
    """Of the blob."""
    blob_offset: int = 0
    blob_bytes: int = 0
    """Of the whole blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSection:
    """One optimizer-state field of a row frame: values [rows] (row-wise) or [rows, columns], C order."""

    spec: FieldSpec
    stored_dtype: str
    """What the bytes are: the field's own type, or bfloat16 where the policy chose so."""
    data: memoryview

    def values(self, rows: int) -> npt.NDArray[np.generic]:
        """A view [rows] or [rows, columns]; bfloat16 as uint16 (see `element_type`)."""
        flat = np.frombuffer(self.data, element_type.by_name(self.stored_dtype).carrier)
        return flat if self.spec.kind == "rowwise" else flat.reshape(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A parsed frame; all memoryviews look into the buffer that was parsed."""

    info: FrameInfo
    table: TableSchema | None
    """Of the writer: shape, dtype and the fields that this frame holds. None for blobs."""
    ids_kind: int
    ids: memoryview
    exponent: int
    scales: memoryview
    biases: memoryview
    codes: memoryview
    exceptions: memoryview
    fields: tuple[FieldSection, ...]
    chunk: memoryview
    """A blob's bytes [info.blob_offset, + len(chunk)); empty otherwise."""

    def row_ids(self) -> npt.NDArray[np.int64]:
        """Global row ids, int64 [rows], strictly increasing from `row_min` to `row_max`.

        Raises `CorruptObject` when the stored ids are not that.
        """
        info = self.info
        ids = row_id.decode_ids(self.ids_kind, self.ids, info.rows, (info.row_min, info.row_max + 1))
        if ids[0] != info.row_min or ids[-1] != info.row_max:
            raise CorruptObject("row ids do not span what the frame says", where=info.table)
        return ids

    @property
    def contiguous(self) -> bool:
        """Whether the rows are all of [row_min, row_max]."""
        return self.info.rows == self.info.row_max - self.info.row_min + 1


def aligned(n: int) -> int:
    """`n` rounded up to the section alignment."""
    return -(-n // ALIGN) * ALIGN


def digest_of(frame: memoryview) -> bytes:
    """xxh3-128 of a whole frame, its own digest left out. GB/s: one pass, and the interpreter is released."""
    state = xxhash.xxh3_128(frame[:DIGEST_AT])
    state.update(frame[HEADER_BYTES:])
    return state.digest()


def check_digest(frame: memoryview, digest: bytes) -> None:
    """Raise `CorruptObject` unless the bytes hash to `digest` and carry it."""
    if len(frame) < HEADER_BYTES or digest_of(frame) != digest or frame[DIGEST_AT:HEADER_BYTES] != digest:
        raise CorruptObject("a frame's bytes do not match its hash")


def parse_frame(buffer: bytes | bytearray | memoryview, *, verify: bool = True) -> Frame:
    """The frame that `buffer` starts with and ends with, without copying.

    `verify=False` skips the hash for bytes that were just checked; everything else is checked always.
    Raises `CorruptObject` or `UnsupportedVersion`.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    length = frame_length(view)
    if length != len(view):
        raise CorruptObject(f"frame of {length} bytes in {len(view)} bytes")
    (_, _, kind_code, encoding_code, ids_kind, exponent, zero16, meta_bytes, ids_bytes, exceptions_bytes, rows, _,
     step, zero64, digest) = HEADER.unpack_from(view)  # fmt: skip
    if verify:
        check_digest(view, digest)
    if zero16 or zero64 or kind_code not in (1, 2, 3):
        raise CorruptObject(f"frame of unknown kind {kind_code}, or reserved bytes are not zero")
    kind = FrameKind(kind_code)
    sections = _Sections(view)
    meta = sections.take(meta_bytes)
    if kind is FrameKind.BLOB:
        if encoding_code or ids_kind or exponent or ids_bytes or exceptions_bytes or rows:
            raise CorruptObject("a blob frame claims rows")
        name, offset, blob_bytes, chunk_bytes = _blob_meta(meta)
        chunk = sections.take(chunk_bytes)
        sections.end()
        info = FrameInfo(
            kind=kind,
            length=length,
            digest=digest,
            step=step,
            name=name,
            blob_offset=offset,
            blob_bytes=blob_bytes,
        )
        none = view[:0]
        return Frame(
            info=info, table=None, ids_kind=0, ids=none, exponent=0, scales=none, biases=none, codes=none,
            exceptions=none, fields=(), chunk=chunk,
        )  # fmt: skip
    table, stored, columns, (row_min, row_max) = _table_meta(meta)
    width = columns[1] - columns[0]
    if not 1 <= rows <= min(MAX_ROWS, row_max - row_min + 1):
        raise CorruptObject(f"{rows} rows between {row_min} and {row_max}", where=table.fqn)
    ids = sections.take(ids_bytes)
    encoding = ""
    scale_bytes = bias_bytes = code_bytes = 0
    if kind is FrameKind.ROWS:
        named = ENCODING_OF_CODE.get(encoding_code)
        if named is None:
            raise CorruptObject(f"unknown encoding {encoding_code}", where=table.fqn)
        encoding = named.name
        scale_bytes, bias_bytes, code_bytes = section_bytes(named, rows, width)
    elif encoding_code or exponent or exceptions_bytes or stored:
        raise CorruptObject("a tombstone claims weights or fields", where=table.fqn)
    scales, biases, codes = sections.take(scale_bytes), sections.take(bias_bytes), sections.take(code_bytes)
    fields = []
    for spec, dtype in zip(table.fields, stored, strict=True):
        data = sections.take(rows * spec.values(width) * element_type.by_name(dtype).itemsize_bytes)
        fields.append(FieldSection(spec=spec, stored_dtype=dtype, data=data))
    exceptions = sections.take(exceptions_bytes)
    sections.end()
    info = FrameInfo(
        kind=kind, length=length, digest=digest, step=step, table=table.fqn, row_min=row_min, row_max=row_max,
        rows=rows, col_start=columns[0], col_stop=columns[1], encoding=encoding,
    )  # fmt: skip
    return Frame(
        info=info, table=table, ids_kind=ids_kind, ids=ids, exponent=exponent, scales=scales, biases=biases,
        codes=codes, exceptions=exceptions, fields=tuple(fields), chunk=view[:0],
    )  # fmt: skip


def frame_length(view: memoryview) -> int:
    """Length of the frame that begins at the start of `view`, by its header; raises like `parse_frame`."""
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


def scan_pack(pack: bytes | bytearray | memoryview) -> Iterator[tuple[int, Frame]]:
    """(offset, frame) of every frame of a pack, without an index: each header gives the next one's place.

    Raises like `parse_frame` where the pack stops being frames.
    """
    view = memoryview(pack).cast("B")
    at = 0
    while at < len(view):
        length = frame_length(view[at:])
        yield at, parse_frame(view[at : at + length])
        at += length


def check_info(frame: Frame, expected: FrameInfo) -> None:
    """Raise `ForeignObject` when a whole frame is not the one an index or plan speaks of."""
    if frame.info != expected:
        raise ForeignObject(
            f"frame of {frame.info.table or frame.info.name!r} lies where the index has "
            f"{expected.table or expected.name!r}, or they differ in rows, columns or step"
        )


def checked_frame(data: memoryview, expected: FrameInfo) -> Frame:
    """The frame in `data`, which is whole and the one an index speaks of: what every reader of packs asks.

    Raises `CorruptObject`, `ForeignObject` or `UnsupportedVersion`.
    """
    check_digest(data, expected.digest)
    frame = parse_frame(data, verify=False)
    check_info(frame, expected)
    return frame


class _Sections:
    """Consecutive 64-byte aligned sections after the header."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = HEADER_BYTES

    def take(self, n: int) -> memoryview:
        stop = self._at + n
        end = aligned(stop)
        if end > len(self._view):
            raise CorruptObject(f"a section of {n} bytes does not fit into a frame of {len(self._view)}")
        piece = self._view[self._at : stop]
        if any(self._view[stop:end]):
            raise CorruptObject("padding is not zero")
        self._at = end
        return piece

    def end(self) -> None:
        if self._at != len(self._view):
            raise CorruptObject(f"{len(self._view) - self._at} bytes of a frame belong to no section")


class _Meta:
    """Bounded reads from the meta section."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, n: int) -> memoryview:
        if n > len(self._view) - self._at:
            raise CorruptObject("the meta section ends inside a value")
        piece = self._view[self._at : self._at + n]
        self._at += n
        return piece

    def name(self, length_format: str = "<H") -> str:
        (n,) = struct.unpack(length_format, self.take(struct.calcsize(length_format)))
        if not 0 < n <= MAX_NAME_BYTES:
            raise CorruptObject(f"a name of {n} bytes")
        try:
            return bytes(self.take(n)).decode()
        except UnicodeDecodeError:
            raise CorruptObject("a name is not UTF-8") from None

    def end(self) -> None:
        if self._at != len(self._view):
            raise CorruptObject("the meta section has bytes that mean nothing")


def _blob_meta(view: memoryview) -> tuple[str, int, int, int]:
    meta = _Meta(view)
    name = meta.name()
    offset, blob_bytes, chunk_bytes = BLOB_META.unpack(meta.take(BLOB_META.size))
    meta.end()
    if blob_bytes > MAX_BLOB_BYTES or chunk_bytes > MAX_FRAME_BYTES or offset + chunk_bytes > blob_bytes:
        raise CorruptObject(f"chunk [{offset}, +{chunk_bytes}) of a blob of {blob_bytes} bytes", where=name)
    return name, offset, blob_bytes, chunk_bytes


def _table_meta(view: memoryview) -> tuple[TableSchema, list[str], tuple[int, int], tuple[int, int]]:
    """(schema, stored dtype of each field, column range, (row min, row max))."""
    meta = _Meta(view)
    fqn = meta.name()
    rows, columns, dtype, col_start, col_stop, row_min, row_max, n = TABLE_META.unpack(
        meta.take(TABLE_META.size)
    )
    if not (rows <= MAX_TABLE_ROWS and columns <= MAX_COLUMNS and col_start < col_stop <= columns):
        raise CorruptObject(f"columns {col_start}:{col_stop} of a table [{rows}, {columns}]", where=fqn)
    if not row_min <= row_max < rows:
        raise CorruptObject(f"rows {row_min} to {row_max} of a table of {rows}", where=fqn)
    weights = element_type.by_code(dtype).name
    if weights not in element_type.WEIGHT_DTYPES:
        raise CorruptObject(f"weights of type {weights}", where=fqn)
    fields, stored = [], []
    for _ in range(n):
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
    if len({spec.name for spec in fields}) != len(fields):
        raise CorruptObject("a field occurs twice", where=fqn)
    table = TableSchema(fqn=fqn, rows=rows, columns=columns, dtype=weights, fields=tuple(fields))
    return table, stored, (col_start, col_stop), (row_min, row_max)
