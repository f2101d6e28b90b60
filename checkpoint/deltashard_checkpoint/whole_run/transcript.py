"""The log and the indexes of a copy: what the source says, under another run's name. Pure.

Indexes, manifests and entries say which run they are of, and each is named by its hash by the next: so a copy under
another name has other ones, and the same packs. A whole run keeps its slots, and with them the numbers of attempts and
checkpoints, so that its data has the same keys. One checkpoint, with all it builds on, becomes a log of its own, dense
from slot 0 (`numbered`): there its numbers are others, and its attempts are those that its chain needs.

Every entry of a copy is a function of the source's and of the run's name: its writer is made of the source entry's
hash. So a copy that was killed finds the very bytes that it would have put.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltashard_checkpoint.errors import FormatError
from deltashard_checkpoint.format.canonical_json import canonical
from deltashard_checkpoint.format.index import Index, Pack, digest_hex, encode_index
from deltashard_checkpoint.format.object_key import (
    compaction_index_key,
    cut_prefix,
    index_key,
    parse_index_key,
)
from deltashard_checkpoint.log.chain import closure
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    Entry,
    Genesis,
    Ignored,
    Listed,
    Part,
    Sealed,
    copied_writer,
    voided_digest,
    voiding_writer,
)
from deltashard_checkpoint.log.entry_codec import parse, seal
from deltashard_checkpoint.log.manifest import Manifest
from deltashard_checkpoint.log.part_list import ListedPart
from deltashard_checkpoint.log.replay import advance, fold, void_slots
from deltashard_checkpoint.log.run_state import RunState, Slot, Unreadable

_VOID = b"void in the source of this copy\n"
_CUT = re.compile(r"data/\d{20}/", re.ASCII)


class NotCopyable(FormatError):
    """The log lacks entries that a copy of the whole run would need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What attempts and checkpoints of the source are called in the copy."""

    attempts: Mapping[int, int] = field(default_factory=dict)
    """Empty: as in the source."""
    seqs: Mapping[int, int] = field(default_factory=dict)

    def attempt(self, number: int) -> int:
        """Of an attempt."""
        return self.attempts.get(number, number)

    def covers(self, seq: int | None) -> int | None:
        """Of what a part covers."""
        return None if seq is None else self.seqs.get(seq, seq)

    def key(self, key: str) -> str:
        """Of a data object of a cut; a compaction's stays."""
        match = _CUT.match(key)
        if match is None:
            return key
        attempt = self.attempt(int(key[5:25]))
        return f"{cut_prefix(attempt, 0)[:-9]}{key[match.end() :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedIndex:
    """An index as the copy has it."""

    key: str
    data: bytes
    grown: int
    """By so many bytes it is larger than the source's."""


@dataclass(slots=True, kw_only=True)
class Moved:
    """What the copy's objects are called, by what the source calls them."""

    indexes: dict[str, MovedIndex] = field(default_factory=dict)
    manifests: dict[int, Listed] = field(default_factory=dict)
    """By the checkpoint's seq in the source."""
    grown: dict[int, int] = field(default_factory=dict)
    """Bytes that all indexes of such a checkpoint have grown by."""


def numbered(state: RunState, seq: int) -> Numbers:
    """The dense log of checkpoint `seq` and what its chain reads: an attempt for each that is in it."""
    attempts: dict[int, int] = {}
    seqs: dict[int, int] = {}
    slot = 1
    for each in sorted(closure(state, (seq,))):
        attempt = state.checkpoints[each].attempt
        if attempt not in attempts:
            attempts[attempt] = slot
            slot += 1
        seqs[each] = slot
        slot += 2 if each in state.compactions else 1
    return Numbers(attempts=attempts, seqs=seqs)


def moved_index(index: Index, source_key: str, *, run: str, numbers: Numbers) -> MovedIndex:
    """The index as run `run` has it."""
    name = parse_index_key(source_key)
    attempt = numbers.attempt(index.attempt)
    made = replace(
        index,
        run=run,
        attempt=attempt,
        packs=tuple(Pack(key=numbers.key(pack.key), bytes=pack.bytes) for pack in index.packs),
        covers=numbers.covers(index.covers),
    )
    data = encode_index(made)
    digest = digest_hex(data)
    if name.attempt is None:
        key = compaction_index_key(token=name.token, xxh3=digest)
    else:
        assert name.cut is not None
        assert name.rank is not None
        key = index_key(attempt=attempt, cut=name.cut, rank=name.rank, token=name.token, xxh3=digest)
    return MovedIndex(key=key, data=data, grown=len(data) - len(encode_index(index)))


def moved_manifest(
    entry: Checkpoint, parts: Sequence[ListedPart], moved: Moved, *, run: str, numbers: Numbers
) -> Manifest:
    """The manifest of a checkpoint of many ranks, as run `run` has it; its indexes were moved already."""
    assert entry.listed is not None
    listed = []
    for rank, part in enumerate(parts):
        old = index_key(attempt=entry.attempt, cut=entry.cut, rank=rank, token=part.token, xxh3=part.xxh3)
        new = moved.indexes[old]
        listed.append(
            replace(
                part,
                xxh3=parse_index_key(new.key).xxh3,
                covers=numbers.covers(part.covers),
                stored_bytes=part.stored_bytes + new.grown,
            )
        )
    return Manifest(
        run=run,
        attempt=numbers.attempt(entry.attempt),
        cut=entry.cut,
        step=entry.step,
        layout=entry.listed.layout,
        parts=tuple(listed),
    )


def whole(slots: Sequence[Slot], moved: Moved, *, run: str) -> list[bytes]:
    """The bytes of every slot of the copy of a whole run. Raises `NotCopyable`."""
    void = void_slots(slots)
    previous = ""
    out: list[bytes] = []
    for seq, slot in enumerate(slots):
        if isinstance(slot, Unreadable) or seq in void:
            if seq not in void:
                raise lost(seq, run)
            # It counts for nothing, whatever it says; so that it does so in the copy too, it is no entry there.
            previous = _sha256(_VOID)
            out.append(_VOID)
            continue
        sealed = _sealed(slot, moved, run=run, previous=previous)
        previous = sealed.hash
        out.append(sealed.data)
    return out


def writers(state: RunState, seq: int, genesis: Sealed) -> list[str]:
    """The writers of all entries of the log that begins with checkpoint `seq`: they tell which copy an entry is of."""
    found = [copied_writer(genesis.hash)]
    attempts: set[int] = set()

    def made_of(what: str) -> None:
        found.append(copied_writer(_sha256(f"{genesis.hash} {what}".encode())))

    for each in sorted(closure(state, (seq,))):
        attempt = state.checkpoints[each].attempt
        if attempt not in attempts:
            attempts.add(attempt)
            made_of(f"attempt {attempt}")
        made_of(f"checkpoint {each} of {seq}")
        if (compaction := state.compactions.get(each)) is not None:
            made_of(f"compaction {compaction.seq}")
    return found


def excerpt(
    state: RunState, seq: int, moved: Moved, genesis: Sealed, *, run: str, numbers: Numbers
) -> list[bytes]:
    """The bytes of every slot of a log that begins with checkpoint `seq` of `state` and ends with it."""
    made: list[Sealed] = []
    names = writers(state, seq, genesis)
    copied = RunState(run=run)

    def put(entry: Entry) -> None:
        nonlocal copied
        at = len(made)
        sealed = seal(replace(entry, seq=at, previous=copied.tip_hash, writer=names[at]))
        copied = advance(copied, sealed)
        made.append(sealed)

    assert isinstance(genesis.entry, Genesis)
    put(replace(genesis.entry, run=run, owner=state.owner))
    before: int | None = None
    for each in sorted(closure(state, (seq,))):
        entry = state.checkpoints[each]
        if copied.attempt != numbers.attempt(entry.attempt):
            put(
                AttemptOpened(
                    seq=0, previous="", writer="", at_s=entry.at_s, world_size=entry.world_size,
                    resumes_from=before, owner=state.owner, layout=entry.layout,
                )
            )  # fmt: skip
        pins = state.pins_of(each) if each == seq else ()
        compaction = state.compactions.get(each)
        put(replace(_checkpoint(entry, moved, numbers, compacted=compaction is not None), pins=pins))
        before = len(made) - 1
        if compaction is not None:
            put(replace(_compacted(compaction, moved), replaces=before))
    return [sealed.data for sealed in made]


def folded(log: Iterable[bytes], run: str) -> RunState:
    """The state that a copy's log leads to, judged by the law."""
    return fold(RunState(run=run), [_read(data, seq) for seq, data in enumerate(log)])


def _read(data: bytes, seq: int) -> Slot:
    try:
        return parse(data, seq)
    except FormatError as error:
        return Unreadable(seq=seq, error=error, voidable=True, hash=_sha256(data))


def _sealed(slot: Sealed, moved: Moved, *, run: str, previous: str) -> Sealed:
    entry = slot.entry
    writer = copied_writer(slot.hash)
    same = Numbers()
    match entry:
        case Ignored():  # whatever it says stays as it is
            document = {**json.loads(slot.data), "previous": previous, "writer": writer}
            del document["hash"]
            sealed = {**document, "hash": _sha256(canonical(document))}
            return parse(canonical(sealed), entry.seq)
        case Genesis():
            entry = replace(entry, run=run)
        case AttemptOpened() if (digest := voided_digest(entry)) is not None:
            writer = voiding_writer(writer, digest)
        case Checkpoint():
            entry = _checkpoint(entry, moved, same)
        case Compacted():
            entry = _compacted(entry, moved)
    return seal(replace(entry, previous=previous, writer=writer))


def _checkpoint(entry: Checkpoint, moved: Moved, numbers: Numbers, *, compacted: bool = False) -> Checkpoint:
    """`entry` with the names of the copy. Of one that is not live any more, and was not moved, the old names stay.

    `compacted`: it is read from a compaction, and what it covers is not in the copy.
    """
    entry = replace(
        entry,
        attempt=numbers.attempt(entry.attempt),
        stored_bytes=entry.stored_bytes + moved.grown.get(entry.seq, 0),
    )
    if entry.listed is not None:
        return replace(entry, listed=moved.manifests.get(entry.seq, entry.listed))
    parts = []
    for part in entry.parts:
        each = _part(part, moved, numbers)
        parts.append(replace(each, covers=None) if compacted else each)
    return replace(entry, parts=tuple(parts))


def _compacted(entry: Compacted, moved: Moved) -> Compacted:
    parts = tuple(_part(part, moved, Numbers()) for part in entry.parts)
    grown = sum(new.stored_bytes - old.stored_bytes for new, old in zip(parts, entry.parts, strict=True))
    return replace(entry, parts=parts, stored_bytes=entry.stored_bytes + grown)


def _part(part: Part, moved: Moved, numbers: Numbers) -> Part:
    found = moved.indexes.get(part.index_key)
    return replace(
        part,
        index_key=numbers.key(part.index_key) if found is None else found.key,
        stored_bytes=part.stored_bytes + (0 if found is None else found.grown),
        covers=numbers.covers(part.covers),
    )


def lost_genesis(run: str, owner: str) -> Sealed:
    """In the place of a source's genesis that cannot be read: one that says the same."""
    return seal(Genesis(seq=0, previous="", writer="lost", at_s=0.0, run=run, owner=owner))


def lost(seq: int, run: str) -> NotCopyable:
    """The error of an entry that cannot be read."""
    return NotCopyable(
        f"log entry {seq} cannot be read, and a copy of the whole run would need it",
        where=f"run {run}",
        remedy="copy the checkpoint that is wanted, with -c",
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
