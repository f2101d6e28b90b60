"""Frame encoding: rows of a table shard, or a chunk of a blob, into the bytes that `frame` parses.

Weights are quantized directly into the frame's buffer. Optimizer state is copied unchanged (fp32 exact) into the tail's
buffer, or narrowed to bfloat16 for point-wise float32 state if the policy chose that. The frame is raw if the encoding
would not shrink the rows (tables of one or two columns) or cannot hold them (too many NaN and Inf for its side list),
so a stored frame is never larger than its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deltashard_checkpoint.codecs import quantizer, row_id
from deltashard_checkpoint.codecs.encoding import effective_encoding, raw_encoding, section_bytes
from deltashard_checkpoint.codecs.side_list import read_exceptions, write_exceptions
from deltashard_checkpoint.errors import InternalBug
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.frame import Frame, FrameInfo, FrameKind, TailInfo
from deltashard_checkpoint.format.frame_layout import (
    ALIGN,
    BLOB_META,
    DIGEST_AT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_NAME_BYTES,
    MAX_ROWS,
    MAX_TABLE_ROWS,
    TABLE_META,
    TAIL_META,
    VERSION,
    aligned,
)
from deltashard_checkpoint.format.row_block import (
    EncodeOptions,
    FrameEncodeError,
    RowBlock,
    raw_row_bytes,
    weight_row_bytes,
)
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.vocabulary import ENCODINGS, Encoding, stored_state_dtype

FRAME_WEIGHT_BYTES = 1 << 20
"""Maximum encoded weight bytes of one frame. Bounds the cost of reading one row, and the index entries per byte."""
BLOB_CHUNK_BYTES = 4 << 20
"""Default chunk size of a blob: large enough to stream, small enough to distribute over ranks and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """A complete frame, ready to be written to a pack."""

    info: FrameInfo
    data: memoryview
    """`info.length` bytes, in the caller's buffer if one was given."""
    tail: memoryview | None = None
    """The frame's tail: `info.tail.length` bytes, in the caller's buffer if one was given."""
    raw_bytes: int
    """Bytes of the rows and fields (or chunk) before encoding, without ids."""


def rows_per_frame(table: TableSchema, columns: int, encoding: Encoding) -> int:
    """Return the number of rows of `columns` columns that fill a frame of `FRAME_WEIGHT_BYTES`.

    Fewer if the frame in its raw encoding, or its tail, would otherwise exceed `MAX_FRAME_BYTES`.
    """
    spare = MAX_FRAME_BYTES - aligned(_meta_bound(table)) - ALIGN * (8 + len(table.fields))
    ids = -(-table.rows.bit_length() // 7)  # worst case of a delta
    raw = weight_row_bytes(table, columns)
    state = raw_row_bytes(table, columns) - raw
    stored = sum(section_bytes(effective_encoding(encoding, table.dtype, columns), 1, columns))
    return max(1, min(MAX_ROWS, FRAME_WEIGHT_BYTES // stored, spare // max(raw + ids, state)))


def frame_bound(table: TableSchema, columns: int, rows: int) -> int:
    """Return a buffer size that holds any frame of `rows` rows with its tail."""
    ids = 8 + rows * 9
    sections = rows * raw_row_bytes(table, columns) + ids
    around = HEADER_BYTES + aligned(_meta_bound(table)) + ALIGN * (8 + len(table.fields))
    return aligned(sections) + 2 * around


def encode_rows(
    block: RowBlock, options: EncodeOptions, *, step: int, out: bytearray | memoryview | None = None
) -> EncodedFrame:
    """Encode the rows of `block`, taken at `step`, into one frame, plus a tail if they have state.

    Both are placed in `out` (`frame_bound` bytes suffice), or in new buffers. Raises `FrameEncodeError` for more rows
    than one frame can hold, unsorted rows, names that the format cannot store, or a buffer that is too small;
    `UnknownName` for an unknown state encoding.
    """
    table, n = block.schema, len(block)
    ids_kind, id_bytes = row_id.encode_ids(block.ids)
    columns, (row_min, row_max) = (block.columns.start, block.columns.stop), block.row_span
    sealed = _encode_tail(block, options.state_encoding, step, out) if table.fields else None
    tail, tail_data = sealed or (None, None)
    if out is not None and tail is not None:
        out = memoryview(out).cast("B")[tail.length :]
    meta = _rows_meta(table, columns, (row_min, row_max), tail)
    weights = _encode_weights(block, options, [len(meta), len(id_bytes)], out)
    parts, end = weights.layout.views(weights.buffer), weights.end
    parts[0][:] = meta
    parts[1][:] = id_bytes
    weights.layout.clear_padding(weights.buffer)
    exceptions = weights.encoded.exceptions
    last = weights.buffer[weights.layout.end : end]
    last[: len(exceptions)] = exceptions
    last[len(exceptions) :] = bytes(len(last) - len(exceptions))
    view = weights.buffer[:end]
    digest = _seal(
        view, kind=FrameKind.ROWS, encoding=weights.encoding.code, ids_kind=ids_kind,
        exponent=weights.encoded.exponent, meta=len(meta), ids=len(id_bytes), exceptions=len(exceptions), rows=n,
        step=step,
    )  # fmt: skip
    info = FrameInfo(
        kind=FrameKind.ROWS, length=end, digest=digest, step=step, table=table.fqn, row_min=row_min,
        row_max=row_max, rows=n, col_start=columns[0], col_stop=columns[1], encoding=weights.encoding.name,
        tail=tail,
    )  # fmt: skip
    return EncodedFrame(info=info, data=view, tail=tail_data, raw_bytes=block.raw_bytes)


def _encode_tail(
    block: RowBlock, state_encoding: str, step: int, out: bytearray | memoryview | None
) -> tuple[TailInfo, memoryview]:
    """Encode the rows' optimizer state at the start of `out` or in a new buffer; raises `FrameEncodeError`."""
    table, n, width = block.schema, len(block), len(block.columns)
    stored = [
        stored_state_dtype(state_encoding, pointwise=spec.kind == "pointwise", dtype=spec.dtype)
        for spec in table.fields
    ]
    meta = _tail_meta(table, stored, (block.columns.start, block.columns.stop), block.row_span)
    sizes = [
        n * spec.values(width) * element_type.by_name(dtype).itemsize_bytes
        for spec, dtype in zip(table.fields, stored, strict=True)
    ]
    layout = _Layout([len(meta), *sizes])
    _check_length(layout.end, n, table.fqn)
    view = _frame_buffer(out, layout.end, layout.end, table.fqn)[: layout.end]
    parts = layout.views(view)
    parts[0][:] = meta
    for spec, dtype, part in zip(table.fields, stored, parts[1:], strict=True):
        values = np.ascontiguousarray(block.fields[spec.name])
        if dtype != spec.dtype:
            values = quantizer.narrowed(values, dtype)
        part[:] = memoryview(values.reshape(-1).view(np.uint8).data)
    layout.clear_padding(view)
    return _seal_tail(view, len(meta), n, step), view


class _EncodedWeights(NamedTuple):
    """Weights encoded in place in a frame's buffer; the other sections are not written yet."""

    encoding: Encoding
    """The encoding in effect."""
    encoded: quantizer.Encoded
    layout: _Layout
    """All sections except the exceptions, which follow them."""
    buffer: memoryview
    end: int
    """End of the whole frame."""


def _encode_weights(
    block: RowBlock, options: EncodeOptions, before: list[int], out: bytearray | memoryview | None
) -> _EncodedWeights:
    """Encode the weights with the chosen encoding, or raw if that would not be smaller or cannot hold them.

    `before`: byte sizes of the preceding sections. Raises `FrameEncodeError`.
    """
    table, n, width = block.schema, len(block), len(block.columns)
    raw = raw_encoding(table.dtype)
    raw_bytes = sum(section_bytes(raw, n, width))
    rows = np.ascontiguousarray(block.weights)
    chosen = effective_encoding(options.encoding, table.dtype, width)
    for encoding in (raw,) if chosen is raw else (chosen, raw):
        sizes = section_bytes(encoding, n, width)
        layout = _Layout([*before, *sizes])
        spare = max(raw_bytes - sum(sizes), 0)  # the side list may use the bytes that the encoding saves
        buffer = _frame_buffer(out, layout.end + aligned(spare), layout.end, table.fqn)
        scales, biases, codes = layout.views(buffer)[2:5]
        encoded = quantizer.encode_rows(
            encoding, rows, scales, biases, codes, dtype=table.dtype, search=options.search
        )
        end = layout.end + aligned(len(encoded.exceptions))
        if encoding is raw or (encoded.fits and end <= min(MAX_FRAME_BYTES, len(buffer))):
            break
    _check_length(end, n, table.fqn)
    return _EncodedWeights(encoding=encoding, encoded=encoded, layout=layout, buffer=buffer, end=end)


def _check_length(end: int, rows: int, where: str) -> None:
    if end > MAX_FRAME_BYTES:
        raise FrameEncodeError(
            f"{rows} rows make a frame of {end} bytes, at most {MAX_FRAME_BYTES} are allowed",
            where=where,
            remedy="split the rows with encode_row_frames",
        )


def encode_row_frames(
    block: RowBlock, options: EncodeOptions, *, step: int, out: bytearray | memoryview | None = None
) -> Iterator[EncodedFrame]:
    """Yield as many frames of similar size as the rows need; raises like `encode_rows`.

    Each frame uses new buffers, or all reuse `out`: consume a frame before requesting the next one.
    """
    limit = rows_per_frame(block.schema, len(block.columns), options.encoding)
    rows = -(-len(block) // -(-len(block) // limit))
    for at in range(0, len(block), rows):
        yield encode_rows(block[at : at + rows], options, step=step, out=out)


def take_rows(frame: Frame, keep: npt.NDArray[np.bool_]) -> EncodedFrame:
    """Return a frame with the encoded rows of `frame` (parsed with its tail) selected by `keep` (bool [rows]).

    `keep` must select at least one row. Nothing is decoded: scales, biases, codes, state and exceptional rows are
    copied; encoding, exponent and step are unchanged, so these rows restore bit for bit as from `frame`.
    Raises `CorruptObject` like `Frame.row_ids`.
    """
    info, table = frame.info, frame.table
    if table is None or keep.shape != (info.rows,) or not keep.any():
        raise InternalBug(f"take_rows with {keep.shape} of {info.rows} rows")
    if (info.tail is not None) != bool(frame.fields):
        raise InternalBug("take_rows of a frame without its tail")
    kept = frame.row_ids()[keep]
    n, width = len(kept), info.col_stop - info.col_start
    ids_kind, id_bytes = row_id.encode_ids(kept)
    columns, span = (info.col_start, info.col_stop), (int(kept[0]), int(kept[-1]))
    tail, tail_data = _take_state(frame, keep, columns, span) if frame.fields else (None, None)
    meta = _rows_meta(table, columns, span, tail)
    sections = [_select_rows(data, info.rows, keep) for data in (frame.scales, frame.biases, frame.codes)]
    exceptions = b""
    if len(frame.exceptions):
        positions, values = read_exceptions(np.frombuffer(frame.exceptions, np.uint8), info.rows, width)
        mine = keep[positions]
        exceptions = write_exceptions((np.cumsum(keep) - 1)[positions[mine]], values[mine])
    view = _filled([memoryview(meta), memoryview(id_bytes), *sections, memoryview(exceptions)])
    if len(view) > MAX_FRAME_BYTES:
        raise InternalBug(f"fewer rows make a larger frame: {len(view)} bytes of {info.length}")
    digest = _seal(
        view, kind=info.kind, encoding=ENCODINGS[info.encoding].code if info.encoding else 0, ids_kind=ids_kind,
        exponent=frame.exponent, meta=len(meta), ids=len(id_bytes), exceptions=len(exceptions), rows=n,
        step=info.step,
    )  # fmt: skip
    moved = replace(
        info, length=len(view), digest=digest, row_min=span[0], row_max=span[1], rows=n, tail=tail
    )
    return EncodedFrame(info=moved, data=view, tail=tail_data, raw_bytes=raw_bytes_of(moved, table))


def _take_state(
    frame: Frame, keep: npt.NDArray[np.bool_], columns: tuple[int, int], span: tuple[int, int]
) -> tuple[TailInfo, memoryview]:
    assert frame.table is not None
    meta = _tail_meta(frame.table, [section.stored_dtype for section in frame.fields], columns, span)
    sections = [_select_rows(section.data, frame.info.rows, keep) for section in frame.fields]
    view = _filled([memoryview(meta), *sections])
    return _seal_tail(view, len(meta), int(keep.sum()), frame.info.step), view


def _select_rows(section: memoryview, rows: int, keep: npt.NDArray[np.bool_]) -> memoryview:
    return memoryview(np.frombuffer(section, np.uint8).reshape(rows, -1)[keep].reshape(-1).data)


def _filled(sections: list[memoryview]) -> memoryview:
    """Return a new frame buffer with these sections, without header."""
    layout = _Layout([len(section) for section in sections])
    view = memoryview(np.empty(layout.end, np.uint8).data)
    for part, data in zip(layout.views(view), sections, strict=True):
        part[:] = data
    layout.clear_padding(view)
    return view


def raw_bytes_of(info: FrameInfo, table: TableSchema) -> int:
    """Return the bytes of a row frame's rows and fields before encoding."""
    return info.rows * raw_row_bytes(table, info.col_stop - info.col_start)


def encode_blob(
    *,
    name: str,
    offset: int,
    blob_bytes: int,
    chunk: bytes | bytearray | memoryview,
    step: int,
    out: bytearray | memoryview | None = None,
) -> EncodedFrame:
    """Encode bytes [offset, offset + len(chunk)) of a blob of `blob_bytes` as a frame; raises `FrameEncodeError`.

    An empty blob is one frame with an empty chunk.
    """
    data = memoryview(chunk).cast("B")
    encoded_name = name.encode()
    if not 0 < len(encoded_name) <= MAX_NAME_BYTES:
        raise FrameEncodeError(f"a blob's name of {len(encoded_name)} bytes", where=name[:80])
    if not 0 <= offset <= offset + len(data) <= blob_bytes <= MAX_BLOB_BYTES:
        raise FrameEncodeError(f"chunk [{offset}, +{len(data)}) of a blob of {blob_bytes} bytes", where=name)
    meta = struct.pack("<H", len(encoded_name)) + encoded_name + BLOB_META.pack(offset, blob_bytes, len(data))
    layout = _Layout([len(meta), len(data)])
    if layout.end > MAX_FRAME_BYTES:
        raise FrameEncodeError(
            f"a chunk of {len(data)} bytes", where=name, remedy=f"use chunks of {BLOB_CHUNK_BYTES} bytes"
        )
    view = _frame_buffer(out, layout.end, layout.end, name)[: layout.end]
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
    """Yield the frames of a whole blob, each in a new buffer."""
    view = memoryview(data).cast("B")
    for at in range(0, max(len(view), 1), chunk_bytes):
        chunk = view[at : at + chunk_bytes]
        yield encode_blob(name=name, offset=at, blob_bytes=len(view), chunk=chunk, step=step)


class _Layout:
    """Offsets of consecutive aligned sections of given sizes, after the header."""

    def __init__(self, sizes: list[int]) -> None:
        self.spans: list[tuple[int, int]] = []
        self.end = HEADER_BYTES
        for size in sizes:
            self.spans.append((self.end, self.end + size))
            self.end = aligned(self.end + size)

    def views(self, buffer: memoryview) -> list[memoryview]:
        return [buffer[start:stop] for start, stop in self.spans]

    def clear_padding(self, buffer: memoryview) -> None:
        for _, stop in self.spans:
            if stop % ALIGN:
                end = aligned(stop)
                buffer[stop:end] = bytes(end - stop)


def _frame_buffer(out: bytearray | memoryview | None, wanted: int, needed: int, where: str) -> memoryview:
    if out is None:
        return memoryview(np.empty(wanted, np.uint8).data)
    view = memoryview(out).cast("B")
    if len(view) < needed or view.readonly:
        raise FrameEncodeError(
            f"{len(view)} bytes for a frame of {needed}", where=where, remedy="use frame_bound for the size"
        )
    return view


def _seal(  # noqa: PLR0913
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
    """Write the header and the hash of the frame. Returns the hash."""
    HEADER.pack_into(
        view, 0, MAGIC, VERSION, kind, encoding, ids_kind, exponent, 0, meta, ids, exceptions, rows,
        len(view), step, 0, bytes(16),
    )  # fmt: skip
    state = xxhash.xxh3_128(view[:DIGEST_AT])
    state.update(view[HEADER_BYTES:])
    digest = state.digest()
    view[DIGEST_AT:HEADER_BYTES] = digest
    return digest


def _seal_tail(view: memoryview, meta: int, rows: int, step: int) -> TailInfo:
    digest = _seal(view, kind=FrameKind.TAIL, meta=meta, rows=rows, step=step)
    return TailInfo(length=len(view), digest=digest)


def _meta_bound(table: TableSchema) -> int:
    names = 2 + len(table.fqn.encode()) + sum(4 + len(spec.name.encode()) for spec in table.fields)
    return names + TABLE_META.size + TAIL_META.size


def _table_meta(table: TableSchema, columns: tuple[int, int], rows: tuple[int, int]) -> bytes:
    fqn = table.fqn.encode()
    if not 0 < len(fqn) <= MAX_NAME_BYTES or len(table.fields) > 255 or table.rows > MAX_TABLE_ROWS:
        raise FrameEncodeError(
            "a table's name, number of fields or rows exceed the format's limits", where=table.fqn[:80]
        )
    dtype = element_type.by_name(table.dtype).code
    return (
        struct.pack("<H", len(fqn)) + fqn + TABLE_META.pack(table.rows, table.columns, dtype, *columns, *rows)
    )


def _rows_meta(
    table: TableSchema, columns: tuple[int, int], rows: tuple[int, int], tail: TailInfo | None
) -> bytes:
    """Meta section of rows and tombstones."""
    named = TAIL_META.pack(0, bytes(16)) if tail is None else TAIL_META.pack(tail.length, tail.digest)
    return _table_meta(table, columns, rows) + named


def _tail_meta(
    table: TableSchema, stored: list[str], columns: tuple[int, int], rows: tuple[int, int]
) -> bytes:
    pieces = [_table_meta(table, columns, rows), bytes((len(table.fields),))]
    for spec, dtype in zip(table.fields, stored, strict=True):
        name = spec.name.encode()
        if not 0 < len(name) < 256:
            raise FrameEncodeError(
                "a field's name must have 1 to 255 bytes", where=f"{table.fqn}.{spec.name[:80]}"
            )
        codes = (
            spec.kind == "pointwise",
            element_type.by_name(spec.dtype).code,
            element_type.by_name(dtype).code,
        )
        pieces.append(struct.pack("<B", len(name)) + name + bytes(codes))
    return b"".join(pieces)
