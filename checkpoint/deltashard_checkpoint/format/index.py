"""The index of a part: the locations of frames in packs. Protobuf on the store, frozen dataclasses in memory.

An index is put after all its packs and before the log entry. Its name contains the hash of its bytes, and it contains
the hash of every frame, so the log entry verifies all of them. A plan uses an index only after it was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import xxhash
from deltashard_proto.v1 import index_pb2
from google.protobuf.message import DecodeError

from deltashard_checkpoint.cache import pack_spool
from deltashard_checkpoint.codecs.encoding import MAX_COLUMNS, section_bytes
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format import element_type, object_key
from deltashard_checkpoint.format.blob_name import common_blobs
from deltashard_checkpoint.format.frame import (
    Frame,
    FrameInfo,
    FrameKind,
    Tail,
    TailInfo,
    checked_frame,
    checked_tail,
)
from deltashard_checkpoint.format.frame_layout import (
    ALIGN,
    HEADER_BYTES,
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_ROWS,
    MAX_TABLE_ROWS,
)
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.vocabulary import ENCODINGS

FORMAT = 1
ROWS_AND_BLOBS = "rows"
"""Kind of a part: table rows by number, and blobs. An unknown kind makes its checkpoint unreadable, not the run."""
MAX_INDEX_BYTES = 1 << 30
_MAX_NAME = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One pack object of the part."""

    key: str
    """Key relative to the run's root."""
    bytes: int


class Piece(NamedTuple):
    """Location of a frame or a tail in a pack."""

    pack: int
    """Position in `Index.packs`."""
    offset: int
    length: int
    info: FrameInfo
    """Description of the frame."""
    tail: bool

    def check(self, data: memoryview) -> Frame | Tail:
        """Parse the frame or tail in `data`; raises like `checked_frame` if it differs from the index."""
        return checked_tail(data, self.info) if self.tail else checked_frame(data, self.info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A frame with its location and that of its tail."""

    pack: int
    """Position in `Index.packs`."""
    offset: int
    info: FrameInfo
    tail_pack: int = 0
    """Position of the tail's pack in `Index.packs`, if there is a tail."""
    tail_offset: int = 0
    since: int | None = None
    """Seq of a checkpoint: all rows of the part that changed since it are in frames with this value. A hint."""
    duplicated_rows: int = 0
    """Number of its rows that another frame of the part contains, too."""

    @property
    def rows(self) -> int:
        """Number of rows that it adds to those of the part's other frames."""
        return self.info.rows - self.duplicated_rows

    @property
    def application_order(self) -> tuple[object, ...]:
        """Sort key: a part's frames are applied newest step first (a compaction has many), rows before tombstones.

        If a row has two copies, the one in a frame with `duplicated_rows` wins, as in a follower.
        """
        return -self.info.step, self.info.kind, not self.duplicated_rows, self.pack, self.offset

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Locations of the frame and its tail."""
        info = self.info
        own = Piece(self.pack, self.offset, info.length, info, tail=False)
        if info.tail is None:
            return (own,)
        return own, Piece(self.tail_pack, self.tail_offset, info.tail.length, info, tail=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The content that one rank stored for one snapshot, or a compaction for one checkpoint."""

    run: str
    attempt: int
    snapshot_id: int
    step: int
    rank: int
    token: str
    tables: tuple[TableSchema, ...]
    packs: tuple[Pack, ...]
    places: tuple[Place, ...]
    boxes: tuple[Box, ...]
    covers: int | None
    raw_bytes: int
    """Bytes of rows and blobs before encoding."""

    @property
    def rows(self) -> int:
        """Rows in all row frames, each counted once (a row in two column shards counts twice)."""
        return sum(p.rows for p in self.places if p.info.kind is FrameKind.ROWS)

    @property
    def encodings(self) -> dict[str, tuple[str, ...]]:
        """Sorted encodings of its rows, by table."""
        held = {(p.info.table, p.info.encoding) for p in self.places if p.info.kind is FrameKind.ROWS}
        return all_encodings({table: (encoding,)} for table, encoding in held)

    def pieces(self) -> list[tuple[Pack, list[Piece]]]:
        """Return the frames and tails of each pack, by offset."""
        found: list[tuple[Pack, list[Piece]]] = [(pack, []) for pack in self.packs]
        for piece in sorted((p for place in self.places for p in place.pieces), key=lambda p: p.offset):
            found[piece.pack][1].append(piece)
        return found

    @property
    def common_blobs(self) -> bool:
        """Whether it has blobs common to all ranks."""
        return bool(common_blobs(self.blobs))

    @property
    def blobs(self) -> dict[str, int]:
        return {p.info.name: p.info.blob_bytes for p in self.places if p.info.kind is FrameKind.BLOB}


def all_encodings(
    several: Iterable[Mapping[str, tuple[str, ...]]],
) -> dict[str, tuple[str, ...]]:
    """Return the combined encodings of several parts by table, sorted."""
    held: dict[str, set[str]] = {}
    for encodings in several:
        for table, names in encodings.items():
            held.setdefault(table, set()).update(names)
    return {table: tuple(sorted(held[table])) for table in sorted(held)}


def index_order(place: Place) -> tuple[bool, str, int, int, str, int, int, int]:
    """Sort key of frames in an index: by table, kind and first row; blobs last, by name and offset."""
    i = place.info
    blob = i.kind is FrameKind.BLOB
    return blob, i.table, i.kind, i.row_min, i.name, i.blob_offset, place.pack, place.offset


def encode_index(index: Index) -> bytes:
    """Encode an index deterministically: equal indexes have equal bytes."""
    message = index_pb2.Index(
        format=FORMAT,
        run=index.run,
        attempt=index.attempt,
        snapshot_id=index.snapshot_id,
        step=index.step,
        rank=index.rank,
        token=index.token,
        tables=[table_message(table) for table in index.tables],
        packs=[index_pb2.Pack(key=pack.key, bytes=pack.bytes) for pack in index.packs],
        boxes=[box_message(box) for box in index.boxes],
        covers=index.covers,
        raw_bytes=index.raw_bytes,
        kind=ROWS_AND_BLOBS,
    )
    positions = {table.fqn: i for i, table in enumerate(index.tables)}
    for place in sorted(index.places, key=index_order):
        message.frames.append(_frame_message(place.info, table=positions.get(place.info.table, 0)))
        message.frames[-1].pack = place.pack
        message.frames[-1].offset = place.offset
        if place.info.tail is not None:
            message.frames[-1].tail.pack = place.tail_pack
            message.frames[-1].tail.offset = place.tail_offset
        if place.since is not None:
            message.frames[-1].since = place.since
        message.frames[-1].duplicated_rows = place.duplicated_rows
    return message.SerializeToString(deterministic=True)


def digest_hex(data: bytes) -> str:
    """Return the hash in an index's name: xxh3-128 of its bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_index(data: bytes, *, key: str, run: str) -> Index:
    """Decode the index stored under `key` (relative to the root of `run`), checked against its name and itself.

    Raises `CorruptObject`, `ForeignObject` (of another run, attempt, snapshot or rank) or `UnsupportedVersion`.
    """
    name = object_key.parse_index_key(key)
    if len(data) > MAX_INDEX_BYTES:
        raise CorruptObject(f"an index of {len(data)} bytes", where=key)
    if digest_hex(data) != name.xxh3:
        raise CorruptObject("an index does not match the hash in its name", where=key)
    index = parse_index(data, where=key)
    if index.run != run:
        raise ForeignObject(f"index of run {index.run!r}, not {run!r}", where=key)
    compact = name.attempt is None  # a compaction's index has only a token
    here = (index.token, *(() if compact else (index.attempt, index.snapshot_id, index.rank)))
    named = (name.token, *(() if compact else (name.attempt, name.snapshot_id, name.rank)))
    if here != named:
        raise ForeignObject(f"index of (token, attempt, snapshot_id, rank) {here}", where=key)
    state = []
    for pack in index.packs:
        parsed = object_key.parse_pack_key(pack.key)
        state.append(parsed.state)
        if (parsed.token, parsed.attempt, parsed.snapshot_id, parsed.rank) != (
            index.token,
            *((None, None, None) if compact else (index.attempt, index.snapshot_id, index.rank)),
        ):
            raise ForeignObject(f"index references a pack of another part: {pack.key}", where=key)
    if any(
        state[place.pack] or (place.info.tail is not None and not state[place.tail_pack])
        for place in index.places
    ):
        raise CorruptObject("a tail is in a pack of frames, or a frame in a pack of tails", where=key)
    return index


def parse_index(data: bytes, *, where: str = "") -> Index:
    """Decode an index without checking its name; raises `CorruptObject` or `UnsupportedVersion`."""
    try:
        message = index_pb2.Index.FromString(data)
    except (DecodeError, ValueError) as error:
        raise CorruptObject(f"index is not protobuf: {error}", where=where) from None
    if message.format > FORMAT:
        raise UnsupportedVersion(
            f"index of format {message.format}, this library reads {FORMAT}",
            where=where,
            remedy="update deltashard",
        )
    if message.format == FORMAT and message.kind != ROWS_AND_BLOBS:
        raise UnsupportedVersion(
            f"a part of kind {message.kind[:40]!r}, this library reads {ROWS_AND_BLOBS!r}",
            where=where,
            remedy="update deltashard",
        )
    try:
        return _checked(message)
    except CorruptObject as error:
        raise CorruptObject(f"index: {error.what}", where=where) from None


def table_message(table: TableSchema) -> index_pb2.TableSchema:
    return index_pb2.TableSchema(
        fqn=table.fqn,
        rows=table.rows,
        columns=table.columns,
        dtype=table.dtype,
        fields=[
            index_pb2.FieldSpec(name=f.name, pointwise=f.kind == "pointwise", dtype=f.dtype)
            for f in table.fields
        ],
    )


def table_of(message: index_pb2.TableSchema) -> TableSchema:
    """Convert a schema from protobuf; raises `CorruptObject` if no table can have it."""
    fields = tuple(
        FieldSpec(name=_name(f.name, "field"), kind="pointwise" if f.pointwise else "rowwise", dtype=f.dtype)
        for f in message.fields
    )
    if len({f.name for f in fields}) != len(fields) or not all(
        element_type.is_known(f.dtype) for f in fields
    ):
        raise CorruptObject(f"fields of table {message.fqn[:80]!r} are repeated or of unknown type")
    if not 0 < message.columns <= MAX_COLUMNS or not 0 < message.rows <= MAX_TABLE_ROWS:
        raise CorruptObject(f"table {message.fqn[:80]!r} of shape [{message.rows}, {message.columns}]")
    if message.dtype not in element_type.WEIGHT_DTYPES:
        raise CorruptObject(f"table {message.fqn[:80]!r} of type {message.dtype[:40]!r}")
    return TableSchema(
        fqn=_name(message.fqn, "table"),
        rows=message.rows,
        columns=message.columns,
        dtype=message.dtype,
        fields=fields,
    )


def box_message(box: Box) -> index_pb2.Box:
    return index_pb2.Box(
        table=box.table,
        row_start=box.row_start,
        row_stop=box.row_stop,
        col_start=box.col_start,
        col_stop=box.col_stop,
    )


def box_of(message: index_pb2.Box) -> Box:
    """Convert a box from protobuf; raises `CorruptObject` if it is empty or reversed."""
    if message.row_start >= message.row_stop or message.col_start >= message.col_stop:
        raise CorruptObject(f"box of table {message.table[:80]!r} is empty or reversed")
    return Box(
        table=message.table,
        row_start=message.row_start,
        row_stop=message.row_stop,
        col_start=message.col_start,
        col_stop=message.col_stop,
    )


def _frame_message(info: FrameInfo, *, table: int) -> index_pb2.Frame:
    """Convert a frame's description to protobuf; the caller sets packs and offsets."""
    return index_pb2.Frame(
        kind=index_pb2.FrameKind.Name(int(info.kind)),
        length=info.length,
        xxh3_128=info.digest,
        step=info.step,
        table=table,
        row_min=info.row_min,
        row_max=info.row_max,
        rows=info.rows,
        col_start=info.col_start,
        col_stop=info.col_stop,
        encoding=info.encoding,
        name=info.name,
        blob_offset=info.blob_offset,
        blob_bytes=info.blob_bytes,
        tail=None
        if info.tail is None
        else index_pb2.Tail(length=info.tail.length, xxh3_128=info.tail.digest),
    )


def frame_info(message: index_pb2.Frame, tables: tuple[TableSchema, ...]) -> FrameInfo:  # noqa: C901
    """Convert and check a frame's description from protobuf; raises `CorruptObject`."""
    m = message
    if m.kind not in (1, 2, 3):
        raise CorruptObject(f"frame of unknown kind {m.kind}")
    kind = FrameKind(m.kind)
    _check_stored(m)
    tail: TailInfo | None = None
    if m.HasField("tail"):
        if kind is not FrameKind.ROWS:
            raise CorruptObject(f"a {kind.name.lower()} frame with a tail")
        _check_stored(m.tail)
        tail = TailInfo(length=m.tail.length, digest=m.tail.xxh3_128)
    if kind is FrameKind.BLOB:
        if m.table or m.row_min or m.row_max or m.rows or m.col_start or m.col_stop or m.encoding:
            raise CorruptObject("a blob frame claims rows")
        if m.blob_bytes > MAX_BLOB_BYTES or m.blob_offset > m.blob_bytes:
            raise CorruptObject(f"blob chunk at {m.blob_offset} of {m.blob_bytes} bytes")
        return FrameInfo(
            kind=kind, length=m.length, digest=m.xxh3_128, step=m.step, name=_name(m.name, "blob"),
            blob_offset=m.blob_offset, blob_bytes=m.blob_bytes,
        )  # fmt: skip
    if m.name or m.blob_offset or m.blob_bytes:
        raise CorruptObject("a row frame claims a blob")
    if m.table >= len(tables):
        raise CorruptObject(f"frame of table {m.table} of {len(tables)}")
    table = tables[m.table]
    if not (m.row_min <= m.row_max < table.rows and m.col_start < m.col_stop <= table.columns):
        raise CorruptObject(
            f"frame of rows {m.row_min} to {m.row_max}, columns {m.col_start}:{m.col_stop} is outside its table "
            f"{table.fqn} [{table.rows}, {table.columns}]"
        )
    if not 1 <= m.rows <= min(MAX_ROWS, m.row_max - m.row_min + 1):
        raise CorruptObject(f"{m.rows} rows between {m.row_min} and {m.row_max}")
    if m.encoding and kind is FrameKind.ROWS and m.encoding not in ENCODINGS:
        raise UnsupportedVersion(
            f"unknown encoding {m.encoding[:40]!r}", where=table.fqn, remedy="update deltashard"
        )
    if bool(m.encoding) is not (kind is FrameKind.ROWS):
        raise CorruptObject(f"encoding {m.encoding[:40]!r} of a {kind.name.lower()} frame")
    # Readers allocate memory by the index before they read a frame, so its counts must fit the stated frame length.
    if kind is FrameKind.ROWS:
        least = HEADER_BYTES + sum(section_bytes(ENCODINGS[m.encoding], m.rows, m.col_stop - m.col_start))
        if m.length < least:
            raise CorruptObject(f"{m.rows} rows of table {table.fqn[:80]!r} in a frame of {m.length} bytes")
    return FrameInfo(
        kind=kind, length=m.length, digest=m.xxh3_128, step=m.step, table=table.fqn, row_min=m.row_min,
        row_max=m.row_max, rows=m.rows, col_start=m.col_start, col_stop=m.col_stop, encoding=m.encoding,
        tail=tail,
    )  # fmt: skip


def _check_stored(message: index_pb2.Frame | index_pb2.Tail) -> None:
    """Raise `CorruptObject` unless the length and hash of a frame or tail are plausible."""
    if not HEADER_BYTES < message.length <= MAX_FRAME_BYTES or message.length % ALIGN:
        raise CorruptObject(f"a frame cannot be {message.length} bytes long")
    if len(message.xxh3_128) != 16:
        raise CorruptObject("a frame's hash does not have 16 bytes")


def _checked(message: index_pb2.Index) -> Index:
    if message.format != FORMAT:
        raise CorruptObject("it has no format version")
    tables = tuple(table_of(table) for table in message.tables)
    shapes = {table.fqn: table for table in tables}
    if len(shapes) != len(tables):
        raise CorruptObject("a table occurs twice")
    boxes = tuple(box_of(box) for box in message.boxes)
    for box in boxes:
        table = shapes.get(box.table)
        if table is None or box.row_stop > table.rows or box.col_stop > table.columns:
            raise CorruptObject(f"box of {box.table[:80]!r} is outside its table")
    stored = tuple(Pack(key=pack.key, bytes=pack.bytes) for pack in message.packs)
    if len({pack.key for pack in stored}) != len(stored):
        raise CorruptObject("a pack occurs twice")
    for pack in stored:
        object_key.parse_pack_key(pack.key)
        if not 0 < pack.bytes <= pack_spool.MAX_PACK_BYTES:
            raise CorruptObject(f"pack of {pack.bytes} bytes")
    places = []
    for frame in message.frames:
        if max(frame.pack, frame.tail.pack) >= len(stored):
            raise CorruptObject(
                f"frame in pack {frame.pack}, its tail in {frame.tail.pack}, of {len(stored)}"
            )
        _check_hint(frame)
        places.append(
            Place(
                pack=frame.pack,
                offset=frame.offset,
                info=frame_info(frame, tables),
                tail_pack=frame.tail.pack,
                tail_offset=frame.tail.offset,
                since=frame.since if frame.HasField("since") else None,
                duplicated_rows=frame.duplicated_rows,
            )
        )
    if places != sorted(places, key=index_order):
        raise CorruptObject("frames are out of order")
    _check_places(places, stored)
    return Index(
        run=message.run,
        attempt=message.attempt,
        snapshot_id=message.snapshot_id,
        step=message.step,
        rank=message.rank,
        token=message.token,
        tables=tables,
        packs=stored,
        places=tuple(places),
        boxes=boxes,
        covers=message.covers if message.HasField("covers") else None,
        raw_bytes=message.raw_bytes,
    )


def _check_hint(message: index_pb2.Frame) -> None:
    """Raise `CorruptObject` unless `since` and `duplicated_rows` of a frame are valid."""
    if message.HasField("since") and message.kind != index_pb2.FRAME_KIND_ROWS:
        raise CorruptObject("a frame without rows has `since`")
    if message.duplicated_rows > (message.rows if message.HasField("since") else 0):
        raise CorruptObject(f"{message.duplicated_rows} duplicated rows in a frame of {message.rows}")


def _check_places(places: list[Place], stored: tuple[Pack, ...]) -> None:
    """Check that frames and tails are inside their packs, do not overlap, and that blob chunks agree on the size."""
    pack, end = -1, 0
    for piece in sorted((p for place in places for p in place.pieces), key=lambda p: (p.pack, p.offset)):
        if piece.pack != pack:
            pack, end = piece.pack, 0
        if piece.offset % ALIGN or piece.offset < end:
            raise CorruptObject(f"frames overlap or are not aligned at {piece.offset} in pack {pack}")
        end = piece.offset + piece.length
        if end > stored[pack].bytes:
            raise CorruptObject(f"frame ends at {end}, its pack at {stored[pack].bytes}")
    sizes: dict[str, int] = {}
    for place in places:
        if place.info.kind is FrameKind.BLOB:
            size = sizes.setdefault(place.info.name, place.info.blob_bytes)
            if size != place.info.blob_bytes:
                raise CorruptObject(f"chunks of blob {place.info.name[:80]!r} disagree on its size")


def _name(text: str, what: str) -> str:
    if not 0 < len(text.encode()) <= _MAX_NAME:
        raise CorruptObject(f"{what} has an empty or too long name")
    return text
