"""`log/fold-{seq}-{digest}.json`: the folded state up to a slot, so that readers need not start at genesis.

From time to time a writer puts the state before the entry that it appends, and names it in that entry: its slot and
the first 32 digits of the SHA-256 of its bytes. So the folded state is as trustworthy as the log. Readers start from
the newest one whose digest matches, that a later entry names, and from which the log can be followed to that entry.
Corruption or loss of earlier entries then no longer matters. A folded state that no entry names is ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from deltashard_checkpoint.errors import CorruptObject, ForeignObject, FormatError, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, content_digest
from deltashard_checkpoint.format.canonical_json import load as load_json
from deltashard_checkpoint.format.object_key import run_key
from deltashard_checkpoint.log.entry import (
    Checkpoint,
    Compacted,
    Entry,
    FoldName,
    Sealed,
    is_prefix,
    named_fold,
)
from deltashard_checkpoint.log.entry_codec import document_of, parse
from deltashard_checkpoint.log.pin import UserEntry
from deltashard_checkpoint.log.run_state import Attempt, RunState, Slot
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store, StoreUnavailable
from deltashard_checkpoint.stores.deadline import deadline

FORMAT = 1
BEST_EFFORT_S = 5.0
"""Deadline of best-effort operations that only help readers."""
READS = 8
"""Reads of an object with invalid bytes, until two consecutive reads agree."""
_BYTES = 64 << 10
"""Every entry names the preceding folded state while that is smaller than twice this size; at n times this size, every
n-th entry does. So folded states stay a small share of a save, however many checkpoints are kept."""
_LAYOUT = re.compile(r"|[0-9a-f]{32}", re.ASCII)
_NAME = re.compile(r"log/fold-(\d{20})-([0-9a-f]{32})\.json", re.ASCII)
E = TypeVar("E", bound=Entry)


def fold_key(name: FoldName) -> str:
    return f"log/fold-{name.seq:020d}-{name.digest}.json"


def fold_of(key: str) -> FoldName | None:
    """Return the fold that `key`, relative to the run's root, names; None for any other key."""
    match = _NAME.fullmatch(key)
    return FoldName(int(match[1]), match[2]) if match else None


def name_of(state: RunState, data: bytes) -> FoldName:
    return FoldName(state.tip, content_digest(data))


def dump(state: RunState) -> bytes:
    """Encode `state`, which must not be stopped."""
    assert state.stopped is None
    document = {
        "format": FORMAT,
        "run": state.run,
        "owner": state.owner,
        "tip": state.tip,
        "tip_hash": state.tip_hash,
        "attempt": state.attempt,
        "attempts": [_attempt_row(n, a) for n, a in sorted(state.attempts.items())],
        "checkpoints": [_sealed(c) for _, c in sorted(state.checkpoints.items())],
        "compactions": [_sealed(c) for _, c in sorted(state.compactions.items())],
        "superseded": [[prefix, seq] for prefix, seq in sorted(state.superseded.items())],
        "retired": [[prefix, seq] for prefix, seq in sorted(state.retired.items())],
        "compactions_from": state.compactions_from,
        "committed": state.committed,
        "abandoned_at": state.abandoned_at,
        "pins": [[name, *entry] for name, entry in sorted(state.user_entries.items())],
        "detached": sorted(state.detached),
    }
    return canonical({**document, "hash": hashlib.sha256(canonical(document)).hexdigest()})


def _attempt_row(number: int, a: Attempt) -> list[Any]:
    resumed, last = (a.resumes_from, a.resumes_attempt), (a.last_snapshot, a.last_seq, a.last_step)
    return [number, a.world_size, *resumed, *last, a.workload, a.pod, a.layout]


def _sealed(entry: Entry) -> dict[str, Any]:
    document = document_of(entry)
    return {**document, "hash": hashlib.sha256(canonical(document)).hexdigest()}


def load(data: bytes, run: str, name: FoldName) -> RunState:
    """Decode `data`; raises `CorruptObject`, `UnsupportedVersion` or `ForeignObject` if it is not the fold `name`."""
    where, seq = fold_key(name), name.seq
    if content_digest(data) != name.digest:
        raise CorruptObject("fold does not match the hash in its name", where=where)
    document = load_json(data, where)
    digest = document.pop("hash", None)
    if hashlib.sha256(canonical(document)).hexdigest() != digest:
        raise CorruptObject("fold does not match its own hash", where=where)
    r = Reader(document, where)
    if r.integer("format") != FORMAT:
        raise UnsupportedVersion("fold of another format", where=where)
    if r.text("run") != run or r.integer("tip") != seq:
        raise ForeignObject("fold of another run or slot", where=where)
    attempts = dict(_attempt(r, item) for item in r.items("attempts"))
    checkpoints = [_entry(r, item, Checkpoint) for item in r.items("checkpoints")]
    compactions = [_entry(r, item, Compacted) for item in r.items("compactions")]
    superseded, retired = _prefixes(r, "superseded"), _prefixes(r, "retired")
    if not all(is_prefix(prefix) for prefix in (*superseded, *retired)):
        r.fail("a prefix is neither a snapshot's nor a compaction's")
    user_entries = {}
    for item in r.items("pins"):
        pin, slot, held = r.as_list(item, "pin", 3)
        user_entries[r.as_text(pin, "pin")] = UserEntry(
            r.as_integer(slot, "pin"), None if held is None else r.as_integer(held, "pin")
        )
    state = RunState(
        run=run,
        owner=r.text("owner"),
        tip=seq,
        tip_hash=r.text("tip_hash"),
        attempt=r.nullable("attempt"),
        attempts=attempts,
        checkpoints={c.seq: c for c in checkpoints},
        compactions={c.replaces: c for c in compactions},
        superseded=superseded,
        retired=retired,
        compactions_from=r.integer("compactions_from"),
        committed=r.integer("committed"),
        abandoned_at=r.nullable("abandoned_at"),
        user_entries=user_entries,
        detached=frozenset(r.as_integer(item, "detached") for item in r.items("detached")),
    )
    r.end()
    if (why := _contradiction(state)) is not None:
        r.fail(why)
    return state


def _attempt(r: Reader, item: Any) -> tuple[int, Attempt]:
    opened, size, *rest = r.as_list(item, "attempt", 10)
    resumes_from, resumes_attempt, last_snapshot, last_seq, last_step = (
        None if n is None else r.as_integer(n, "attempt") for n in rest[:5]
    )
    workload, pod, layout = rest[5:]
    return r.as_integer(opened, "attempt"), Attempt(
        world_size=r.as_integer(size, "attempt"),
        resumes_from=resumes_from,
        resumes_attempt=resumes_attempt,
        last_snapshot=last_snapshot,
        last_seq=last_seq,
        last_step=last_step,
        workload=r.as_text(workload, "attempt"),
        pod=r.as_text(pod, "attempt"),
        layout=r.as_text(layout, "attempt", _LAYOUT),
    )


def _contradiction(state: RunState) -> str | None:
    """Return an inconsistency that no valid log produces, or None."""
    live = state.checkpoints
    if state.attempt is not None and state.attempt not in state.attempts:
        return "the newest attempt was never opened"
    for number, opened in state.attempts.items():
        resumed = (opened.resumes_from, opened.resumes_attempt)
        if any(seq is not None and seq >= number for seq in resumed):
            return "an attempt resumes from a later checkpoint or attempt"
    if any(each.attempt not in state.attempts for each in live.values()):
        return "a checkpoint of an attempt that was never opened"
    if any(covers >= seq for seq, each in live.items() for covers in each.covered):
        return "a checkpoint covers a later checkpoint"
    if not all(live.keys() >= set(c.covered) for seq, c in live.items() if seq not in state.compactions):
        return "a checkpoint covers one that is not live"
    named = {entry.checkpoint for entry in state.user_entries.values()} - {None}
    if not live.keys() >= state.compactions.keys() | state.detached | named:
        return "it references a checkpoint that is not live"
    return None


def _prefixes(r: Reader, key: str) -> dict[str, int]:
    found = {}
    for item in r.items(key):
        prefix, seq = r.as_list(item, key, 2)
        found[r.as_text(prefix, key)] = r.as_integer(seq, key)
    return found


def _entry(r: Reader, document: Any, kind: type[E]) -> E:
    seq = document.get("seq") if isinstance(document, dict) else None
    sealed: Sealed = parse(canonical(document), r.as_integer(seq, "seq"))
    if not isinstance(sealed.entry, kind):
        r.fail(f"{kind.__name__} expected")
    return sealed.entry


def fold_named_by(slot: Slot) -> FoldName | None:
    return named_fold(slot.entry) if isinstance(slot, Sealed) else None


class FoldedStates:
    """Folded states of one run: which ones the log names, when to put another, and which ones to delete."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._names: tuple[FoldName, ...] = ()
        """The newest two folds that the log names, as known to this handle."""
        self._bytes = 0
        """Size of the newest fold that this handle put or read."""

    def copy(self) -> FoldedStates:
        other = FoldedStates(self._store, self._run)
        other._names, other._bytes = self._names, self._bytes
        return other

    @property
    def newest_seq(self) -> int:
        """Slot of the newest named fold; -1: none is known."""
        return self._names[-1].seq if self._names else -1

    def learn(self, slots: Iterable[Slot]) -> None:
        found = {name for slot in slots if (name := fold_named_by(slot)) is not None}
        if found:
            self._names = tuple(sorted({*self._names, *found})[-2:])

    def load(self, name: FoldName) -> RunState:
        """Load a listed fold. Invalid bytes are read again, as for entries.

        Raises `FormatError` if two reads agree, and `StoreUnavailable` if the fold is missing (a newer one exists) or
        differs at every read: earlier entries may be lost, so the fold must not be rejected too early.
        """
        where = fold_key(name)
        before: bytes | None = None
        for _ in range(READS):
            try:
                data = self._store.get(run_key(self._run, where))
            except ObjectNotFound:
                raise StoreUnavailable("a listed fold is not found", where=where) from None
            self._bytes = len(data)
            try:
                return load(data, self._run, name)
            except FormatError:
                if data == before:
                    raise
                before = data
        raise StoreUnavailable("a fold reads differently each time", where=where)

    def put(self, state: RunState) -> FoldName | None:
        """Best effort: put the folded `state` for the next entry to name. Returns None if not worthwhile or failed.

        IMPORTANT: with it a reader needs no entry before the next one, so corruption or loss of any entry except the
        newest is harmless.
        """
        if state.stopped is not None or state.tip - self.newest_seq < max(1, self._bytes // _BYTES):
            return None
        # An entry needs no fold, so a failure must not fail the append.
        with suppress(Exception), deadline(BEST_EFFORT_S):
            data = dump(state)
            name = name_of(state, data)
            self._store.put(run_key(self._run, fold_key(name)), data)
            self._bytes = len(data)
            return name
        return None

    def drop_old(self) -> None:
        """Delete folds older than the last two that the log names: folds grow with the run and must not accumulate."""
        if len(self._names) > 1:
            names = ((key, fold_of(key[len(self._run) + 1 :])) for key in self._keys())
            # gc reports a missing permission to delete.
            self._store.delete([key for key, name in names if name is not None and name < self._names[0]])

    def make_room(self) -> bool:
        """Delete all folds except the newest named one, if one is known. Returns whether any were deleted."""
        if not self._names:
            return False
        newest = run_key(self._run, fold_key(self._names[-1]))
        spare = [key for key in self._keys() if key != newest]
        self._store.delete(spare)
        return bool(spare)

    def _keys(self) -> list[str]:
        return [info.key for info in self._store.list(run_key(self._run, "log/fold-"))]
