"""Can one whole cut be held at all? Pure arithmetic on what a trainer attaches with. Asked once, at Attach.

Whether one fits the arena without waiting is asked at every full cut (`raw_bytes`).

While the store is away, an encoded full cut lies in the arena and the cache directory. If it cannot fit there, no
baseline could ever be made to wait for the store; better to say so before the first step than after an outage.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltashard_checkpoint.codecs.encoding import effective_encoding, section_bytes
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.row_block import raw_row_bytes
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.vocabulary import encoding_named, stored_state_dtype
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.session.attachment import BadAttach
from deltashard_sidecar.settings import Settings


def encoded_bytes(request: pb.AttachRequest, *, encoding: str, state_encoding: str) -> int:
    """Bytes of one full cut of what the trainer owns, as stored (row ids and headers left out: they are small)."""
    tables = {table.fqn: table for table in request.tables}
    total = request.blob_bytes
    for box in request.boxes:
        table = tables[box.table]
        rows, columns = box.row_stop - box.row_start, box.col_stop - box.col_start
        stored = effective_encoding(encoding_named(encoding), table.dtype, columns)
        total += rows * sum(section_bytes(stored, 1, columns))
        for field in table.fields:
            dtype = stored_state_dtype(state_encoding, pointwise=field.pointwise, dtype=field.dtype)
            item = element_type.by_name(dtype).itemsize_bytes
            total += rows * item * (columns if field.pointwise else 1)
    return total


def raw_bytes(tables: Iterable[TableSchema], boxes: Iterable[Box]) -> int:
    """Bytes of all rows of these boxes as a trainer copies them into the arena."""
    schemas = {table.fqn: table for table in tables}
    total = 0
    for box in boxes:
        row_bytes = raw_row_bytes(schemas[box.table], box.col_stop - box.col_start)
        total += (box.row_stop - box.row_start) * row_bytes
    return total


def check_capacity(request: pb.AttachRequest, settings: Settings) -> None:
    """Raise `BadAttach` when arena and cache together cannot hold one encoded full cut."""
    need = encoded_bytes(request, encoding=settings.encoding, state_encoding=settings.state_encoding)
    have = settings.arena_bytes + settings.cache_bytes
    if need > have:
        raise BadAttach(
            f"one full checkpoint takes about {need} bytes encoded as {settings.encoding}; the arena "
            f"({settings.arena_bytes}) and the cache ({settings.cache_bytes}) hold {have}",
            where="capacity",
            remedy="give the cache more room (cache_bytes; on Kubernetes a CheckpointPolicy's cacheSize), or choose a "
            "smaller encoding",
        )
