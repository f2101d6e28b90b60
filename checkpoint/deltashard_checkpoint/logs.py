"""The commit log of a run on a store: the shell around the pure fold.

`refresh` learns the tip from a LIST and nothing else. It lists from the slot it already knows, so that a stale
listing (one that lacks what is known to exist) is noticed, and a gap is an error: a missing entry must never look
like an end. A 404 proves nothing about the tip. `log/HINT` is best effort: it tells a cold reader where a folded
state lies (`foldcaches`) and how far the listing must at least reach; if it lies, it costs time and nothing else.

`append` builds an entry against the state at the tip, judges it by the very law of the readers, and creates the slot
after the tip, create-only. Two writers can want the same slot: one wins, the loser reads what won, and builds anew.
An ambiguous answer (time-out, reset, 412 on a retried put) is settled by the bytes in the slot: every put of one
entry, retries included, has identical bytes with its own writer token. Only when the deadline ends first is the
outcome left open (`AppendUnknown`), and then it is the log that will tell.

A store that overwrites where it was asked to create would let two trainers believe they won one slot; it is found
out by a probe before the first append, and refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from deltashard_checkpoint import foldcaches
from deltashard_checkpoint.crashpoints import crash_point
from deltashard_checkpoint.documents import parse, seal
from deltashard_checkpoint.entries import Checkpoint, Entry, Sealed, entry_key, seq_of
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, FormatError, UnsupportedVersion
from deltashard_checkpoint.folds import EntryRefused, VoidedBehind, advance, fold
from deltashard_checkpoint.keys import new_token, run_key, validate_run
from deltashard_checkpoint.patience import Clocks, Patience
from deltashard_checkpoint.runstates import RunState, Slot, Unreadable
from deltashard_checkpoint.stores.abc import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    Store,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.deadlines import deadline
from deltashard_checkpoint.stores.probes import probe

DEFAULT_DEADLINE_S = 120.0
_HINT_DEADLINE_S = 5.0
_HINT_EVERY = 8
_FOLD_EVERY = 128
_FOLDS_KEPT = 8
_LISTINGS = 5
"""A listing with a gap is asked for again so many times before the gap is believed."""
_HINT = re.compile(rb'\{"fold":(-1|\d{1,15}),"seq":(\d{1,15})\}')
_probed: weakref.WeakSet[Store] = weakref.WeakSet()


class LogGap(EnvironmentFault):
    """The listing lacks an entry: entries are never deleted, so something else did that, or the listing is stale."""


class LogStopped(FormatError):
    """An entry of the log cannot be read or breaks a rule: nothing may be appended that builds on it."""


class AppendUnknown(StoreUnavailable):
    """The deadline ended before the store said whether the entry was created; it may still appear."""


Build = Callable[[RunState, int, str], Entry | None]
"""(state, seq, writer token) -> the entry to append on top of that state, or None when there is nothing to do any more.
`previous` and `at_s` are filled in by the log. It may raise to give up."""


class RunLog:
    """The log of one run. Methods may be called from several threads; they take turns."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clocks: Clocks | None = None,
        readers: int = 16,
    ) -> None:
        """`readers`: entries fetched at once when many are new; 1 fetches in the calling thread."""
        self.store = store
        self.run = validate_run(run)
        self.clocks = clocks or Clocks()
        self._readers = readers
        self._state = RunState(run=run)
        self._fold_seq = -1
        self._lock = threading.RLock()

    def key(self, key: str) -> str:
        """The store key of a key that is relative to the run's root."""
        return run_key(self.run, key)

    def fork(self) -> RunLog:
        """Another handle on this log that begins with what this one knows: waiting in one never delays the other."""
        other = RunLog(self.store, self.run, clocks=self.clocks, readers=self._readers)
        other._state, other._fold_seq = self._state, self._fold_seq
        return other

    @property
    def concurrent(self) -> bool:
        """Whether several requests may be on their way at once."""
        return self._readers > 1

    @property
    def state(self) -> RunState:
        """As last seen; `refresh` brings it up to date."""
        return self._state

    def patience(self, deadline_s: float) -> Patience:
        """Bounded waiting on this log's clocks."""
        return Patience(clocks=self.clocks, deadline_s=deadline_s)

    # Reading

    def refresh(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> RunState:
        """The state at the tip that a LIST shows now.

        Raises `LogGap`, `StoreUnavailable` past the deadline, and whatever the store answers. Unreadable entries do
        not raise: they stop the fold (`RunState.stopped`).
        """
        with self._lock:
            patience = self.patience(deadline_s)
            gaps = 0
            while True:
                try:
                    return self._refresh_once()
                except LogGap:
                    gaps += 1
                    if gaps >= _LISTINGS or not patience.pause():
                        raise
                except StoreUnavailable:
                    if not patience.pause():
                        raise

    def _refresh_once(self) -> RunState:
        state, floor = self._state, -1
        if state.tip < 0 or state.stopped is not None:  # what stopped the fold may have been mended meanwhile
            state, floor = self._start()
            floor = max(floor, self._state.tip)
        tip = self._list_tip(state, floor)
        slots = self._read(range(state.tip + 1, tip + 1))
        try:
            state = fold(state, slots)
        except VoidedBehind:
            # Only an attempt that voids an unreadable slot leads here: rare, so everything is simply read again.
            state = fold(RunState(run=self.run), self._read(range(tip + 1)))
        self._state = state
        return state

    def _start(self) -> tuple[RunState, int]:
        """Where a cold reader begins: (a cached fold or nothing, a slot that HINT says exists or -1)."""
        nothing = RunState(run=self.run)
        try:
            hint = self.store.get(self.key("log/HINT"))
        except ObjectNotFound:
            return nothing, -1
        match = _HINT.fullmatch(hint[:100])
        if match is None:
            return nothing, -1
        fold_seq, floor = int(match[1]), int(match[2])
        if fold_seq < 0:
            return nothing, floor
        try:
            state = foldcaches.load(
                self.store.get(self.key(foldcaches.fold_key(fold_seq))), self.run, fold_seq
            )
            authority = parse(self.store.get(self.key(entry_key(fold_seq))), fold_seq)
        except (ObjectNotFound, FormatError):
            return nothing, floor
        if authority.hash != state.tip_hash:
            return nothing, floor
        self._fold_seq = fold_seq
        return state, max(floor, fold_seq)

    def _list_tip(self, state: RunState, floor: int) -> int:
        """The highest slot, from a listing that begins with the slot `state` knows to exist.

        IMPORTANT: the tip is what a LIST shows. HINT may point anywhere and a GET may miss what was just put: a writer
        that took either for the tip would build its entry on a log that is not the run's.
        """
        known = state.tip
        start_after = entry_key(known - 1) if known > 0 else "log/"
        expected = max(known, 0)
        for info in self.store.list(self.key("log/"), start_after=self.key(start_after)):
            seq = self._slot(info)
            if seq is None:
                continue
            if seq != expected:
                raise LogGap(
                    f"log entry {expected} is missing, {seq} is there",
                    where=f"{self.store.url}/{self.key('log/')}",
                    remedy="entries are never deleted by deltashard: restore the object from a copy or a version",
                )
            expected += 1
        tip = expected - 1
        if tip < known:
            raise LogGap(
                f"the listing ends before log entry {known}, which exists",
                where=f"{self.store.url}/{self.key('log/')}",
                remedy="the store must list what was put; or the entry was deleted: restore it from a copy",
            )
        if tip < floor:
            if self._exists(floor):
                raise StoreUnavailable(
                    f"stale listing: it ends at {tip}, but entry {floor} exists", where=self.key("log/")
                )
            # IMPORTANT: HINT is written after the entry that it names, so that entry was there. Read as the end, the
            # loss of the newest entries would be an older step, or none, without a word.
            raise LogGap(
                f"the log ends at entry {tip}, and {floor} was written ({self.key('log/HINT')} says so): the newest "
                "entries are gone",
                where=f"{self.store.url}/{self.key('log/')}",
                remedy="restore the objects from a copy or a version; `deltashard repair` goes on without them",
            )
        return tip

    def _slot(self, info: ObjectInfo) -> int | None:
        return seq_of(info.key[len(self.run) + 1 :])

    def _exists(self, seq: int) -> bool:
        try:
            self.store.head(self.key(entry_key(seq)))
        except ObjectNotFound:
            return False
        return True

    def _read(self, seqs: Sequence[int]) -> list[Slot]:
        if not self.concurrent or len(seqs) <= 4:
            return [self.read_slot(seq) for seq in seqs]
        with ThreadPoolExecutor(self._readers) as pool:
            return list(pool.map(self.read_slot, seqs))

    def read_slot(self, seq: int) -> Slot:
        """One entry. Bytes that do not parse are read again: only the same bad bytes twice make a slot unreadable."""
        before: bytes | None = None
        for _ in range(8):
            try:
                data = self.store.get(self.key(entry_key(seq)))
            except ObjectNotFound:
                raise StoreUnavailable(f"listed log entry {seq} is not found", where=entry_key(seq)) from None
            try:
                return parse(data, seq)
            except FormatError as error:
                if data == before:
                    return Unreadable(
                        seq=seq,
                        error=error,
                        voidable=not isinstance(error, UnsupportedVersion),
                        hash=hashlib.sha256(data).hexdigest(),
                    )
                before = data
        raise StoreUnavailable(f"log entry {seq} reads differently each time", where=entry_key(seq))

    # Appending

    def append(
        self,
        build: Build,
        *,
        before: str,
        after: str,
        deadline_s: float = DEFAULT_DEADLINE_S,
        voiding: bool = False,
    ) -> Sealed | None:
        """Append what `build` makes of the state at the tip; None when it made nothing.

        `before` and `after` name the crash points around the put. `voiding` lets an entry follow a stopped log.
        Raises `LogStopped`, `EntryRefused`, `AppendUnknown`, `ConditionalPutUnsupported`, and what `build` and
        `refresh` raise.
        """
        with self._lock:
            patience = self.patience(deadline_s)
            self._probe(patience)
            if self._state.tip < 0:
                self.refresh(deadline_s=patience.left_s)
            while True:
                state = self._state
                if state.stopped is not None and not voiding:
                    raise stopped(state)
                entry = build(state, state.tip + 1, new_token())
                if entry is None:
                    return None
                sealed = seal(replace(entry, previous=state.tip_hash, at_s=round(self.clocks.wall_s(), 3)))
                try:
                    following = advance(replace(state, stopped=None), sealed)
                except EntryRefused:
                    # Perhaps only because this state is old: what counts is the state at the slot.
                    if self.refresh(deadline_s=patience.left_s).tip > state.tip:
                        continue
                    raise
                crash_point(before)
                if self._create(sealed, patience):
                    crash_point(after)
                    self._state = following
                    self._leave_hint(sealed)
                    return sealed
                if self.refresh(deadline_s=patience.left_s).tip <= state.tip and not patience.pause():
                    raise StoreUnavailable(
                        f"log entry {sealed.entry.seq} exists, but no listing shows it",
                        where=self.key("log/"),
                    )

    def _create(self, sealed: Sealed, patience: Patience) -> bool:
        """Whether the slot is ours: True, False (another entry has it) or `AppendUnknown`.

        IMPORTANT: a slot is created only if absent, with the same bytes at every retry; after any answer but plain
        success the bytes in the slot decide. A retry with other bytes, or a 404 taken for absence, could let
        one entry be counted twice or another be overwritten.
        """
        key = self.key(entry_key(sealed.entry.seq))
        while True:
            try:
                self.store.put_if_absent(key, sealed.data)
            except ObjectExists:
                won = self._settle(sealed)
                if won is not None:
                    return won
            except StoreUnavailable as error:
                if patience.left_s <= 0:
                    raise AppendUnknown(
                        f"log entry {sealed.entry.seq} may or may not have been created: {error.what}",
                        where=key,
                        remedy="the log will tell once the store answers again",
                    ) from error
            else:
                return True
            if not patience.pause():
                raise AppendUnknown(f"log entry {sealed.entry.seq} could not be read back in time", where=key)

    def _settle(self, sealed: Sealed) -> bool | None:
        """After "exists": ours, another's (or nobody's: bad bytes), or (None) not to be read just now."""
        try:
            slot = self.read_slot(sealed.entry.seq)
        except StoreUnavailable:
            return None
        return isinstance(slot, Sealed) and slot.data == sealed.data

    def _leave_hint(self, sealed: Sealed) -> None:
        """Best effort: a folded state now and then, and HINT where it is. Losing either costs a cold reader time."""
        seq = sealed.entry.seq
        fold_due = seq - self._fold_seq >= _FOLD_EVERY
        if not fold_due and seq % _HINT_EVERY and not isinstance(sealed.entry, Checkpoint):
            return
        # IMPORTANT: the entry is durable. Whatever goes wrong from here on must not look as if it were not.
        with suppress(Exception), deadline(_HINT_DEADLINE_S):
            if fold_due:
                self.store.put(self.key(foldcaches.fold_key(seq)), foldcaches.dump(self._state))
                self._fold_seq = seq
            hint = json.dumps({"fold": self._fold_seq, "seq": seq}, separators=(",", ":"))
            self.store.put(self.key("log/HINT"), hint.encode())
            if fold_due:
                self._drop_folds(seq - _FOLDS_KEPT * _FOLD_EVERY)

    def _drop_folds(self, below: int) -> None:
        """Folded states grow with the run, and only the newest is read: the old ones must not add up.

        Whoever leaves a HINT folds anew when its last fold is `_FOLD_EVERY` slots old, so none names one below.
        """
        oldest = self.key(foldcaches.fold_key(max(0, below)))
        with suppress(DeltashardError):  # who may not delete here will hear of it from gc
            folds = self.store.list(self.key("cache/fold-"))
            stale = [
                i.key for i in folds if foldcaches.is_fold(i.key[len(self.run) + 1 :]) and i.key < oldest
            ]
            if stale:
                self.store.delete(stale)

    def probe(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Find out now what the first append would: whether the store creates where it was asked to, and only there.

        Raises `ConditionalPutUnsupported`, `StoreUnavailable` past the deadline, and whatever the store answers.
        """
        self._probe(self.patience(deadline_s))

    def _probe(self, patience: Patience) -> None:
        """See `stores.probes`; once per store."""
        if self.store in _probed:
            return
        probe(self.store, self.key(f"probe/{new_token()}"), pause=patience.pause)
        _probed.add(self.store)


def stopped(state: RunState) -> LogStopped:
    """The error that says where and why the fold of `state` stopped."""
    bad = state.stopped
    assert bad is not None
    return LogStopped(
        f"the log cannot be followed past entry {bad.seq}: {bad.error.what}",
        where=f"run {state.run}",
        remedy="everything before it restores; the next attempt opened leaves the unreadable part behind"
        if bad.voidable
        else "upgrade deltashard to the version that wrote it",
    )
