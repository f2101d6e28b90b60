"""Validation of a trainer's batch descriptors against block, table and the trainer's boxes. Pure.

A descriptor comes from another process: every number in it is bounded here before it becomes an address. A bad
descriptor fails its save (`BadBatch`) and affects no other save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_proto.arena_layout import MAX_FRAME_BYTES, sections
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

Array = npt.NDArray[np.generic]


class BadBatch(UserError):
    """A batch descriptor does not fit its block, its table or its blob."""

    cause = Cause.INVALID


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Layout of a batch of rows of one table shard."""

    schema: TableSchema
    rows: int
    row_start: int | None
    """First row of a contiguous batch; None: the batch lists its ids."""
    col_start: int
    col_stop: int
    within: tuple[range, ...]
    """Row ranges of the trainer's boxes with these columns; ids must be in one of them."""
    offsets: tuple[int, ...]
    """Offsets of ids, weights and each field, in bytes from the start of the batch."""
    length: int
    fresh: bool | None = None
    """Whether the rows changed since the trainer's newest commit; None: unknown."""
    duplicate: bool = False
    """Whether other batches contain all of these rows as well."""

    def block(self, data: memoryview) -> RowBlock:
        """Return the rows as views of `data`, the bytes of the whole batch; raises `BadBatch` for ids in no box."""
        rows, width = self.rows, self.col_stop - self.col_start
        start = self.row_start

        def array(dtype: str, position: int, shape: tuple[int, ...]) -> Array:
            carrier = element_type.by_name(dtype).carrier
            return np.frombuffer(data, carrier, math.prod(shape), self.offsets[position]).reshape(shape)

        ids: npt.NDArray[np.int64] | range
        if start is None:
            ids = np.frombuffer(data, np.int64, rows, self.offsets[0])
            if not any(int(ids[0]) in mine and int(ids[-1]) in mine for mine in self.within):
                raise BadBatch(
                    f"rows {ids[0]} to {ids[-1]} are not in any box of this trainer",
                    where=f"row batch of {self.schema.fqn}",
                )
        else:
            ids = range(start, start + rows)
        return RowBlock(
            schema=self.schema,
            ids=ids,
            weights=array(self.schema.dtype, 1, (rows, width)),
            fields={
                spec.name: array(spec.dtype, position, spec.shape(rows, width))
                for position, spec in enumerate(self.schema.fields, start=2)
            },
            columns=range(self.col_start, self.col_stop),
        )


def rows_of(
    descriptor: pb.RowBatch, tables: Sequence[TableSchema], boxes: Sequence[Box], block_bytes: int
) -> Rows:
    """Return the layout of a row batch, which must be in one of `boxes`; raises `BadBatch`."""
    d = descriptor
    if d.table >= len(tables):
        raise BadBatch(f"table {d.table} of {len(tables)}", where="row batch")
    schema = tables[d.table]
    within = tuple(
        range(box.row_start, box.row_stop)
        for box in boxes
        if box.table == schema.fqn and box.col_start <= d.col_start and d.col_stop <= box.col_stop
    )
    last, what = d.row_start + d.rows - 1, ""
    if not d.col_start < d.col_stop <= schema.columns:
        what = f"columns [{d.col_start}, {d.col_stop}) of {schema.columns}"
    elif (
        not 0 < d.rows <= min(schema.rows, block_bytes)
    ):  # a row has at least one byte, which bounds the products below
        what = f"{d.rows} rows of a table of {schema.rows}"
    elif d.duplicated and not d.fresh:
        what = "rows are sent again that did not change"
    elif d.contiguous and last >= schema.rows:
        what = f"rows from {d.row_start}, {d.rows} of them, of {schema.rows}"
    elif not within or (d.contiguous and not any(d.row_start in mine and last in mine for mine in within)):
        asked = f"columns [{d.col_start}, {d.col_stop})"
        what = f"rows from {d.row_start}, {d.rows} of them, {asked} are not in any box of this trainer"
    if what:
        raise BadBatch(what, where=f"row batch of {schema.fqn}")
    columns = d.col_stop - d.col_start
    values = [(schema.dtype, columns), *((spec.dtype, spec.values(columns)) for spec in schema.fields)]
    widths = [element_type.by_name(dtype).itemsize_bytes * count for dtype, count in values]
    offsets, length = sections(d.rows, contiguous=d.contiguous, row_bytes=widths)
    if d.offset % 64 or d.offset + length > block_bytes:
        what = f"[{d.offset}, {d.offset + length}) is outside a block of {block_bytes}"
        raise BadBatch(what, where=f"row batch of {schema.fqn}")
    return Rows(
        schema=schema,
        rows=d.rows,
        row_start=d.row_start if d.contiguous else None,
        col_start=d.col_start,
        col_stop=d.col_stop,
        within=within,
        offsets=tuple(offsets),
        length=length,
        fresh=d.fresh if d.HasField("fresh") else None,
        duplicate=d.duplicated,
    )


def check_blob(chunk: pb.BlobChunk, block_bytes: int) -> None:
    end, what = chunk.offset + chunk.length, ""
    if not 0 < len(chunk.name) <= 1024:
        what = "a blob's name has 1 to 1024 characters"
    elif chunk.length > MAX_FRAME_BYTES - 4096 or chunk.offset % 64 or end > block_bytes:
        what = f"[{chunk.offset}, {end}) is outside a block"
    elif chunk.blob_offset + chunk.length > chunk.blob_bytes or (chunk.length == 0 and chunk.blob_bytes > 0):
        what = f"{chunk.length} bytes at {chunk.blob_offset} of a blob of {chunk.blob_bytes}"
    if what:
        raise BadBatch(what, where=f"blob {chunk.name[:100]!r}")
