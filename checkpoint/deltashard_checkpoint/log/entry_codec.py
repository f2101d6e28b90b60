"""The stored form of log entries: canonical JSON documents that contain their own hash.

`hash` is the SHA-256 of the document without `hash`; `previous` is the hash of the entry in the previous slot. So the
log is a hash chain, and one changed byte anywhere is detected. `seal` encodes an entry. `parse` accepts *only* the
canonical form of a known kind: input is untrusted until the hash matches, every bound is checked before allocation,
and every rejection is a specific error (`CorruptObject`, `UnsupportedVersion`, `ForeignObject`). An unknown kind is
rejected unless it is `ignorable`.

Newer is not corrupt: bytes with a matching hash are as written. An unknown kind, field or value may be of a newer
version, so it is `UnsupportedVersion`, and no attempt may void it.

Parts, table schemas and boxes have separate codecs (`TABLES`, `BOXES`, ...), which the ranks' reports use, too.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar, get_args

from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion, UserError
from deltashard_checkpoint.format.canonical_json import Reader, canonical, load
from deltashard_checkpoint.format.object_key import is_index_key, snapshot_prefix
from deltashard_checkpoint.format.record_codec import (
    BOOLEAN,
    COUNT,
    INTEGER,
    INTEGERS,
    MAPPING,
    NULLABLE,
    NUMBER,
    TEXT,
    TEXTS,
    Field,
    Fields,
    document,
    list_of,
    text,
    values,
)
from deltashard_checkpoint.format.schema import Box, FieldKind, FieldSpec, TableSchema
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    Entry,
    Genesis,
    Ignored,
    ManifestRef,
    Part,
    Pinned,
    Reclaimed,
    Repaired,
    Retired,
    Rewound,
    Sealed,
    entry_key,
    is_prefix,
    snapshot_of,
    sorted_covers,
)

FORMAT = 1
R = TypeVar("R", Part, TableSchema)
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


# Records in entries


def _box_document(box: Box) -> list[Any]:
    return [box.table, box.row_start, box.row_stop, box.col_start, box.col_stop]


def _box(r: Reader, item: Any) -> Box:
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


def _field(r: Reader, item: Any) -> FieldSpec:
    name, kind, dtype = r.as_list(item, "field", 3)
    if kind not in get_args(FieldKind):
        r.fail("field kind is unknown")
    return FieldSpec(name=r.as_text(name, "field"), kind=kind, dtype=r.as_text(dtype, "dtype", _WORD))


def _index_key(r: Reader, key: str) -> str:
    found = r.text(key)
    if not is_index_key(found):
        r.fail("index_key is not the name of an index")
    return found


def _encodings(r: Reader, key: str) -> dict[str, tuple[str, ...]]:
    found = {}
    for table, names in r.members(key):
        held = tuple(r.as_text(name, key, _WORD) for name in r.as_list(names, key))
        if not held or list(held) != sorted(set(held)):
            r.fail("encodings of a table are empty, not distinct or not sorted")
        found[table] = held
    return found


def _covers(r: Reader, key: str) -> tuple[int | None, ...]:
    found = tuple(None if c is None else r.as_integer(c, key) for c in r.items(key))
    if not found or found != sorted_covers(found):
        r.fail("covers are not distinct and sorted")
    return found


BOXES = list_of(_box, _box_document)
_PART = {
    "rank": INTEGER,
    "index_key": Field(_index_key),
    "boxes": BOXES,
    "stored_bytes": INTEGER,
    "covers": NULLABLE,
}
_TABLE = {
    "fqn": TEXT,
    "rows": INTEGER,
    "columns": INTEGER,
    "dtype": text(_WORD),
    "fields": list_of(_field, lambda spec: [spec.name, spec.kind, spec.dtype]),
}


def _record(kind: type[R], fields: Fields) -> Field:

    def read(r: Reader, item: Any) -> R:
        inner = Reader(item, r.where)
        found = kind(**values(inner, fields))
        inner.end()
        return found

    return list_of(read, lambda record: document(record, fields))


PARTS = _record(Part, _PART)
TABLES = _record(TableSchema, _TABLE)
ENCODINGS = Field(_encodings, lambda held: {table: list(names) for table, names in held.items()})
_LISTED = {
    "layout": text(_DIGEST),
    "world_size": COUNT,
    "manifest": text(_DIGEST),
    "covers": Field(_covers, list),
}
_FIELDS: dict[type[Entry], Fields] = {
    Genesis: {"run": TEXT, "owner": TEXT},
    AttemptOpened: {
        "world_size": COUNT,
        "resumes_from": NULLABLE,
        "owner": TEXT,
        "takeover": BOOLEAN,
        "voids": NULLABLE,
        "workload": text(omit_empty=True),
        "pod": text(omit_empty=True),
        "layout": text(_DIGEST, omit_empty=True),
    },
    Checkpoint: {
        "attempt": INTEGER,
        "snapshot_id": INTEGER,
        "step": INTEGER,
        "tables": TABLES,
        "encodings": ENCODINGS,
        "rows": INTEGER,
        "raw_bytes": INTEGER,
        "stored_bytes": INTEGER,
        "stall_s": NUMBER,
        "snapshot_at_s": NUMBER,
        "directive": TEXT,
        "fingerprint": MAPPING,
        "metadata": MAPPING,
        "pins": TEXTS,
    },
    Compacted: {
        "replaces": INTEGER,
        "parts": PARTS,
        "encodings": ENCODINGS,
        "rows": INTEGER,
        "stored_bytes": INTEGER,
    },
    Retired: {"checkpoints": INTEGERS, "prefixes": TEXTS},
    Pinned: {"name": TEXT, "checkpoint": NULLABLE},
    Rewound: {"to": INTEGER},
    Reclaimed: {"through": INTEGER},
    Repaired: {"lost": INTEGERS},
}
_IGNORABLE = (Reclaimed, Repaired)


# Entries


def document_of(entry: Entry) -> dict[str, Any]:
    """Return the JSON document of an entry, without its hash."""
    doc: dict[str, Any] = {
        "format": FORMAT,
        "kind": next(name for name, cls in KINDS.items() if type(entry) is cls),
        "seq": entry.seq,
        "previous": entry.previous,
        "writer": entry.writer,
        "at_s": entry.at_s,
        **document(entry, _FIELDS[type(entry)]),
    }
    if isinstance(entry, _IGNORABLE):
        doc["ignorable"] = True
    if isinstance(entry, Checkpoint):
        doc |= (
            {"parts": PARTS.write(entry.parts)} if entry.listed is None else document(entry.listed, _LISTED)
        )
    return doc


def seal(entry: Entry) -> Sealed:
    """Encode an entry and compute its hash.

    The document is parsed strictly before anything is written: an entry that this version would reject must never
    take a slot. Raises the errors of `parse`.
    """
    document = document_of(entry)
    digest = hashlib.sha256(canonical(document)).hexdigest()
    data = canonical({**document, "hash": digest})
    return parse(data, entry.seq)


def parse(data: bytes, seq: int) -> Sealed:
    """Return the entry stored at slot `seq`.

    Raises `CorruptObject` (not canonical JSON, or a wrong hash), `UnsupportedVersion` (the hash is right, but the
    format, the kind, a field or a value is unknown) and `ForeignObject` (an entry of another slot).
    """
    where = entry_key(seq)
    document = load(data, where)
    reader = Reader(document, where)
    digest = reader.text("hash", _HASH)
    body = {key: value for key, value in document.items() if key != "hash"}
    if hashlib.sha256(canonical(body)).hexdigest() != digest:
        raise CorruptObject("log entry does not match its own hash", where=where)
    # IMPORTANT: from here on nothing is corrupt. The next attempt voids a corrupt entry, and with it every later commit
    # of the newer version that wrote it.
    try:
        entry = _entry(reader, document, seq)
    except CorruptObject as error:
        raise UnsupportedVersion(
            f"log entry is intact, but has content unknown to this version: {error.what}",
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
        raise ForeignObject(f"entry is of slot {document['seq']}", where=where)
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
    fields = values(reader, _FIELDS[KINDS[kind]])
    if KINDS[kind] is Checkpoint:
        # The parts are in the entry or in a manifest.
        fields |= (
            {"listed": ManifestRef(**values(reader, _LISTED))}
            if reader.has("manifest")
            else {"parts": PARTS.read(reader, "parts")}
        )
    if KINDS[kind] in _IGNORABLE and not reader.boolean("ignorable"):
        reader.fail(f"{kind} must be ignorable")
    entry = KINDS[kind](**fields, **common)
    reader.end()
    _check(reader, entry)
    return entry


def _check(r: Reader, entry: Entry) -> None:
    """Raise `CorruptObject` or `ForeignObject` for an entry that is invalid in any log."""
    match entry:
        case Genesis() if entry.seq != 0:
            r.fail("genesis must be in slot 0")
        case Checkpoint():
            try:
                prefix = snapshot_prefix(entry.attempt, entry.snapshot_id)
            except UserError as error:
                r.fail(error.what)
            ranks = [part.rank for part in entry.parts]
            if (entry.listed is None and not ranks) or ranks != list(range(len(ranks))):
                r.fail("parts are not one per rank, in order")
            if any(part.prefix != prefix for part in entry.parts):
                raise ForeignObject("checkpoint has an index of another attempt or snapshot", where=r.where)
            if len({table.fqn for table in entry.tables}) != len(entry.tables):
                r.fail("a table occurs twice")
        case Compacted():
            if not entry.parts or any(part.covers is not None for part in entry.parts):
                r.fail("a compaction must have parts, and they must cover nothing")
            if any(snapshot_of(part.prefix) is not None for part in entry.parts):
                raise ForeignObject("compaction references an index of a snapshot", where=r.where)
        case Retired() if not all(is_prefix(p) for p in entry.prefixes):
            r.fail("a prefix is neither a snapshot's nor a compaction's")
        case Pinned() if not entry.name:
            r.fail("a pin has no name")
