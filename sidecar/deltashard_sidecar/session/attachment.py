"""Who attached: what a trainer process said of itself at Attach, checked, and never changed afterwards. Pure."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.index import box_of, table_of
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL
from deltashard_proto.v1 import trainer_pb2 as pb

_LAYOUT = re.compile(r"[0-9a-f]{32}", re.ASCII)


class BadAttach(UserError):
    """An Attach that cannot be served: protocol, ranks or tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One attachment of a trainer process, under its session's id."""

    id: str
    protocol: int
    rank: int
    local_rank: int
    world_size: int
    pid: int
    tables: tuple[TableSchema, ...]
    boxes: tuple[Box, ...]
    fingerprint: dict[str, str]
    layout: str = ""
    """Digest of the layout of the attempt it trains under; empty: none, or not opened yet."""

    @classmethod
    def of(cls, request: pb.AttachRequest) -> Attachment:
        """Attachment of a request that `check_attach` let pass, under a new id."""
        return cls(
            id=secrets.token_hex(8),
            protocol=TRAINER_PROTOCOL.common(request.protocol_min, request.protocol_max) or 0,
            rank=request.rank,
            local_rank=request.local_rank,
            world_size=max(1, request.world_size),
            pid=request.pid,
            tables=tuple(table_of(table) for table in request.tables),
            boxes=tuple(box_of(box) for box in request.boxes),
            fingerprint=dict(request.fingerprint),
            layout=request.layout,
        )


def check_attach(request: pb.AttachRequest, lines: int) -> int:
    """The protocol version both sides speak; raises `BadAttach` for what cannot be served."""
    protocol = TRAINER_PROTOCOL.common(request.protocol_min, request.protocol_max)
    if protocol is None:
        raise BadAttach(
            f"no protocol in common: the trainer speaks {request.protocol_min}-{request.protocol_max}, "
            f"this sidecar {TRAINER_PROTOCOL.least}-{TRAINER_PROTOCOL.most}",
            where="attach",
            remedy="use trainer library and sidecar image of neighbouring versions",
        )
    if request.local_rank >= lines:
        raise BadAttach(f"local rank {request.local_rank}: at most {lines} trainers a pod", where="attach")
    if request.rank >= max(1, request.world_size):
        raise BadAttach(f"rank {request.rank} of world size {request.world_size}", where="attach")
    if request.layout and _LAYOUT.fullmatch(request.layout) is None:
        raise BadAttach(f"{request.layout[:80]!r} is no layout's digest", where="attach")
    named = {table.fqn: table for table in request.tables}
    if len(named) != len(request.tables):
        raise BadAttach("two tables have one name", where="attach")
    for box in request.boxes:
        table = named.get(box.table)
        if (
            table is None
            or not box.row_start < box.row_stop <= table.rows
            or not box.col_start < box.col_stop <= table.columns
        ):
            raise BadAttach(f"box {box.table}[{box.row_start}:{box.row_stop}] is in no table", where="attach")
    return protocol
