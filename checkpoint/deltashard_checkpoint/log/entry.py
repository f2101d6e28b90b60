"""Entries of the commit log: what they say, and the names of what they speak of.

An entry is a frozen dataclass (`Genesis`, `AttemptOpened`, `Checkpoint`, `Compacted`, `Retired`, `Pinned`, `Rewound`,
...), looked at by itself. How it lies in the store is the business of `entry_codec`; what it may say *given the entries
before it* is that of `replay`. Keys in entries are relative to the run's root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.format.object_key import TOKEN_PATTERN, snapshot_prefix
from deltashard_checkpoint.format.schema import Box, TableSchema

_ENTRY_NAME = re.compile(r"log/(\d{20})\.json", re.ASCII)
_FOLDS = re.compile(r"-fold-(\d{1,15})-([0-9a-f]{32})", re.ASCII)
_DIGEST_CHARS = 32
_PREFIX = re.compile(rf"data/(?:(\d{{20}})/(\d{{8}})|compact-{TOKEN_PATTERN})/", re.ASCII)


class FoldName(NamedTuple):
    """What names a folded state: the slot up to which it goes, and its bytes."""

    seq: int
    digest: str
    """The first 32 hexadecimal digits of their SHA-256."""


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
    """Random token, the same for every retry of one put: after a lost acknowledgement it says whose entry this is.

    It may have more behind it: see `voiding_writer` and `folding_writer`."""
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
    """Entries voids..seq-1 are void: the one at `voids` could not be read by the opener (bit rot, broken rule).

    Which bytes it found there stands in `writer` (`voiding_writer`)."""
    workload: str = ""
    """UID of the workload (Job, JobSet, ...) whose trainer this is; empty outside of a cluster."""
    pod: str = ""
    """UID of the pod it runs in; empty outside of a cluster."""
    layout: str = ""
    """Digest of the layout that its ranks keep (`format.layout`); empty: one rank, which holds every table whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """What an entry says of the parts of many ranks, all that the law asks of them: the rest is in a manifest."""

    layout: str
    """Digest of the layout that says their boxes."""
    world_size: int
    manifest: str
    """The first 32 hexadecimal digits of the SHA-256 of the manifest's bytes (`log.manifest`)."""
    covers: tuple[int | None, ...]
    """What the parts cover, see `sorted_covers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Entry):
    """One committed cut. Its seq is the checkpoint's name."""

    attempt: int
    cut: int
    step: int
    parts: tuple[Part, ...] = ()
    """One per rank, rank 0 first; none where a manifest lists them."""
    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Encodings that its rows are stored in, sorted, by table; a table of which it holds no row is not among them."""
    rows: int
    raw_bytes: int
    """Of the rows and blobs before encoding."""
    stored_bytes: int
    stall_s: float
    """The longest any rank's training stood still for this cut."""
    cut_at_s: float
    """Unix seconds by rank 0's clock when training stopped for the cut; 0: unknown. For people and gauges: no rule."""
    directive: str = ""
    """What made this cut what it is (policy, reason, bits), for people and for the scheduler."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Names under which retention keeps it, until a newer checkpoint or a `Pinned` takes the name."""
    listed: ManifestRef | None = None
    """What the entry says of parts that a manifest lists; None: they stand in the entry itself."""

    @property
    def layout(self) -> str:
        """Digest of the layout of its parts; empty: they say their boxes themselves."""
        return "" if self.listed is None else self.listed.layout

    @property
    def world_size(self) -> int:
        return len(self.parts) if self.listed is None else self.listed.world_size

    @property
    def covers(self) -> tuple[int | None, ...]:
        """What its parts cover: distinct, None first, ascending."""
        if self.listed is not None:
            return self.listed.covers
        return sorted_covers({part.covers for part in self.parts})

    @property
    def covered(self) -> tuple[int, ...]:
        """The checkpoints that its parts cover, ascending."""
        return tuple(seq for seq in self.covers if seq is not None)

    @property
    def prefixes(self) -> frozenset[str]:
        if self.listed is not None:
            return frozenset((snapshot_prefix(self.attempt, self.cut),))
        return frozenset(part.prefix for part in self.parts)

    @property
    def baseline(self) -> bool:
        return self.covers == (None,)


def sorted_covers(covers: Iterable[int | None]) -> tuple[int | None, ...]:
    """Distinct values that parts cover, as an entry says them: None first, ascending."""
    return tuple(sorted(set(covers), key=lambda seq: -1 if seq is None else seq))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(Entry):
    """Another way to read an existing checkpoint: its rows moved, as encoded, into parts that cover nothing."""

    replaces: int
    """Seq of the checkpoint; chains that pass through it use these parts from here on."""
    parts: tuple[Part, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Of the rows in these parts, as a checkpoint says them."""
    rows: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired(Entry):
    """Checkpoints that are no more, and prefixes whose objects may be deleted after a grace period."""

    checkpoints: tuple[int, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(Entry):
    """A person's word on a pinned name: from here on this checkpoint has it, until a newer one takes it."""

    name: str
    checkpoint: int | None
    """Seq of a live checkpoint; None: nobody has the name any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Entry):
    """At a person's word the run goes on from an older checkpoint.

    It fences every attempt before it, as an attempt that resumes from there does, but no process has its number.
    """

    to: int
    """Seq of a live checkpoint. It is the newest from here on; those after it are set aside, live until retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Entry):
    """gc found nothing left of what was retired up to a slot: nobody need remember those prefixes any more.

    It is stored as `ignorable`: a version that passes over it remembers more, and refuses nothing that others accept.
    """

    through: int
    """Seq of the last retire entry it speaks of; all before it are meant, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired(Entry):
    """A person had the log repaired: its state up to the slot before is the folded one that this entry names.

    It is stored as `ignorable`, and changes nothing for whoever could follow the log without it.
    """

    lost: tuple[int, ...]
    """Slots that could not be read, or whose entries could not be kept without those."""


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


# What an entry says beside its fields: in its writer's token.


def voiding_writer(writer: str, bad: str) -> str:
    """The token of an attempt that voids the slot whose bytes have the hash `bad`."""
    return f"{writer}-voids-{bad[:_DIGEST_CHARS]}"


def folding_writer(writer: str, name: FoldName) -> str:
    """The token of an entry that names a folded state: one that readers may begin with."""
    return f"{writer}-fold-{name.seq}-{name.digest}"


def named_fold(entry: Entry) -> FoldName | None:
    """The folded state that an entry vouches for; None when it names none."""
    match = _FOLDS.search(entry.writer)
    return FoldName(int(match[1]), match[2]) if match and int(match[1]) < entry.seq else None


# Names


def entry_key(seq: int) -> str:
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
    return _PREFIX.fullmatch(text) is not None


def snapshot_of(prefix: str) -> tuple[int, int] | None:
    """(attempt, cut) of a prefix, or None for a compaction's."""
    match = _PREFIX.fullmatch(prefix)
    return (int(match[1]), int(match[2])) if match and match[1] else None
