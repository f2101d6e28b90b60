"""Entries of the commit log: what they say, and their one canonical form in bytes.

An entry is a frozen dataclass (`Genesis`, `AttemptOpened`, `Checkpoint`, `Compacted`, `Retired`, `Reclaimed`). Its
stored form is canonical JSON: sorted keys, no spaces, ASCII, finite numbers. `hash` is the SHA-256 of that document
without `hash`; `previous` is the hash of the entry one slot before, so the log is a chain and one changed byte anywhere
is seen.
`seal` makes bytes, `parse` reads them back and accepts *only* the canonical form of a known kind: input is hostile
until the hash fits, every bound is checked before anything is built, and every refusal has a name (`CorruptObject`,
`UnsupportedVersion`, `ForeignObject`). A kind this version does not know is refused unless it says `ignorable`.

Keys in entries are relative to the run's root. What an entry may say *given the entries before it* is the business
of `folds`; here an entry is only looked at by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast, get_args

from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.keys import TOKEN_PATTERN, cut_prefix, is_index_key
from deltashard_checkpoint.tables import Box, FieldKind, FieldSpec, TableSchema

FORMAT = 1
MAX_ENTRY_BYTES = 64 << 20
"""A larger object is no log entry; parsing stops before it costs memory."""
_MAX_INT = (1 << 63) - 1
_MAX_TEXT = 1 << 16
_ENTRY_NAME = re.compile(r"log/(\d{20})\.json", re.ASCII)
_PREFIX = re.compile(rf"data/(?:(\d{{20}})/(\d{{8}})|compact-{TOKEN_PATTERN})/", re.ASCII)
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,128}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DTYPE = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank brought to a cut (or a compaction wrote): its index and what that index holds."""

    rank: int
    index_key: str
    """Key of the index object, relative to the run's root; its name carries the hash of its bytes."""
    boxes: tuple[Box, ...]
    """Rectangles of tables this part speaks for; empty for a rank that owns only blobs."""
    stored_bytes: int
    """Packs and index together."""
    covers: int | None
    """The part holds every row of its boxes changed since this committed checkpoint (a seq); None: all its rows."""

    @property
    def prefix(self) -> str:
        """The deletable prefix the part's objects lie under, with its trailing slash."""
        return prefix_of(self.index_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What every entry says. `at_s` (Unix seconds by the writer's clock) is for people: no rule looks at it."""

    seq: int
    previous: str
    """Hash of the entry at seq - 1; empty for genesis."""
    writer: str
    """Random token, the same for every retry of one put: after a lost acknowledgement it says whose entry this is."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Genesis(Entry):
    """Slot 0: the run's name and who owns it."""

    run: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOpened(Entry):
    """A new trainer process group; its number is this entry's seq, and every lower number is fenced from here on."""

    world_size: int
    resumes_from: int | None
    """Seq of the checkpoint that was really loaded; None: the first cut is a baseline."""
    owner: str
    takeover: bool = False
    """The opener knows that the run had another owner."""
    voids: int | None = None
    """Entries voids..seq-1 are void: the one at `voids` could not be read by the opener (bit rot, broken rule)."""
    workload: str = ""
    """UID of the workload (Job, JobSet, ...) whose trainer this is; empty outside of a cluster."""
    pod: str = ""
    """UID of the pod it runs in; empty outside of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Entry):
    """One committed cut. Its seq is the checkpoint's name."""

    attempt: int
    cut: int
    step: int
    parts: tuple[Part, ...]
    """One per rank, rank 0 first."""
    tables: tuple[TableSchema, ...]
    encodings: tuple[str, ...]
    """Encodings that occur in the frames, sorted."""
    rows: int
    raw_bytes: int
    """Of the rows and blobs before encoding."""
    stored_bytes: int
    stall_s: float
    """The longest any rank's training stood still for this cut."""
    directive: str = ""
    """What made this cut what it is (policy, reason, bits), for people and for the scheduler."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Names under which retention keeps it, until a newer checkpoint takes the name."""

    @property
    def baseline(self) -> bool:
        """Whether every part holds all its rows."""
        return all(part.covers is None for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(Entry):
    """Another way to read an existing checkpoint: its rows moved, as encoded, into parts that cover nothing."""

    replaces: int
    """Seq of the checkpoint; chains that pass through it use these parts from here on."""
    parts: tuple[Part, ...]
    rows: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired(Entry):
    """Checkpoints that are no more, and prefixes whose objects may be deleted after a grace period."""

    checkpoints: tuple[int, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Entry):
    """gc found nothing left of what was retired up to a slot: nobody need remember those prefixes any more.

    It is stored as `ignorable`: a version that passes over it remembers more, and refuses nothing that others accept.
    """

    through: int
    """Seq of the last retire entry it speaks of; all before it are meant, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored(Entry):
    """An entry of a kind this version does not know and may pass over."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """An entry with its bytes and hash, as they lie in the store."""

    entry: Entry
    data: bytes
    hash: str


KINDS: dict[str, type[Entry]] = {
    "genesis": Genesis,
    "attempt": AttemptOpened,
    "checkpoint": Checkpoint,
    "compact": Compacted,
    "retire": Retired,
    "reclaim": Reclaimed,
}


# Names


def entry_key(seq: int) -> str:
    """Key of a slot of the log."""
    return f"log/{seq:020d}.json"


def seq_of(key: str) -> int | None:
    """The slot a key names, or None when it names none."""
    match = _ENTRY_NAME.fullmatch(key)
    return int(match[1]) if match else None


def prefix_of(key: str) -> str:
    """The deletable prefix a data object lies under; raises `CorruptObject` for any other key."""
    match = _PREFIX.match(key)
    if match is None:
        raise CorruptObject("key lies under no cut and no compaction", where=key[:300])
    return match[0]


def is_prefix(text: str) -> bool:
    """Whether `text` is exactly a deletable prefix."""
    return _PREFIX.fullmatch(text) is not None


def cut_of(prefix: str) -> tuple[int, int] | None:
    """(attempt, cut) of a prefix, or None for a compaction's."""
    match = _PREFIX.fullmatch(prefix)
    return (int(match[1]), int(match[2])) if match and match[1] else None


# Writing


def canonical(document: Any) -> bytes:
    """The one byte form of a JSON document."""
    return json.dumps(
        document,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
        check_circular=False,
    ).encode("ascii")


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
            doc |= {name: text for name in ("workload", "pod") if (text := getattr(entry, name))}
        case Checkpoint():
            doc |= {
                "attempt": entry.attempt,
                "cut": entry.cut,
                "step": entry.step,
                "parts": [part_document(p) for p in entry.parts],
                "tables": [table_document(t) for t in entry.tables],
                "encodings": list(entry.encodings),
                "rows": entry.rows,
                "raw_bytes": entry.raw_bytes,
                "stored_bytes": entry.stored_bytes,
                "stall_s": entry.stall_s,
                "directive": entry.directive,
                "fingerprint": dict(entry.fingerprint),
                "metadata": dict(entry.metadata),
                "pins": list(entry.pins),
            }
        case Compacted():
            doc |= {
                "replaces": entry.replaces,
                "parts": [part_document(p) for p in entry.parts],
                "rows": entry.rows,
                "stored_bytes": entry.stored_bytes,
            }
        case Retired():
            doc |= {"checkpoints": list(entry.checkpoints), "prefixes": list(entry.prefixes)}
        case Reclaimed():
            doc |= {"ignorable": True, "through": entry.through}
    return doc


def part_document(part: Part) -> dict[str, Any]:
    """The JSON document of a part."""
    return {
        "rank": part.rank,
        "index_key": part.index_key,
        "boxes": [[b.table, b.row_start, b.row_stop, b.col_start, b.col_stop] for b in part.boxes],
        "stored_bytes": part.stored_bytes,
        "covers": part.covers,
    }


def table_document(table: TableSchema) -> dict[str, Any]:
    """The JSON document of a table schema."""
    return {
        "fqn": table.fqn,
        "rows": table.rows,
        "columns": table.columns,
        "dtype": table.dtype,
        "fields": [[f.name, f.kind, f.dtype] for f in table.fields],
    }


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

    Raises `CorruptObject` (not canonical JSON, hash, field or bound wrong), `UnsupportedVersion` (newer format, or an
    unknown kind that is not ignorable) and `ForeignObject` (a whole entry of another slot).
    """
    where = entry_key(seq)
    document = load(data, where)
    reader = Reader(document, where)
    digest = reader.text("hash", _HASH)
    version = reader.integer("format", low=1)
    body = {key: value for key, value in document.items() if key != "hash"}
    if hashlib.sha256(canonical(body)).hexdigest() != digest:
        raise CorruptObject("log entry does not match its own hash", where=where)
    if version != FORMAT:
        raise UnsupportedVersion(
            f"log entry has format {version}, this library reads {FORMAT}",
            where=where,
            remedy="upgrade deltashard",
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
            raise UnsupportedVersion(
                f"log entry of unknown kind {kind[:40]!r}", where=where, remedy="upgrade deltashard"
            )
        return Sealed(entry=Ignored(kind=kind, **common), data=data, hash=digest)
    entry = _ENTRIES[kind](reader, common)
    reader.end()
    return Sealed(entry=entry, data=data, hash=digest)


def load(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from canonical bytes and nothing else; raises `CorruptObject`."""
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptObject(f"{len(data)} bytes are too many (limit {MAX_ENTRY_BYTES})", where=where)
    try:
        document = json.loads(data.decode("ascii"), parse_constant=_refuse_constant)
        same = isinstance(document, dict) and canonical(document) == data
    except (ValueError, RecursionError, OverflowError) as error:
        raise CorruptObject(f"not canonical JSON: {str(error)[:200]}", where=where) from None
    if not same:
        raise CorruptObject("not a canonical JSON object", where=where)
    return cast("dict[str, Any]", document)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Reader:
    """Typed, bounded access to one JSON object: each field is asked for once, and `end` refuses what is left over."""

    __slots__ = ("_left", "_object", "where")

    def __init__(self, document: Any, where: str) -> None:
        self.where = where
        if not isinstance(document, dict):
            self.fail("an object was expected")
        self._object: dict[str, Any] = document
        self._left = set(document)

    def fail(self, what: str) -> NoReturn:
        """Raise the one error of a malformed document."""
        raise CorruptObject(f"log document is malformed: {what}", where=self.where)

    def take(self, key: str) -> Any:
        """A required field, untyped."""
        if key not in self._object:
            self.fail(f"{key!r} is missing")
        self._left.discard(key)
        return self._object[key]

    def has(self, key: str) -> bool:
        """Whether the object has this field."""
        return key in self._object

    def optional(self, key: str) -> Any:
        """A field that may be absent, untyped."""
        self._left.discard(key)
        return self._object.get(key)

    def integer(self, key: str, *, low: int = 0) -> int:
        """An integer in [low, 2^63)."""
        return self.as_integer(self.take(key), key, low=low)

    def as_integer(self, value: Any, what: str, *, low: int = 0) -> int:
        """`value` as an integer in [low, 2^63)."""
        if type(value) is not int or not low <= value <= _MAX_INT:
            self.fail(f"{what} is no integer from {low}")
        return value

    def nullable(self, key: str) -> int | None:
        """An integer or null."""
        value = self.take(key)
        return None if value is None else self.as_integer(value, key)

    def number(self, key: str) -> float:
        """A finite, non-negative number."""
        value = self.take(key)
        if type(value) not in (int, float) or not 0 <= value <= _MAX_INT:
            self.fail(f"{key} is no number from 0")
        return cast("float", value)

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self.take(key)
        if type(value) is not bool:
            self.fail(f"{key} is neither true nor false")
        return value

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        """A string of bounded length that matches the whole pattern."""
        return self.as_text(self.take(key), key, pattern)

    def as_text(self, value: Any, what: str, pattern: re.Pattern[str] | None = None) -> str:
        """`value` as a string of bounded length that matches the whole pattern."""
        if type(value) is not str or len(value) > _MAX_TEXT or (pattern and not pattern.fullmatch(value)):
            self.fail(f"{what} is no such string")
        return value

    def items(self, key: str) -> Iterator[Any]:
        """The elements of a list."""
        return iter(self.as_list(self.take(key), key))

    def as_list(self, value: Any, what: str, length: int | None = None) -> list[Any]:
        """`value` as a list, of this length if one is given."""
        if type(value) is not list or (length is not None and len(value) != length):
            self.fail(f"{what} is no such list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self.as_text(item, key) for item in self.items(key))

    def mapping(self, key: str) -> dict[str, str]:
        """An object whose values are strings."""
        value = self.take(key)
        if type(value) is not dict:
            self.fail(f"{key} is no object")
        return {name: self.as_text(text, f"{key}.{name[:40]}") for name, text in value.items()}

    def end(self) -> None:
        """Refuse fields nobody asked for."""
        if self._left:
            self.fail(f"unknown fields {sorted(self._left)[:5]}")


def read_part(document: Any, where: str) -> Part:
    """A part from its JSON document; raises `CorruptObject`."""
    r = Reader(document, where)
    index_key = r.text("index_key")
    if not is_index_key(index_key):
        r.fail("index_key is no index's name")
    part = Part(
        rank=r.integer("rank"),
        index_key=index_key,
        boxes=tuple(_read_box(r, item) for item in r.items("boxes")),
        stored_bytes=r.integer("stored_bytes"),
        covers=r.nullable("covers"),
    )
    r.end()
    return part


def _read_box(r: Reader, item: Any) -> Box:
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
            FieldSpec(name=r.as_text(name, "field"), kind=kind, dtype=r.as_text(dtype, "dtype", _DTYPE))
        )
    table = TableSchema(
        fqn=r.text("fqn"),
        rows=r.integer("rows"),
        columns=r.integer("columns"),
        dtype=r.text("dtype", _DTYPE),
        fields=tuple(fields),
    )
    r.end()
    return table


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
        **common,
    )


def _checkpoint(r: Reader, common: dict[str, Any]) -> Entry:
    entry = Checkpoint(
        attempt=r.integer("attempt"),
        cut=r.integer("cut"),
        step=r.integer("step"),
        parts=_read_parts(r, ranks=True),
        tables=tuple(read_table(item, r.where) for item in r.items("tables")),
        encodings=r.texts("encodings"),
        rows=r.integer("rows"),
        raw_bytes=r.integer("raw_bytes"),
        stored_bytes=r.integer("stored_bytes"),
        stall_s=r.number("stall_s"),
        directive=r.text("directive"),
        fingerprint=r.mapping("fingerprint"),
        metadata=r.mapping("metadata"),
        pins=r.texts("pins"),
        **common,
    )
    prefix = cut_prefix(entry.attempt, entry.cut)
    if any(part.prefix != prefix for part in entry.parts):
        raise ForeignObject("checkpoint names an index of another attempt or cut", where=r.where)
    if len({table.fqn for table in entry.tables}) != len(entry.tables):
        r.fail("a table occurs twice")
    return entry


def _compact(r: Reader, common: dict[str, Any]) -> Entry:
    entry = Compacted(
        replaces=r.integer("replaces"),
        parts=_read_parts(r, ranks=False),
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


_ENTRIES = {
    "genesis": _genesis,
    "attempt": _attempt,
    "checkpoint": _checkpoint,
    "compact": _compact,
    "retire": _retire,
    "reclaim": _reclaim,
}
