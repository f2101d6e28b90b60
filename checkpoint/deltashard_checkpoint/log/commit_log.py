"""The commit log of a run on a store: the shell around the pure fold.

`refresh` learns the tip from a LIST and nothing else. It lists from the slot it already knows, so that a stale
listing (one that lacks what is known to exist) is noticed, and a gap is an error: a missing entry must never look
like an end. A 404 proves nothing about the tip. `log/HINT` is best effort: it tells a cold reader near which folded
state (`folded_state`) to begin and how far the listing must at least reach, or the newest entries are gone.

`append` builds an entry against the state at the tip, judges it by the very law of the readers, and creates the slot
after the tip, create-only. Two writers can want the same slot: one wins, the loser reads what won, and builds anew.
An ambiguous answer (time-out, reset, 412 on a retried put) is settled by the bytes in the slot: every put of one
entry, retries included, has identical bytes with its own writer token. Only when the deadline ends first is the
outcome left open (`AppendUnknown`), and then it is the log that will tell.

A store that overwrites where it was asked to create would let two trainers believe they won one slot; it is found
out by a probe before the first append, and refused. An entry that only frees space is not preceded by that write: its
log exists, so whoever began it has proven the store.

A full store must not keep an entry from being written, least of all one that frees space. So an entry that finds no
room takes that of what only helps readers: the folded states but the newest, else HINT. Then it is tried once more.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from deltashard_checkpoint.backoff import Clocks, RetryBudget
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import FormatError, UnsupportedVersion
from deltashard_checkpoint.format.object_key import new_token, run_key, validate_run
from deltashard_checkpoint.log.entry import (
    Entry,
    Sealed,
    entry_key,
    folding_writer,
)
from deltashard_checkpoint.log.entry_codec import parse, seal
from deltashard_checkpoint.log.folded_state import BEST_EFFORT_S, READS, FoldedStates, fold_named_by
from deltashard_checkpoint.log.listing import REMOVAL, Hint, Listing, listing
from deltashard_checkpoint.log.log_error import AppendUnknown, LogGap, LogRemoved, LogRolledBack, stopped
from deltashard_checkpoint.log.replay import EntryRefused, VoidedAfterFold, advance, fold, void_slots
from deltashard_checkpoint.log.run_state import RunState, Slot, Unreadable
from deltashard_checkpoint.stores.abc import (
    ObjectExists,
    ObjectNotFound,
    Store,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.stores.probe import is_probed, probe

DEFAULT_DEADLINE_S = 120.0
_DROP_EVERY = 8
"""Slots between looks for folded states that are not needed any more."""
_LISTINGS = 5
"""A listing with a gap is asked for again so many times before the gap is believed."""
_INTERRUPTED = "where a `deltashard cp` to this name, or an `rm` of it, was cut short, call it again"

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
        """`frame_applier`: entries fetched at once when many are new; 1 fetches in the calling thread."""
        self.store = store
        self.run = validate_run(run)
        self.clocks = clocks or Clocks()
        self._readers = readers
        self._state = RunState(run=run)
        self.folds = FoldedStates(store, run)
        self._lock = threading.RLock()

    def key(self, key: str) -> str:
        """The store key of a key that is relative to the run's root."""
        return run_key(self.run, key)

    def fork(self) -> RunLog:
        """Another handle on this log that begins with what this one knows: waiting in one never delays the other."""
        other = RunLog(self.store, self.run, clocks=self.clocks, readers=self._readers)
        other._state, other.folds = self._state, self.folds.copy()
        return other

    def forget(self) -> None:
        """Begin as a new handle does: what this one knows may be of entries that are lost."""
        with self._lock:
            self._state, self.folds = RunState(run=self.run), FoldedStates(self.store, self.run)

    @property
    def concurrent(self) -> bool:
        return self._readers > 1

    @property
    def state(self) -> RunState:
        """As last seen; `refresh` brings it up to date."""
        return self._state

    def retry_budget(self, deadline_s: float) -> RetryBudget:
        return RetryBudget(clocks=self.clocks, deadline_s=deadline_s)

    # Reading

    def refresh(self, *, deadline_s: float = DEFAULT_DEADLINE_S, use_hint: bool = False) -> RunState:
        """The state at the tip that a LIST shows now.

        `use_hint`: HINT is read by who knows the run already, too (who does not always reads it): one request more,
        for whoever is about to build on what may lie far behind, or be the rest of a log that lost its newest entries.
        Raises `LogGap` (`LogRemoved` who knew the run), `StoreUnavailable` past the deadline, and whatever the store
        answers. Unreadable entries do not raise: they stop the fold (`RunState.stopped`).
        """
        with self._lock:
            retry_budget = self.retry_budget(deadline_s)
            gaps = 0
            while True:
                try:
                    return self._refresh_once(use_hint=use_hint)
                except LogGap as gap:
                    gaps += 1
                    if gaps >= _LISTINGS or not retry_budget.pause():
                        if self._state.tip >= 0 and self._is_removed():
                            raise self.removed() from gap
                        raise
                except StoreUnavailable:
                    if not retry_budget.pause():
                        raise

    def _refresh_once(self, *, use_hint: bool) -> RunState:
        state = self._state
        if state.tip < 0 or state.stopped is not None:  # what stopped the fold may have been mended meanwhile
            self._state = self._cold_read(max(state.tip, -1))
            return self._state
        hint = self.hint() if use_hint else Hint()
        if hint.fold > state.tip:  # what lies between need not be read
            self._state = self._cold_read(state.tip)
            return self._state
        slots = self._read(range(state.tip + 1, self._list(state.tip, hint.seq).tip + 1))
        try:
            state = fold(state, slots)
        except VoidedAfterFold:
            # Only an attempt that voids an unreadable slot leads here: rare, so everything is simply read again.
            state = self._cold_read(state.tip)
        if state.stopped is not None:
            # IMPORTANT: what this handle knew may be of a log that is no more (a store restored from an older copy,
            # and gone on). Only what the log alone shows may be called rot: the next attempt leaves that behind.
            state = self._cold_read(state.tip)
        self._state = state
        self.folds.learn(slots)
        return state

    def _cold_read(self, known: int) -> RunState:
        """The state for whoever knows nothing (`known`: but that this slot exists).

        From the newest fold that the log vouches for, else from genesis. HINT says where the listing may begin, and how
        far it must go.
        """
        hint = self.hint()
        floor = max(hint.seq, known)
        if hint.fold > 0:
            some = self.listed(hint.fold)
            if some.seqs and some.tip >= floor and (state := self._from_fold(some)) is not None:
                return state
        whole = self._list(-1, floor, from_fold=True)
        if (state := self._from_fold(whole)) is not None:
            return state
        if (missing_slot := whole.missing_slot(-1)) is not None:
            raise self._gap(missing_slot, whole.tip)
        slots = self._read(range(whole.tip + 1))
        self.folds.learn(slots)
        return fold(RunState(run=self.run), slots)

    def _from_fold(self, seen: Listing) -> RunState | None:
        """The state from the newest fold that an entry behind it vouches for; None when there is none."""
        read: dict[int, Slot] = {}
        for name in seen.folds:
            if not seen.first - 1 <= name.seq < seen.tip or seen.missing_slot(name.seq) is not None:
                continue
            wanted = range(name.seq + 1, seen.tip + 1)
            try:
                state = self.folds.load(name)
                read |= _by_number(self._read([seq for seq in wanted if seq not in read]))
                slots = [read[seq] for seq in wanted]
                state = fold(state, slots)
            except FormatError:  # VoidedAfterFold is one
                continue
            # IMPORTANT: only the log makes a fold more than a file: an entry that counts, and that was reached from it.
            end = seen.tip + 1 if state.stopped is None else state.stopped.seq
            counts = set(range(name.seq + 1, end)) - void_slots(slots)
            if any(fold_named_by(read[seq]) == name for seq in counts):
                self.folds.learn(slots)
                return state
        return None

    def hint(self) -> Hint:
        """What HINT says; store errors are raised."""
        try:
            return Hint.of(self.store.get(self.key("log/HINT")))
        except ObjectNotFound:
            return Hint()

    def _list(self, known: int, floor: int = -1, *, from_fold: bool = False) -> Listing:
        """The slots from `known` on (all from -1), none of which is missing; `from_fold`: unless behind a fold.

        IMPORTANT: the tip is what a LIST shows. HINT may point anywhere and a GET may miss what was just put: a writer
        that took either for the tip would build its entry on a log that is not the run's.
        """
        seen = self.listed(max(known, 0))
        if not from_fold and (missing_slot := seen.missing_slot(known - 1)) is not None:
            raise self._gap(missing_slot, seen.tip)
        if seen.tip < known:
            raise LogGap(
                f"the listing ends before log entry {known}, which exists",
                where=f"{self.store.url}/{self.key('log/')}",
                remedy="the store must list what was put; or the entry was deleted: restore it from a copy",
            )
        if seen.tip < floor:
            if self._exists(floor):
                raise StoreUnavailable(
                    f"stale listing: it ends at {seen.tip}, but entry {floor} exists", where=self.key("log/")
                )
            # IMPORTANT: HINT is written after the entry that it names, so that entry was there. Read as the end, the
            # loss of the newest entries would be an older step, or none, without a word.
            raise LogGap(
                f"the log ends at entry {seen.tip}, and {floor} was written ({self.key('log/HINT')} says so): the "
                "newest entries are gone",
                where=f"{self.store.url}/{self.key('log/')}",
                remedy=f"{_INTERRUPTED}. Else restore the objects from a copy or a version; `deltashard repair` goes on "
                "without them",
            )
        return seen

    def listed(self, first: int = 0) -> Listing:
        """What a LIST shows from slot `first` on."""
        start_after = entry_key(first - 1) if first > 0 else "log/"
        found = self.store.list(self.key("log/"), start_after=self.key(start_after))
        return listing((info.key[len(self.run) + 1 :] for info in found), first)

    def _gap(self, missing: int, tip: int) -> LogGap:
        return LogGap(
            f"log entry {missing} is missing, {tip} is there",
            where=f"{self.store.url}/{self.key('log/')}",
            remedy=f"{_INTERRUPTED}. Else entries are never deleted by deltashard: restore the object from a copy or a "
            "version; `deltashard repair` goes on without it",
        )

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
        data, found = self._read_twice(seq)
        if isinstance(found, Sealed):
            return found
        return Unreadable(
            seq=seq,
            error=found,
            voidable=not isinstance(found, UnsupportedVersion),
            hash=hashlib.sha256(data).hexdigest(),
        )

    def slot_bytes(self, seq: int) -> bytes:
        """The bytes of one entry, read as `read_slot` reads it: what does not parse was there twice."""
        return self._read_twice(seq)[0]

    def _read_twice(self, seq: int) -> tuple[bytes, Sealed | FormatError]:
        before: bytes | None = None
        for _ in range(READS):
            try:
                data = self.store.get(self.key(entry_key(seq)))
            except ObjectNotFound:
                raise StoreUnavailable(f"listed log entry {seq} is not found", where=entry_key(seq)) from None
            try:
                return data, parse(data, seq)
            except FormatError as error:
                if data == before:
                    return data, error
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
        frees: bool = False,
    ) -> Sealed | None:
        """Append what `build` makes of the state at the tip; None when it made nothing.

        `before` and `after` name the crash points around the put. `voiding` lets an entry follow a stopped log.
        `frees`: the entry only frees space, so no probe is written before it.
        Raises `LogStopped`, `LogRolledBack`, `EntryRefused`, `AppendUnknown`, `ConditionalPutUnsupported`, `StoreFull`
        when no room could be made, and what `build` and `refresh` raise.
        """
        with self._lock:
            try:
                return self._append(build, before, after, deadline_s, voiding, frees=frees, folds=True)
            except StoreFull:
                if not self._make_room():
                    raise
                # A folded state would take the room again.
                return self._append(build, before, after, deadline_s, voiding, frees=frees, folds=False)

    def _append(
        self,
        build: Build,
        before: str,
        after: str,
        deadline_s: float,
        voiding: bool,
        *,
        frees: bool,
        folds: bool,
    ) -> Sealed | None:
        """`folds`: a folded state may be put, which the entry names."""
        retry_budget = self.retry_budget(deadline_s)
        if not frees:
            self._probe(retry_budget)
        if self._state.tip < 0:
            self.refresh(deadline_s=retry_budget.left_s)
        while True:
            state = self._state
            if state.stopped is not None and not voiding:
                raise stopped(state)
            entry = build(state, state.tip + 1, new_token())
            if entry is None:
                return None
            self._check_tip(state, retry_budget)
            entry = replace(entry, previous=state.tip_hash, at_s=round(self.clocks.wall_s(), 3))
            if folds and (name := self.folds.put(state)) is not None:
                entry = replace(entry, writer=folding_writer(entry.writer, name))
            sealed = seal(entry)
            try:
                following = advance(replace(state, stopped=None), sealed)
            except EntryRefused:
                # Perhaps only because this state is old: what counts is the state at the slot.
                if self.refresh(deadline_s=retry_budget.left_s).tip > state.tip:
                    continue
                raise
            crash_point(before)
            if self._create(sealed, retry_budget):
                crash_point(after)
                self._state = following
                self._update_hint(sealed)
                return sealed
            if self.refresh(deadline_s=retry_budget.left_s).tip <= state.tip and not retry_budget.pause():
                raise StoreUnavailable(
                    f"log entry {sealed.entry.seq} exists, but no listing shows it",
                    where=self.key("log/"),
                )

    def _check_tip(self, state: RunState, retry_budget: RetryBudget) -> None:
        """Whether the entry that the next one follows is still there, and the one we know; else `LogRolledBack`.

        IMPORTANT: a store that was emptied, or went back in time, takes an entry like any other. Only this look tells a
        living writer that what it calls durable is behind a hole, or hangs on a log that is not there any more.
        """
        while state.tip >= 0:
            try:
                slot = self.read_slot(state.tip)
            except StoreUnavailable:
                try:  # a 404 proves nothing, a listing does
                    self.refresh(deadline_s=retry_budget.left_s)
                except LogRemoved:
                    raise
                except LogGap as gap:
                    raise self._rolled_back(gap.what) from gap
                if not retry_budget.pause():
                    raise
                continue
            if slot.hash != state.tip_hash:
                raise self._rolled_back(
                    f"log entry {state.tip} is another one than was written or read before"
                )
            return

    def _rolled_back(self, what: str) -> LogRolledBack:
        return LogRolledBack(
            f"the log is not what it was while this writer lived: {what}",
            where=f"{self.store.url}/{self.key('log/')}",
            remedy="the store was emptied, restored from an older copy, or damaged: mend it, or end training and "
            "its sidecar (in a cluster: delete the pod): a new one goes on from what the store holds then",
        )

    def _is_removed(self) -> bool:
        hint = self.hint()
        return hint == REMOVAL or (hint.seq < 0 and not self.listed().seqs)

    def removed(self) -> LogRemoved:
        """The error of a writer whose run is not there any more."""
        place = f"{self.store.url}/{self.run}"
        return LogRemoved(
            f"run {self.run!r} was removed, or its store emptied, while this writer lived",
            where=place,
            remedy="nothing more of it is saved: restart its trainer to begin the run anew, or end it. What a save has "
            f"put that was under way is left below data/: `deltashard rm {place}` removes it",
        )

    def _create(self, sealed: Sealed, retry_budget: RetryBudget) -> bool:
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
                won = self._resolve_slot(sealed)
                if won is not None:
                    return won
            except StoreUnavailable as error:
                if retry_budget.left_s <= 0:
                    raise AppendUnknown(
                        f"log entry {sealed.entry.seq} may or may not have been created: {error.what}",
                        where=key,
                        remedy="the log will tell once the store answers again",
                    ) from error
            else:
                return True
            if not retry_budget.pause():
                raise AppendUnknown(f"log entry {sealed.entry.seq} could not be read back in time", where=key)

    def _resolve_slot(self, sealed: Sealed) -> bool | None:
        """After "exists": ours, another's (or nobody's: bad bytes), or (None) not to be read just now."""
        try:
            slot = self.read_slot(sealed.entry.seq)
        except StoreUnavailable:
            return None
        return isinstance(slot, Sealed) and slot.data == sealed.data

    def _update_hint(self, sealed: Sealed) -> None:
        """Best effort: HINT, and folds that are not needed any more go. Losing either costs a cold reader time."""
        seq = sealed.entry.seq
        self.folds.learn([sealed])
        # IMPORTANT: the entry is durable. Whatever goes wrong from here on must not look as if it were not.
        with suppress(Exception), deadline(BEST_EFFORT_S):
            self.put_hint(Hint(fold=self.folds.newest_seq, seq=seq))
            if seq % _DROP_EVERY == 0:
                self.folds.drop_old()

    def _make_room(self) -> bool:
        """Delete, in a full store, the folded states but the newest, else HINT; whether there were any.

        The entries are whole without them. Raises store errors.
        """
        if self.folds.make_room():
            return True
        spare = [info.key for info in self.store.list(self.key("log/HINT"))]
        self.store.delete(spare)
        return bool(spare)

    def put_hint(self, hint: Hint) -> None:
        """Put `log/HINT`; store errors are raised."""
        self.store.put(self.key("log/HINT"), hint.data)

    def probe(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Find out now what the first append would: whether the store creates where it was asked to, and only there.

        Raises `ConditionalPutUnsupported`, `StoreUnavailable` past the deadline, and whatever the store answers.
        """
        self._probe(self.retry_budget(deadline_s))

    def _probe(self, retry_budget: RetryBudget) -> None:
        if not is_probed(self.store):
            probe(self.store, self.key(f"probe/{new_token()}"), pause=retry_budget.pause)


def _by_number(slots: Iterable[Slot]) -> dict[int, Slot]:
    return {slot.entry.seq if isinstance(slot, Sealed) else slot.seq: slot for slot in slots}
