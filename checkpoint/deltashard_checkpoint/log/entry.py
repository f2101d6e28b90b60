"""Entries of the commit log, and the names of the objects they reference.

An entry is a frozen dataclass (`Genesis`, `AttemptOpened`, `Checkpoint`, `Compacted`, `Retired`, `Pinned`, `Rewound`,
...), defined independently of other entries. `entry_codec` defines its stored form; `replay` defines the rules for an
entry *given the entries before it*. Keys in entries are relative to the run's root.
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
    """The name of a folded state: its last slot and the digest of its bytes."""

    seq: int
    digest: str
    """The first 32 hexadecimal digits of the SHA-256 of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's contribution to a snapshot (or a compaction's output): its index and the index's content."""

    rank: int
    index_key: str
    """Key of the index object, relative to the run's root; its name contains the hash of its bytes."""
    boxes: tuple[Box, ...]
    """Rectangles of tables that this part holds; empty for a rank that owns only blobs."""
    stored_bytes: int
    """Bytes of packs and index."""
    covers: int | None
    """The part holds every row of its boxes changed since this committed checkpoint (a seq); None: all its rows."""

    @property
    def prefix(self) -> str:
        """The deletable prefix of the part's objects, with a trailing slash."""
        return prefix_of(self.index_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Fields of every entry. `at_s` (Unix seconds by the writer's clock) is for display: no rule uses it."""

    seq: int
    previous: str
    """Hash of the entry at seq - 1; empty for genesis."""
    writer: str
    """Random token, the same for every retry of one put: it identifies the writer after a lost acknowledgement.

    It may have a suffix: see `voiding_writer` and `folding_writer`."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Genesis(Entry):
    """Slot 0: the run's name and its owner."""

    run: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOpened(Entry):
    """A new trainer process group; its number is this entry's seq. It fences every attempt with a lower number."""

    world_size: int
    resumes_from: int | None
    """Seq of the checkpoint that was loaded; None: the first snapshot is a baseline."""
    owner: str
    takeover: bool = False
    """The opener confirmed that the run had another owner."""
    voids: int | None = None
    """Entries voids..seq-1 are void: the opener could not read the one at `voids` (corruption, broken rule).

    `writer` contains the hash of the unreadable bytes (`voiding_writer`)."""
    workload: str = ""
    """UID of the trainer's workload (Job, JobSet, ...); empty outside of a cluster."""
    pod: str = ""
    """UID of the trainer's pod; empty outside of a cluster."""
    layout: str = ""
    """Digest of its ranks' layout (`format.layout`); empty: one rank, which holds every table whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """Summary of the parts of many ranks, sufficient to validate the entry; the parts are listed in a manifest."""

    layout: str
    """Digest of the layout that defines their boxes."""
    world_size: int
    manifest: str
    """The first 32 hexadecimal digits of the SHA-256 of the manifest's bytes (`log.manifest`)."""
    covers: tuple[int | None, ...]
    """The parts' `covers`, see `sorted_covers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Entry):
    """One committed snapshot. Its seq identifies the checkpoint."""

    attempt: int
    snapshot_id: int
    step: int
    parts: tuple[Part, ...] = ()
    """One per rank, rank 0 first; empty if a manifest lists them."""
    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Sorted encodings of its rows, by table; tables without rows in this checkpoint are omitted."""
    rows: int
    raw_bytes: int
    """Bytes of rows and blobs before encoding."""
    stored_bytes: int
    stall_s: float
    """The longest time that any rank's training was blocked by this snapshot."""
    snapshot_at_s: float
    """Unix seconds by rank 0's clock when training paused for the snapshot; 0: unknown. Display and gauges only."""
    directive: str = ""
    """The parameters of this snapshot (policy, reason, bits), for display and for the scheduler."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Names under which retention keeps it, until a newer checkpoint or a `Pinned` entry takes the name."""
    listed: ManifestRef | None = None
    """Summary of the parts that a manifest lists; None: `parts` has them."""

    @property
    def layout(self) -> str:
        """Digest of the layout of its parts; empty: the parts contain their boxes."""
        return "" if self.listed is None else self.listed.layout

    @property
    def world_size(self) -> int:
        return len(self.parts) if self.listed is None else self.listed.world_size

    @property
    def covers(self) -> tuple[int | None, ...]:
        """Distinct `covers` of its parts: None first, then ascending."""
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
            return frozenset((snapshot_prefix(self.attempt, self.snapshot_id),))
        return frozenset(part.prefix for part in self.parts)

    @property
    def baseline(self) -> bool:
        return self.covers == (None,)


def sorted_covers(covers: Iterable[int | None]) -> tuple[int | None, ...]:
    """Return distinct `covers` values in an entry's order: None first, then ascending."""
    return tuple(sorted(set(covers), key=lambda seq: -1 if seq is None else seq))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(Entry):
    """An alternative source of an existing checkpoint: its encoded rows, copied into parts that cover nothing."""

    replaces: int
    """Seq of the checkpoint; chains through it use these parts from here on."""
    parts: tuple[Part, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Encodings of the rows in these parts, as in `Checkpoint`."""
    rows: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired(Entry):
    """Checkpoints that are removed, and prefixes whose objects may be deleted after a grace period."""

    checkpoints: tuple[int, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(Entry):
    """A user moved a pinned name: this checkpoint has it until a newer one takes it."""

    name: str
    checkpoint: int | None
    """Seq of a live checkpoint; None: no checkpoint has the name any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Entry):
    """A user made the run continue from an older checkpoint.

    Like an attempt that resumes from there, it fences every earlier attempt, but no process has its number.
    """

    to: int
    """Seq of a live checkpoint. It is the newest from here on; later ones are detached and stay live until retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Entry):
    """gc found all prefixes that were retired up to a slot to be empty, so the state can forget them.

    Stored as `ignorable`: a version that skips it remembers more prefixes, and rejects nothing that others accept.
    """

    through: int
    """Seq of the last retire entry that this includes; all earlier ones are included, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired(Entry):
    """A user repaired the log: its state up to the previous slot is the folded state that this entry names.

    Stored as `ignorable`: a reader that can follow the log without it is not affected.
    """

    lost: tuple[int, ...]
    """Slots that could not be read, or whose entries depend on those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored(Entry):
    """An entry of a kind that this version does not know and may skip."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """An entry with its stored bytes and hash."""

    entry: Entry
    data: bytes
    hash: str


# Data that an entry carries in its writer's token.


def voiding_writer(writer: str, bad: str) -> str:
    """Return the token of an attempt that voids the slot whose bytes have the hash `bad`."""
    return f"{writer}-voids-{bad[:_DIGEST_CHARS]}"


def folding_writer(writer: str, name: FoldName) -> str:
    """Return the token of an entry that names a folded state from which readers may start."""
    return f"{writer}-fold-{name.seq}-{name.digest}"


def named_fold(entry: Entry) -> FoldName | None:
    """Return the folded state that an entry names, or None."""
    match = _FOLDS.search(entry.writer)
    return FoldName(int(match[1]), match[2]) if match and int(match[1]) < entry.seq else None


# Names


def entry_key(seq: int) -> str:
    return f"log/{seq:020d}.json"


def seq_of(key: str) -> int | None:
    """Return the slot that a key names, or None."""
    match = _ENTRY_NAME.fullmatch(key)
    return int(match[1]) if match else None


def prefix_of(key: str) -> str:
    """Return the deletable prefix of a data object's key; raises `CorruptObject` for any other key."""
    match = _PREFIX.match(key)
    if match is None:
        raise CorruptObject("key is under no snapshot's and no compaction's prefix", where=key[:300])
    return match[0]


def is_prefix(text: str) -> bool:
    return _PREFIX.fullmatch(text) is not None


def snapshot_of(prefix: str) -> tuple[int, int] | None:
    """Return (attempt, snapshot_id) of a prefix, or None for a compaction's."""
    match = _PREFIX.fullmatch(prefix)
    return (int(match[1]), int(match[2])) if match and match[1] else None
