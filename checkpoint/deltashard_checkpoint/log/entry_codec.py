"""How entries of the log lie in the store: documents of canonical JSON, sealed by a hash.

`hash` is the SHA-256 of the document without `hash`; `previous` is the hash of the entry one slot before, so the log is
a chain and one changed byte anywhere is seen. `seal` makes bytes, `parse` reads them back and accepts *only* the
canonical form of a known kind: input is hostile until the hash fits, every bound is checked before anything is built,
and every refusal has a name (`CorruptObject`, `UnsupportedVersion`, `ForeignObject`). A kind this version does not know
is refused unless it says `ignorable`.

Newer is not corrupt: bytes whose hash fits are what somebody wrote. Whatever is unknown in them (a kind, a field, a
value out of its bounds) may be a newer version's word, so it is `UnsupportedVersion`: no attempt may leave it behind.

Parts and table schemas have documents of their own (`part_document`, `read_part`, ...), for the ranks' reports, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, get_args

from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion, UserError
from deltashard_checkpoint.format.canonical_json import Reader, canonical, load
from deltashard_checkpoint.format.object_key import cut_prefix, is_index_key
from deltashard_checkpoint.format.schema import Box, FieldKind, FieldSpec, TableSchema
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    Entry,
    Genesis,
    Ignored,
    Listed,
    Part,
    Pinned,
    Reclaimed,
    Repaired,
    Retired,
    Rewound,
    Sealed,
    cut_of,
    entry_key,
    in_order,
    is_prefix,
)

FORMAT = 1
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,128}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_WORD = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
"""Name of a dtype or of an encoding."""
_UPGRADE = "upgrade deltashard to the version that wrote it; if none did, see `deltashard repair`"

KINDS: dict[str, type[Entry]] = {
    "genesis": Genesis,
    "attempt": AttemptOpened,
    "checkpoint": Checkpoint,
    "compact": Compacted,
    "retire": Retired,
    "reclaim": Reclaimed,
    "repair": Repaired,
    "pin": Pinned,
    "rewind": Rewound,
}


# Writing


def document_of(entry: Entry) -> dict[str, Any]:
    """The JSON document of an entry, without its hash."""
    kind = next(name for name, cls in KINDS.items() if type(entry) is cls)
    doc: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
        "seq": entry.seq,
        "previous": entry.previous,
        "writer": entry.writer,
        "at_s": entry.at_s,
    }
    match entry:
        case Genesis():
            doc |= {"run": entry.run, "owner": entry.owner}
        case AttemptOpened():
            doc |= {
                "world_size": entry.world_size,
                "resumes_from": entry.resumes_from,
                "owner": entry.owner,
                "takeover": entry.takeover,
                "voids": entry.voids,
            }
            doc |= {name: text for name in ("workload", "pod", "layout") if (text := getattr(entry, name))}
        case Checkpoint():
            doc |= {
                "attempt": entry.attempt,
                "cut": entry.cut,
                "step": entry.step,
                **_parts_document(entry),
                "tables": [table_document(t) for t in entry.tables],
                "encodings": encodings_document(entry.encodings),
                "rows": entry.rows,
                "raw_bytes": entry.raw_bytes,
                "stored_bytes": entry.stored_bytes,
                "stall_s": entry.stall_s,
                "cut_at_s": entry.cut_at_s,
                "directive": entry.directive,
                "fingerprint": dict(entry.fingerprint),
                "metadata": dict(entry.metadata),
                "pins": list(entry.pins),
            }
        case Compacted():
            doc |= {
                "replaces": entry.replaces,
                "parts": [part_document(p) for p in entry.parts],
                "encodings": encodings_document(entry.encodings),
                "rows": entry.rows,
                "stored_bytes": entry.stored_bytes,
            }
        case Retired():
            doc |= {"checkpoints": list(entry.checkpoints), "prefixes": list(entry.prefixes)}
        case Pinned():
            doc |= {"name": entry.name, "checkpoint": entry.checkpoint}
        case Rewound():
            doc |= {"to": entry.to}
        case Reclaimed():
            doc |= {"ignorable": True, "through": entry.through}
        case Repaired():
            doc |= {"ignorable": True, "lost": list(entry.lost)}
    return doc


def _parts_document(entry: Checkpoint) -> dict[str, Any]:
    if entry.listed is None:
        return {"parts": [part_document(p) for p in entry.parts]}
    return {
        "layout": entry.listed.layout,
        "world_size": entry.listed.world_size,
        "manifest": entry.listed.manifest,
        "covers": list(entry.listed.covers),
    }


def part_document(part: Part) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "index_key": part.index_key,
        "boxes": [box_document(box) for box in part.boxes],
        "stored_bytes": part.stored_bytes,
        "covers": part.covers,
    }


def box_document(box: Box) -> list[Any]:
    return [box.table, box.row_start, box.row_stop, box.col_start, box.col_stop]


def table_document(table: TableSchema) -> dict[str, Any]:
    return {
        "fqn": table.fqn,
        "rows": table.rows,
        "columns": table.columns,
        "dtype": table.dtype,
        "fields": [[f.name, f.kind, f.dtype] for f in table.fields],
    }


def encodings_document(encodings: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    return {table: list(names) for table, names in encodings.items()}


def seal(entry: Entry) -> Sealed:
    """Bytes and hash of an entry.

    The document is read back strictly before anything is written: an entry that this version would refuse to read
    must never take a slot. Raises what `parse` raises.
    """
    document = document_of(entry)
    digest = hashlib.sha256(canonical(document)).hexdigest()
    data = canonical({**document, "hash": digest})
    return parse(data, entry.seq)


# Reading


def parse(data: bytes, seq: int) -> Sealed:
    """The entry stored at slot `seq`.

    Raises `CorruptObject` (not canonical JSON, or the hash is wrong), `UnsupportedVersion` (the hash is right, and the
    format, the kind, a field or a value is none this version knows) and `ForeignObject` (an entry of another slot).
    """
    where = entry_key(seq)
    document = load(data, where)
    reader = Reader(document, where)
    digest = reader.text("hash", _HASH)
    body = {key: value for key, value in document.items() if key != "hash"}
    if hashlib.sha256(canonical(body)).hexdigest() != digest:
        raise CorruptObject("log entry does not match its own hash", where=where)
    # IMPORTANT: from here on nothing is rot. An entry called corrupt is left behind by the next attempt, and with it
    # every commit of the newer version that wrote it.
    try:
        entry = _entry(reader, document, seq)
    except CorruptObject as error:
        raise UnsupportedVersion(
            f"log entry is whole, but says what this version does not know: {error.what}",
            where=where,
            remedy=_UPGRADE,
        ) from error
    return Sealed(entry=entry, data=data, hash=digest)


def _entry(reader: Reader, document: dict[str, Any], seq: int) -> Entry:
    where = reader.where
    version = reader.integer("format", low=1)
    if version != FORMAT:
        raise UnsupportedVersion(
            f"log entry has format {version}, this library reads {FORMAT}",
            where=where,
            remedy=_UPGRADE,
        )
    if reader.integer("seq") != seq:
        raise ForeignObject(f"entry says it is slot {document['seq']}", where=where)
    kind = reader.text("kind")
    common: dict[str, Any] = {
        "seq": seq,
        "previous": reader.text("previous", None if seq == 0 else _HASH),
        "writer": reader.text("writer", _TOKEN),
        "at_s": reader.number("at_s"),
    }
    if seq == 0 and common["previous"]:
        raise CorruptObject("slot 0 has no previous entry", where=where)
    if kind not in KINDS:
        if reader.optional("ignorable") is not True:
            raise UnsupportedVersion(f"log entry of unknown kind {kind[:40]!r}", where=where, remedy=_UPGRADE)
        return Ignored(kind=kind, **common)
    entry = _ENTRIES[kind](reader, common)
    reader.end()
    return entry


def read_part(document: Any, where: str) -> Part:
    """A part from its JSON document; raises `CorruptObject`."""
    r = Reader(document, where)
    index_key = r.text("index_key")
    if not is_index_key(index_key):
        r.fail("index_key is no index's name")
    part = Part(
        rank=r.integer("rank"),
        index_key=index_key,
        boxes=tuple(read_box(r, item) for item in r.items("boxes")),
        stored_bytes=r.integer("stored_bytes"),
        covers=r.nullable("covers"),
    )
    r.end()
    return part


def read_box(r: Reader, item: Any) -> Box:
    """A box from its JSON form; raises `CorruptObject`."""
    table, *numbers = r.as_list(item, "box", 5)
    row_start, row_stop, col_start, col_stop = (r.as_integer(n, "box") for n in numbers)
    if row_start >= row_stop or col_start >= col_stop:
        r.fail("box is empty or reversed")
    return Box(
        table=r.as_text(table, "box"),
        row_start=row_start,
        row_stop=row_stop,
        col_start=col_start,
        col_stop=col_stop,
    )


def read_table(document: Any, where: str) -> TableSchema:
    """A table schema from its JSON document; raises `CorruptObject`."""
    r = Reader(document, where)
    fields = []
    for item in r.items("fields"):
        name, kind, dtype = r.as_list(item, "field", 3)
        if kind not in get_args(FieldKind):
            r.fail("field kind is unknown")
        fields.append(
            FieldSpec(name=r.as_text(name, "field"), kind=kind, dtype=r.as_text(dtype, "dtype", _WORD))
        )
    table = TableSchema(
        fqn=r.text("fqn"),
        rows=r.integer("rows"),
        columns=r.integer("columns"),
        dtype=r.text("dtype", _WORD),
        fields=tuple(fields),
    )
    r.end()
    return table


def read_encodings(r: Reader) -> dict[str, tuple[str, ...]]:
    """The encodings by table that a document says; raises `CorruptObject`."""
    found = {}
    for table, names in r.members("encodings"):
        held = tuple(r.as_text(name, "encodings", _WORD) for name in r.as_list(names, "encodings"))
        if not held or list(held) != sorted(set(held)):
            r.fail("encodings of a table are none, or not distinct and in order")
        found[table] = held
    return found


def _read_parts(r: Reader, *, ranks: bool) -> tuple[Part, ...]:
    parts = tuple(read_part(item, r.where) for item in r.items("parts"))
    if not parts:
        r.fail("no parts")
    if ranks and [p.rank for p in parts] != list(range(len(parts))):
        r.fail("parts are not one per rank, in order")
    return parts


def _genesis(r: Reader, common: dict[str, Any]) -> Entry:
    if common["seq"] != 0:
        r.fail("genesis is slot 0's")
    return Genesis(run=r.text("run"), owner=r.text("owner"), **common)


def _attempt(r: Reader, common: dict[str, Any]) -> Entry:
    return AttemptOpened(
        world_size=r.integer("world_size", low=1),
        resumes_from=r.nullable("resumes_from"),
        owner=r.text("owner"),
        takeover=r.boolean("takeover"),
        voids=r.nullable("voids"),
        workload=r.text("workload") if r.has("workload") else "",
        pod=r.text("pod") if r.has("pod") else "",
        layout=r.text("layout", _DIGEST) if r.has("layout") else "",
        **common,
    )


def _listed(r: Reader) -> Listed | None:
    """What an entry says of parts that a manifest lists; None: it has them itself."""
    if not r.has("manifest"):
        return None
    covers = tuple(None if c is None else r.as_integer(c, "covers") for c in r.items("covers"))
    if not covers or covers != in_order(covers):
        r.fail("covers are not distinct and in order")
    return Listed(
        layout=r.text("layout", _DIGEST),
        world_size=r.integer("world_size", low=1),
        manifest=r.text("manifest", _DIGEST),
        covers=covers,
    )


def _checkpoint(r: Reader, common: dict[str, Any]) -> Entry:
    listed = _listed(r)
    entry = Checkpoint(
        attempt=r.integer("attempt"),
        cut=r.integer("cut"),
        step=r.integer("step"),
        parts=() if listed else _read_parts(r, ranks=True),
        listed=listed,
        tables=tuple(read_table(item, r.where) for item in r.items("tables")),
        encodings=read_encodings(r),
        rows=r.integer("rows"),
        raw_bytes=r.integer("raw_bytes"),
        stored_bytes=r.integer("stored_bytes"),
        stall_s=r.number("stall_s"),
        cut_at_s=r.number("cut_at_s"),
        directive=r.text("directive"),
        fingerprint=r.mapping("fingerprint"),
        metadata=r.mapping("metadata"),
        pins=r.texts("pins"),
        **common,
    )
    try:
        prefix = cut_prefix(entry.attempt, entry.cut)
    except UserError as error:
        r.fail(error.what)
    if any(part.prefix != prefix for part in entry.parts):
        raise ForeignObject("checkpoint names an index of another attempt or cut", where=r.where)
    if len({table.fqn for table in entry.tables}) != len(entry.tables):
        r.fail("a table occurs twice")
    return entry


def _compact(r: Reader, common: dict[str, Any]) -> Entry:
    entry = Compacted(
        replaces=r.integer("replaces"),
        parts=_read_parts(r, ranks=False),
        encodings=read_encodings(r),
        rows=r.integer("rows"),
        stored_bytes=r.integer("stored_bytes"),
        **common,
    )
    if any(part.covers is not None for part in entry.parts):
        r.fail("a compaction's parts cover nothing")
    if any(cut_of(part.prefix) is not None for part in entry.parts):
        raise ForeignObject("compaction names an index of a cut", where=r.where)
    return entry


def _retire(r: Reader, common: dict[str, Any]) -> Entry:
    entry = Retired(
        checkpoints=tuple(r.as_integer(n, "checkpoints") for n in r.items("checkpoints")),
        prefixes=r.texts("prefixes"),
        **common,
    )
    if not all(is_prefix(p) for p in entry.prefixes):
        r.fail("a prefix is neither a cut's nor a compaction's")
    return entry


def _reclaim(r: Reader, common: dict[str, Any]) -> Entry:
    if not r.boolean("ignorable"):
        r.fail("reclaim is ignorable")
    return Reclaimed(through=r.integer("through"), **common)


def _repair(r: Reader, common: dict[str, Any]) -> Entry:
    if not r.boolean("ignorable"):
        r.fail("repair is ignorable")
    return Repaired(lost=tuple(r.as_integer(n, "lost") for n in r.items("lost")), **common)


def _pin(r: Reader, common: dict[str, Any]) -> Entry:
    name = r.text("name")
    if not name:
        r.fail("a pin has a name")
    return Pinned(name=name, checkpoint=r.nullable("checkpoint"), **common)


def _rewind(r: Reader, common: dict[str, Any]) -> Entry:
    return Rewound(to=r.integer("to"), **common)


_ENTRIES = {
    "genesis": _genesis,
    "attempt": _attempt,
    "checkpoint": _checkpoint,
    "compact": _compact,
    "retire": _retire,
    "reclaim": _reclaim,
    "repair": _repair,
    "pin": _pin,
    "rewind": _rewind,
}
