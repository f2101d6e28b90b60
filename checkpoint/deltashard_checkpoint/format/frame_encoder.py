"""Making frames: rows of a table shard, or a chunk of a blob, into the bytes that `frame` parses.

Weights are quantized straight into the frame's buffer; optimizer state is copied as it is (fp32 exact), point-wise
float32 state as bfloat16 where the policy says so. Where an encoding would not make the rows smaller (tables of one or
two columns), or cannot hold them (more NaN and Inf than its side list pays for), the frame is raw: a stored frame
never takes more than the rows it holds, hence a record batch of `BATCH_BYTES` always fits one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from deltashard_checkpoint.codecs import quantizer, row_id
from deltashard_checkpoint.codecs.encoding import effective_encoding, raw_encoding, section_bytes
from deltashard_checkpoint.codecs.side_list import read_exceptions, write_exceptions
from deltashard_checkpoint.errors import InternalBug, UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format import frame as frames
from deltashard_checkpoint.format.frame import FrameInfo, FrameKind, aligned
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.vocabulary import DEFAULT_STATE_ENCODING, ENCODINGS, stored_state_dtype

Array = npt.NDArray[np.generic]
BLOB_CHUNK_BYTES = 4 << 20
"""A good chunk of a blob: large enough to stream, small enough to spread over ranks and threads."""


class FrameUnfit(UserError):
    """Rows, fields or a buffer that cannot become a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """A whole frame, ready for a pack."""

    info: FrameInfo
    data: memoryview
    """`info.length` bytes, in the caller's buffer if one was given."""
    raw_bytes: int
    """Of the rows and fields (or chunk) before encoding; ids not counted."""


def rows_per_frame(table: TableSchema, columns: int) -> int:
    """How many rows of `columns` columns, with their fields, fit one frame whatever their values and encoding."""
    spare = frames.MAX_FRAME_BYTES - aligned(_meta_bound(table)) - frames.ALIGN * (8 + len(table.fields))
    ids = -(-table.rows.bit_length() // 7)  # a delta's worst case
    return max(1, min(frames.MAX_ROWS, spare // (_raw_row_bytes(table, columns) + ids)))


def frame_bound(table: TableSchema, columns: int, rows: int) -> int:
    """A size of buffer that holds any frame of `rows` rows."""
    ids = 8 + rows * 9
    sections = rows * _raw_row_bytes(table, columns) + ids
    return (
        frames.HEADER_BYTES
        + aligned(_meta_bound(table))
        + aligned(sections)
        + frames.ALIGN * (8 + len(table.fields))
    )


def encode_rows(
    *,
    table: TableSchema,
    ids: npt.NDArray[np.int64] | range,
    weights: Array,
    fields: Mapping[str, Array],
    encoding: str,
    step: int,
    col_start: int = 0,
    col_stop: int | None = None,
    state_encoding: str = DEFAULT_STATE_ENCODING,
    search: quantizer.Search | None = None,
    out: bytearray | memoryview | None = None,
) -> EncodedFrame:
    """One frame of rows.

    Args:
        table: schema of the whole table; `fields` has an array for each of its fields, neither more nor less.
        ids: global rows, int64 [n] strictly ascending, or a range of step 1.
        weights: [n, D] C-contiguous, of the table's dtype (bfloat16 as uint16), D = col_stop - col_start.
        fields: row-wise [n], point-wise [n, D], of the field's dtype.
        encoding: one of `vocabulary.ENCODINGS`; what the frame really has is in `info.encoding`.
        step: of the rows.
        col_start: first column held; `col_stop` is one past the last, None: the table's end.
        col_stop: see `col_start`.
        state_encoding: fp32 (exact), or bf16 for point-wise float32 fields.
        search: range search of quantized encodings.
        out: where to put the frame (`frame_bound` bytes suffice); None: a fresh buffer.

    Raises:
        FrameUnfit: no rows, a wrong shape or dtype, rows outside the table, or more than fit one frame.
    """
    n = len(ids)
    stop = table.columns if col_stop is None else col_stop
    width = stop - col_start
    held = element_type.by_name(table.dtype).carrier
    if not 0 <= col_start < stop <= table.columns:
        raise FrameUnfit(f"columns {col_start}:{stop} of {table.columns}", where=table.fqn)
    if n == 0 or weights.shape != (n, width) or weights.dtype != held:
        raise FrameUnfit(
            f"weights {weights.dtype}{list(weights.shape)} for {n} rows of {width} {table.dtype}",
            where=table.fqn,
        )
    row_min, row_max = int(ids[0]), int(ids[-1])
    if row_min < 0 or row_max >= table.rows:
        raise FrameUnfit(f"rows {row_min} to {row_max} of {table.rows}", where=table.fqn)
    stored = _field_dtypes(table, n, width, fields, state_encoding)
    ids_kind, id_bytes = row_id.encode_ids(ids)
    meta = _table_meta(table, stored, (col_start, stop), (row_min, row_max))
    for name in dict.fromkeys((effective_encoding(encoding, table.dtype, width), raw_encoding(table.dtype))):
        raw = name == raw_encoding(table.dtype)
        sizes = section_bytes(name, n, width)
        layout = _Layout([len(meta), len(id_bytes), *sizes, *(_field_bytes(table, stored, n, width))])
        spare = sum(section_bytes(raw_encoding(table.dtype), n, width)) - sum(sizes)
        view = _room(out, layout.end + aligned(max(spare, 0)), layout.end, table.fqn)
        parts = layout.views(view)
        encoded = quantizer.encode_rows(
            name,
            np.ascontiguousarray(weights),
            parts[2],
            parts[3],
            parts[4],
            dtype=table.dtype,
            search=search,
        )
        end = layout.end + aligned(len(encoded.exceptions))
        if raw or (encoded.fits and end <= min(frames.MAX_FRAME_BYTES, len(view))):
            break
    if end > frames.MAX_FRAME_BYTES:
        raise FrameUnfit(
            f"{n} rows make a frame of {end} bytes, at most {frames.MAX_FRAME_BYTES} are allowed",
            where=table.fqn,
            remedy="split them: rows_per_frame, or encode_row_frames",
        )
    parts[0][:] = meta
    parts[1][:] = id_bytes
    for spec, dtype, part in zip(table.fields, stored, parts[5:], strict=True):
        values = np.ascontiguousarray(fields[spec.name])
        if dtype != spec.dtype:
            values = quantizer.narrowed(values, dtype)
        part[:] = memoryview(values.reshape(-1).view(np.uint8).data)
    layout.clear_padding(view)
    tail = view[layout.end : end]
    tail[: len(encoded.exceptions)] = encoded.exceptions
    tail[len(encoded.exceptions) :] = bytes(len(tail) - len(encoded.exceptions))
    view = view[:end]
    digest = _seal(
        view, kind=FrameKind.ROWS, encoding=ENCODINGS[name].code, ids_kind=ids_kind,
        exponent=encoded.exponent, meta=len(meta), ids=len(id_bytes), exceptions=len(encoded.exceptions),
        rows=n, step=step,
    )  # fmt: skip
    info = FrameInfo(
        kind=FrameKind.ROWS, length=end, digest=digest, step=step, table=table.fqn, row_min=row_min,
        row_max=row_max, rows=n, col_start=col_start, col_stop=stop, encoding=name,
    )  # fmt: skip
    return EncodedFrame(info=info, data=view, raw_bytes=n * _raw_row_bytes(table, width))


def encode_row_frames(
    *,
    table: TableSchema,
    ids: npt.NDArray[np.int64] | range,
    weights: Array,
    fields: Mapping[str, Array],
    encoding: str,
    step: int,
    col_start: int = 0,
    col_stop: int | None = None,
    state_encoding: str = DEFAULT_STATE_ENCODING,
    search: quantizer.Search | None = None,
) -> Iterator[EncodedFrame]:
    """As many frames as the rows need, each in a fresh buffer; arguments and errors of `encode_rows`."""
    limit = rows_per_frame(table, (table.columns if col_stop is None else col_stop) - col_start)
    for at in range(0, len(ids), limit):
        yield encode_rows(
            table=table, ids=ids[at : at + limit], weights=weights[at : at + limit],
            fields={name: values[at : at + limit] for name, values in fields.items()}, encoding=encoding, step=step,
            col_start=col_start, col_stop=col_stop, state_encoding=state_encoding, search=search,
        )  # fmt: skip


def take_rows(frame: frames.Frame, keep: npt.NDArray[np.bool_]) -> EncodedFrame:
    """The rows of a frame for which `keep` (bool [rows], at least one) is set, as encoded: nothing is decoded.

    Restoring the result gives, for these rows, bit for bit what restoring `frame` gives: scales, biases, codes, state
    and exceptional rows are moved, encoding, exponent and step stay. Raises `CorruptObject` like `Frame.row_ids`.
    """
    info, table = frame.info, frame.table
    if table is None or keep.shape != (info.rows,) or not keep.any():
        raise InternalBug(f"take_rows with {keep.shape} of {info.rows} rows")
    kept = frame.row_ids()[keep]
    n, width = len(kept), info.col_stop - info.col_start
    ids_kind, id_bytes = row_id.encode_ids(kept)
    stored = [section.stored_dtype for section in frame.fields]
    row_min, row_max = int(kept[0]), int(kept[-1])
    meta = _table_meta(table, stored, (info.col_start, info.col_stop), (row_min, row_max))
    sources = [frame.scales, frame.biases, frame.codes, *(section.data for section in frame.fields)]
    sections = [np.frombuffer(data, np.uint8).reshape(info.rows, -1)[keep].reshape(-1) for data in sources]
    exceptions = b""
    if len(frame.exceptions):
        positions, values = read_exceptions(np.frombuffer(frame.exceptions, np.uint8), info.rows, width)
        mine = keep[positions]
        exceptions = write_exceptions((np.cumsum(keep) - 1)[positions[mine]], values[mine])
    layout = _Layout([len(meta), len(id_bytes), *(section.size for section in sections), len(exceptions)])
    if layout.end > frames.MAX_FRAME_BYTES:
        raise InternalBug(f"fewer rows make a larger frame: {layout.end} bytes of {info.length}")
    view = memoryview(np.empty(layout.end, np.uint8).data)
    contents: list[memoryview] = [memoryview(meta), memoryview(id_bytes)]
    contents += [memoryview(section.data) for section in sections]
    for part, data in zip(layout.views(view), [*contents, memoryview(exceptions)], strict=True):
        part[:] = data
    layout.clear_padding(view)
    digest = _seal(
        view, kind=info.kind, encoding=ENCODINGS[info.encoding].code if info.encoding else 0, ids_kind=ids_kind,
        exponent=frame.exponent, meta=len(meta), ids=len(id_bytes), exceptions=len(exceptions), rows=n,
        step=info.step,
    )  # fmt: skip
    moved = replace(info, length=layout.end, digest=digest, row_min=row_min, row_max=row_max, rows=n)
    return EncodedFrame(info=moved, data=view, raw_bytes=raw_bytes_of(moved, table))


def raw_bytes_of(info: FrameInfo, table: TableSchema) -> int:
    """Bytes of a row frame's rows and fields before encoding."""
    return info.rows * _raw_row_bytes(table, info.col_stop - info.col_start)


def encode_blob(
    *,
    name: str,
    offset: int,
    blob_bytes: int,
    chunk: bytes | bytearray | memoryview,
    step: int,
    out: bytearray | memoryview | None = None,
) -> EncodedFrame:
    """One frame with bytes [offset, offset + len(chunk)) of a blob of `blob_bytes`; raises `FrameUnfit`.

    An empty blob is one frame with an empty chunk.
    """
    data = memoryview(chunk).cast("B")
    encoded_name = name.encode()
    if not 0 < len(encoded_name) <= frames.MAX_NAME_BYTES:
        raise FrameUnfit(f"a blob's name of {len(encoded_name)} bytes", where=name[:80])
    if not 0 <= offset <= offset + len(data) <= blob_bytes <= frames.MAX_BLOB_BYTES:
        raise FrameUnfit(f"chunk [{offset}, +{len(data)}) of a blob of {blob_bytes} bytes", where=name)
    meta = (
        struct.pack("<H", len(encoded_name))
        + encoded_name
        + frames.BLOB_META.pack(offset, blob_bytes, len(data))
    )
    layout = _Layout([len(meta), len(data)])
    if layout.end > frames.MAX_FRAME_BYTES:
        raise FrameUnfit(
            f"a chunk of {len(data)} bytes", where=name, remedy=f"use chunks of {BLOB_CHUNK_BYTES} bytes"
        )
    view = _room(out, layout.end, layout.end, name)[: layout.end]
    parts = layout.views(view)
    parts[0][:] = meta
    parts[1][:] = data
    layout.clear_padding(view)
    digest = _seal(view, kind=FrameKind.BLOB, meta=len(meta), step=step)
    info = FrameInfo(
        kind=FrameKind.BLOB, length=layout.end, digest=digest, step=step, name=name, blob_offset=offset,
        blob_bytes=blob_bytes,
    )  # fmt: skip
    return EncodedFrame(info=info, data=view, raw_bytes=len(data))


def encode_blob_frames(
    *, name: str, data: bytes | bytearray | memoryview, step: int, chunk_bytes: int = BLOB_CHUNK_BYTES
) -> Iterator[EncodedFrame]:
    """A whole blob as frames, each in a fresh buffer."""
    view = memoryview(data).cast("B")
    for at in range(0, max(len(view), 1), chunk_bytes):
        chunk = view[at : at + chunk_bytes]
        yield encode_blob(name=name, offset=at, blob_bytes=len(view), chunk=chunk, step=step)


class _Layout:
    """Places of sections of given sizes, one after another from the end of the header."""

    def __init__(self, sizes: list[int]) -> None:
        self.spans: list[tuple[int, int]] = []
        self.end = frames.HEADER_BYTES
        for size in sizes:
            self.spans.append((self.end, self.end + size))
            self.end = aligned(self.end + size)

    def views(self, buffer: memoryview) -> list[memoryview]:
        return [buffer[start:stop] for start, stop in self.spans]

    def clear_padding(self, buffer: memoryview) -> None:
        for _, stop in self.spans:
            buffer[stop : aligned(stop)] = bytes(aligned(stop) - stop)


def _room(out: bytearray | memoryview | None, wanted: int, needed: int, where: str) -> memoryview:
    if out is None:
        return memoryview(np.empty(wanted, np.uint8).data)
    view = memoryview(out).cast("B")
    if len(view) < needed or view.readonly:
        raise FrameUnfit(
            f"{len(view)} bytes for a frame of {needed}", where=where, remedy="frame_bound gives a size"
        )
    return view


def _seal(
    view: memoryview,
    *,
    kind: FrameKind,
    meta: int,
    step: int,
    encoding: int = 0,
    ids_kind: int = 0,
    exponent: int = 0,
    ids: int = 0,
    exceptions: int = 0,
    rows: int = 0,
) -> bytes:
    """Write the header, hash the frame, write the hash."""
    frames.HEADER.pack_into(
        view, 0, frames.MAGIC, frames.VERSION, kind, encoding, ids_kind, exponent, 0, meta, ids, exceptions, rows,
        len(view), step, 0, bytes(16),
    )  # fmt: skip
    state = xxhash.xxh3_128(view[: frames.DIGEST_AT])
    state.update(view[frames.HEADER_BYTES :])
    digest = state.digest()
    view[frames.DIGEST_AT : frames.HEADER_BYTES] = digest
    return digest


def _field_dtypes(
    table: TableSchema, n: int, width: int, fields: Mapping[str, Array], state_encoding: str
) -> list[str]:
    """What each field is stored as; raises `FrameUnfit` when the arrays are not the schema's."""
    if set(fields) != {spec.name for spec in table.fields}:
        raise FrameUnfit(
            f"fields {sorted(fields)} given, the schema has {sorted(s.name for s in table.fields)}",
            where=table.fqn,
        )
    stored = []
    for spec in table.fields:
        values = fields[spec.name]
        shape = (n, width) if spec.kind == "pointwise" else (n,)
        if values.shape != shape or values.dtype != element_type.by_name(spec.dtype).carrier:
            raise FrameUnfit(
                f"field {values.dtype}{list(values.shape)}, {spec.dtype}{list(shape)} expected",
                where=f"{table.fqn}.{spec.name}",
            )
        stored.append(
            stored_state_dtype(state_encoding, pointwise=spec.kind == "pointwise", dtype=spec.dtype)
        )
    return stored


def _field_bytes(table: TableSchema, stored: list[str], n: int, width: int) -> list[int]:
    return [
        n * (width if spec.kind == "pointwise" else 1) * element_type.by_name(dtype).itemsize_bytes
        for spec, dtype in zip(table.fields, stored, strict=True)
    ]


def _raw_row_bytes(table: TableSchema, columns: int) -> int:
    fields = sum(_field_bytes(table, [spec.dtype for spec in table.fields], 1, columns))
    return columns * element_type.by_name(table.dtype).itemsize_bytes + fields


def _meta_bound(table: TableSchema) -> int:
    names = 2 + len(table.fqn.encode()) + sum(4 + len(spec.name.encode()) for spec in table.fields)
    return names + frames.TABLE_META.size


def _table_meta(
    table: TableSchema, stored: list[str], columns: tuple[int, int], rows: tuple[int, int]
) -> bytes:
    fqn = table.fqn.encode()
    if (
        not 0 < len(fqn) <= frames.MAX_NAME_BYTES
        or len(table.fields) > 255
        or table.rows > frames.MAX_TABLE_ROWS
    ):
        raise FrameUnfit(
            "a table's name, number of fields or rows exceed the format's limits", where=table.fqn[:80]
        )
    pieces = [
        struct.pack("<H", len(fqn)),
        fqn,
        frames.TABLE_META.pack(
            table.rows,
            table.columns,
            element_type.by_name(table.dtype).code,
            *columns,
            *rows,
            len(table.fields),
        ),
    ]
    for spec, dtype in zip(table.fields, stored, strict=True):
        name = spec.name.encode()
        if not 0 < len(name) < 256:
            raise FrameUnfit("a field's name must have 1 to 255 bytes", where=f"{table.fqn}.{spec.name[:80]}")
        codes = (
            spec.kind == "pointwise",
            element_type.by_name(spec.dtype).code,
            element_type.by_name(dtype).code,
        )
        pieces.append(struct.pack("<B", len(name)) + name + bytes(codes))
    return b"".join(pieces)
