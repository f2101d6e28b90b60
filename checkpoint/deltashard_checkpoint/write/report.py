"""The report of one rank's part of a snapshot: an object from which the commit of all ranks' parts is built.

The name (`ReportName`) carries everything that must agree or be summed: rank, step, layout, covers, rows, bytes, stall,
and the hashes of the index and of the report. The bytes (`ReportBody`) carry schemas and encodings, and for rank 0 the
time of the snapshot, directive, metadata and pins. Except for rank 0's they do not change between snapshots, so bodies
are cached by hash (`ReportBodyCache`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltashard_checkpoint.errors import ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, load
from deltashard_checkpoint.format.object_key import TOKEN_PATTERN, parse_index_key
from deltashard_checkpoint.format.record_codec import (
    BOOLEAN,
    MAPPING,
    NUMBER,
    TEXT,
    TEXTS,
    document,
    values,
)
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.log.entry_codec import BOXES, ENCODINGS, TABLES

FORMAT = 1
_BODY = {
    "tables": TABLES,
    "encodings": ENCODINGS,
    "boxes": BOXES,
    "snapshot_at_s": NUMBER,
    "directive": TEXT,
    "fingerprint": MAPPING,
    "metadata": MAPPING,
    "pins": TEXTS,
    "blobs": BOOLEAN,
}
_CACHED_BODIES = 1 << 14
_NUMBER = "(0|[1-9][0-9]{0,18})"
_NAME = re.compile(
    rf"([0-9]{{5}})-({TOKEN_PATTERN})-{_NUMBER}-([0-9a-f]{{32}}|x)-({_NUMBER}|x)-"
    rf"{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}-([0-9a-f]{{32}})-([0-9a-f]{{32}})\.part",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """Contribution of one rank's part to the entry."""

    part: Part
    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    rows: int
    raw_bytes: int
    stall_s: float
    snapshot_at_s: float = 0.0
    """Rank 0's value is used; likewise for directive, fingerprint, and metadata that differs between ranks."""
    directive: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    common_blobs: bool = True
    """Whether the part may hold blobs for all ranks; if not, other ranks do not read its index for blobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBody:
    """Contents of a report."""

    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    boxes: tuple[Box, ...]
    """Empty with a layout, which holds the boxes."""
    snapshot_at_s: float
    directive: str
    fingerprint: Mapping[str, str]
    metadata: Mapping[str, str]
    pins: tuple[str, ...]
    blobs: bool
    """Whether the part may hold blobs for all ranks."""

    @classmethod
    def of(cls, report: PartReport, *, layout: str) -> ReportBody:
        first = report.part.rank == 0
        return cls(
            tables=report.tables,
            encodings=report.encodings,
            boxes=() if layout else report.part.boxes,
            snapshot_at_s=report.snapshot_at_s if first else 0,
            directive=report.directive if first else "",
            fingerprint=report.fingerprint if first else {},
            metadata=report.metadata,
            pins=report.pins,
            blobs=report.common_blobs,
        )

    def encode(self, run: str, world_size: int) -> bytes:
        whose = {"format": FORMAT, "run": run, "world_size": world_size}
        return canonical(whose | document(self, _BODY))

    @classmethod
    def decode(cls, data: bytes, run: str, world_size: int, *, where: str) -> ReportBody:
        """Raises `CorruptObject`, `UnsupportedVersion`, and `ForeignObject` for another run or world size."""
        r = Reader(load(data, where), where)
        if r.integer("format") != FORMAT:
            raise UnsupportedVersion("report of another format", where=where, remedy="upgrade deltashard")
        if (found := (r.text("run"), r.integer("world_size"))) != (run, world_size):
            raise ForeignObject(f"the report belongs to {found}", where=where)
        body = cls(**values(r, _BODY))
        r.end()
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportName:
    """Name of a report under its snapshot's `part/`."""

    rank: int
    token: str
    step: int
    layout: str
    """Digest of the layout; empty if there is none."""
    covers: int | None
    rows: int
    raw_bytes: int
    stored_bytes: int
    stall_us: int
    xxh3: str
    """Hash of the index."""
    body: str
    """First 32 hexadecimal digits of the SHA-256 of the report."""

    @classmethod
    def of(cls, report: PartReport, *, step: int, layout: str, body: str) -> ReportName:
        part, index = report.part, parse_index_key(report.part.index_key)
        return cls(
            rank=part.rank,
            token=index.token,
            step=step,
            layout=layout,
            covers=part.covers,
            rows=report.rows,
            raw_bytes=report.raw_bytes,
            stored_bytes=part.stored_bytes,
            stall_us=round(report.stall_s * 1e6),
            xxh3=index.xxh3,
            body=body,
        )

    @property
    def text(self) -> str:
        covers = "x" if self.covers is None else self.covers
        return (
            f"{self.rank:05d}-{self.token}-{self.step}-{self.layout or 'x'}-{covers}-"
            f"{self.rows}-{self.raw_bytes}-{self.stored_bytes}-{self.stall_us}-{self.xxh3}-{self.body}.part"
        )


def parse_report_name(text: str) -> ReportName | None:
    """Parse a report's name; None for any other name."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    rank, token, step, layout, covers, _, rows, raw_bytes, stored_bytes, stall_us, xxh3, body = match.groups()
    return ReportName(
        rank=int(rank),
        token=token,
        step=int(step),
        layout="" if layout == "x" else layout,
        covers=None if covers == "x" else int(covers),
        rows=int(rows),
        raw_bytes=int(raw_bytes),
        stored_bytes=int(stored_bytes),
        stall_us=int(stall_us),
        xxh3=xxh3,
        body=body,
    )


class ReportBodyCache:
    """Cache of report bodies read by this process, by hash, for all snapshots of one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: dict[str, ReportBody] = {}

    def get(self, digest: str) -> ReportBody | None:
        with self._lock:
            return self._bodies.get(digest)

    def put(self, digest: str, body: ReportBody) -> None:
        """Add a body; the oldest is evicted when the cache is full."""
        with self._lock:
            self._bodies[digest] = body
            while len(self._bodies) > _CACHED_BODIES:
                del self._bodies[next(iter(self._bodies))]
