"""Attachment of a trainer process: the validated, immutable content of its Attach. Pure.

While the store is unreachable, a full save must fit, encoded, into arena and cache. If it cannot, no baseline could
ever wait for the store; Attach rejects that before the first step, rather than failing in an outage.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from deltashard_checkpoint.codecs.encoding import effective_encoding, section_bytes
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.index import box_of, table_of
from deltashard_checkpoint.format.row_block import raw_row_bytes
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL, encoding_named, stored_state_dtype
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.settings import Settings

_LAYOUT = re.compile(r"[0-9a-f]{32}", re.ASCII)


class BadAttach(UserError):
    """The Attach cannot be served because of its protocol, ranks or tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One attachment of a trainer process, identified by its session's id."""

    id: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    tables: tuple[TableSchema, ...]
    boxes: tuple[Box, ...]
    fingerprint: dict[str, str]
    layout: str = ""
    """Digest of the layout of the trainer's attempt; empty: no layout, or no attempt yet."""

    @classmethod
    def of(cls, request: pb.AttachRequest) -> Attachment:
        """Return the attachment of a request that `check_attach` accepted, under a new id."""
        return cls(
            id=secrets.token_hex(8),
            rank=request.rank,
            local_rank=request.local_rank,
            world_size=max(1, request.world_size),
            pid=request.pid,
            tables=tuple(table_of(table) for table in request.tables),
            boxes=tuple(box_of(box) for box in request.boxes),
            fingerprint=dict(request.fingerprint),
            layout=request.layout,
        )

    @property
    def raw_bytes(self) -> int:
        schemas = {table.fqn: table for table in self.tables}
        return sum(
            (box.row_stop - box.row_start) * raw_row_bytes(schemas[box.table], box.col_stop - box.col_start)
            for box in self.boxes
        )


def check_attach(request: pb.AttachRequest, lines: int) -> int:
    """Return the newest protocol version that both sides support; raises `BadAttach` for an invalid request."""
    protocol = TRAINER_PROTOCOL.common(request.protocol_min, request.protocol_max)
    if protocol is None:
        raise BadAttach(
            f"no protocol in common: the trainer speaks {request.protocol_min}-{request.protocol_max}, "
            f"this sidecar {TRAINER_PROTOCOL.least}-{TRAINER_PROTOCOL.most}",
            where="attach",
            remedy="use trainer library and sidecar image of neighbouring versions",
        )
    named = {table.fqn: table for table in request.tables}
    what = ""
    if request.local_rank >= lines:
        what = f"local rank {request.local_rank}: at most {lines} trainers a pod"
    elif request.rank >= max(1, request.world_size):
        what = f"rank {request.rank} of world size {request.world_size}"
    elif request.layout and _LAYOUT.fullmatch(request.layout) is None:
        what = f"{request.layout[:80]!r} is not the digest of a layout"
    elif len(named) != len(request.tables):
        what = "two tables have one name"
    for box in request.boxes:
        table = named.get(box.table)
        if not what and (
            table is None
            or not box.row_start < box.row_stop <= table.rows
            or not box.col_start < box.col_stop <= table.columns
        ):
            what = f"box {box.table}[{box.row_start}:{box.row_stop}] is not within a listed table"
    if what:
        raise BadAttach(what, where="attach")
    return protocol


def encoded_bytes(request: pb.AttachRequest, *, encoding: str, state_encoding: str) -> int:
    """Return the stored bytes of all of the trainer's rows and blobs, without row ids and headers, which are small."""
    tables = {table.fqn: table for table in request.tables}
    total = request.blob_bytes
    for box in request.boxes:
        table, columns = tables[box.table], box.col_stop - box.col_start
        row_bytes = sum(
            section_bytes(effective_encoding(encoding_named(encoding), table.dtype, columns), 1, columns)
        )
        for field in table.fields:
            dtype = stored_state_dtype(state_encoding, pointwise=field.pointwise, dtype=field.dtype)
            row_bytes += element_type.by_name(dtype).itemsize_bytes * (columns if field.pointwise else 1)
        total += (box.row_stop - box.row_start) * row_bytes
    return total


def check_capacity(request: pb.AttachRequest, settings: Settings) -> None:
    need = encoded_bytes(request, encoding=settings.encoding, state_encoding=settings.state_encoding)
    if need > settings.arena_bytes + settings.cache_bytes:
        raise BadAttach(
            f"one full checkpoint takes about {need} bytes encoded as {settings.encoding}; the arena "
            f"({settings.arena_bytes}) and the cache ({settings.cache_bytes}) hold less",
            where="capacity",
            remedy="increase the cache (cache_bytes; on Kubernetes a CheckpointPolicy's cacheSize), or choose a "
            "smaller encoding",
        )
