"""The commit log of a run on a store: the I/O shell around the pure fold.

`refresh` determines the tip by LIST only. It lists from the last known slot, which detects a stale listing (one that
lacks an entry known to exist). A gap is an error: a missing entry must never be taken for the end of the log. A 404
proves nothing about the tip. `log/HINT` is best effort: it gives a cold reader the folded state (`folded_state`) to
start from, and how far the listing must reach; a shorter listing means that the newest entries are lost.

`append` builds an entry on the state at the tip, validates it with the readers' rules, and creates the next slot with
a conditional put. If two writers compete for a slot, one wins; the other reads the winner's entry and builds again.
After an ambiguous response (time-out, reset, 412 on a retried put) the bytes in the slot decide: every put of one
entry, retries included, has identical bytes with its own writer token. If the deadline ends first, the outcome is
unknown (`AppendUnknown`) until the log is read again.

On a store that overwrites despite the create-only condition, two trainers could both win a slot. A probe before the
first append detects and rejects such a store. An entry that only frees space needs no probe: the log exists, so the
writer that started it has probed the store.

A full store must not prevent appends, least of all of entries that free space. If an append finds no room, it deletes
optional objects (all folded states except the newest, else HINT) and retries once.
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
"""Drop obsolete folded states every so many slots."""
_LISTINGS = 5
"""How many listings must show a gap before it is reported."""
_INTERRUPTED = "if a `deltashard cp` to this name, or an `rm` of it, was interrupted, run it again"

Build = Callable[[RunState, int, str], Entry | None]
"""(state, seq, writer token) -> the entry to append to that state, or None if there is nothing to append.
The log sets `previous` and `at_s`. May raise to abort the append."""


class RunLog:
    """The log of one run. Thread-safe: calls are serialised."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clocks: Clocks | None = None,
        readers: int = 16,
    ) -> None:
        """`readers`: number of concurrent GETs when many entries are new; 1 reads in the calling thread."""
        self.store = store
        self.run = validate_run(run)
        self.clocks = clocks or Clocks()
        self._readers = readers
        self._state = RunState(run=run)
        self.folds = FoldedStates(store, run)
        self._lock = threading.RLock()

    def key(self, key: str) -> str:
        """Return the store key of a key relative to the run's root."""
        return run_key(self.run, key)

    def fork(self) -> RunLog:
        """Return another handle with the same known state, so that waiting on one never delays the other."""
        other = RunLog(self.store, self.run, clocks=self.clocks, readers=self._readers)
        other._state, other.folds = self._state, self.folds.copy()
        return other

    def forget(self) -> None:
        """Reset to the state of a new handle: the known state may include lost entries."""
        with self._lock:
            self._state, self.folds = RunState(run=self.run), FoldedStates(self.store, self.run)

    @property
    def concurrent(self) -> bool:
        return self._readers > 1

    @property
    def state(self) -> RunState:
        """The last known state; `refresh` updates it."""
        return self._state

    def retry_budget(self, deadline_s: float) -> RetryBudget:
        return RetryBudget(clocks=self.clocks, deadline_s=deadline_s)

    # Reading

    def refresh(self, *, deadline_s: float = DEFAULT_DEADLINE_S, use_hint: bool = False) -> RunState:
        """Return the state at the tip that a LIST shows now.

        A cold read always reads HINT. `use_hint` reads it on a warm handle, too, at the cost of one request: it skips
        to a newer folded state, and detects a log that lost its newest entries.
        Raises `LogGap` (`LogRemoved` on a warm handle), `StoreUnavailable` after the deadline, and other store errors.
        Unreadable entries do not raise: they stop the fold (`RunState.stopped`).
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
        if state.tip < 0 or state.stopped is not None:  # the damage may have been repaired
            self._state = self._cold_read(max(state.tip, -1))
            return self._state
        hint = self.hint() if use_hint else Hint()
        if hint.fold > state.tip:  # the entries in between need not be read
            self._state = self._cold_read(state.tip)
            return self._state
        slots = self._read(range(state.tip + 1, self._list(state.tip, hint.seq).tip + 1))
        try:
            state = fold(state, slots)
        except VoidedAfterFold:
            # Only an attempt that voids an unreadable slot causes this. It is rare, so everything is read again.
            state = self._cold_read(state.tip)
        if state.stopped is not None:
            # IMPORTANT: this handle's state may be of an obsolete log (a store restored from an older copy, and
            # continued). Only damage that the log itself shows is corruption: the next attempt voids it.
            state = self._cold_read(state.tip)
        self._state = state
        self.folds.learn(slots)
        return state

    def _cold_read(self, known: int) -> RunState:
        """Read the state without prior knowledge, except that slot `known` exists.

        Starts from the newest fold that the log names, else from genesis. HINT gives the start of the listing and its
        minimum end.
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
        """Return the state from the newest fold that a later entry names; None if there is none."""
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
            # IMPORTANT: a fold is valid only if a valid entry, reached from that fold, names it.
            end = seen.tip + 1 if state.stopped is None else state.stopped.seq
            counts = set(range(name.seq + 1, end)) - void_slots(slots)
            if any(fold_named_by(read[seq]) == name for seq in counts):
                self.folds.learn(slots)
                return state
        return None

    def hint(self) -> Hint:
        """Read HINT; store errors are raised."""
        try:
            return Hint.of(self.store.get(self.key("log/HINT")))
        except ObjectNotFound:
            return Hint()

    def _list(self, known: int, floor: int = -1, *, from_fold: bool = False) -> Listing:
        """List the dense slots from `known` (-1: all); with `from_fold`, gaps before the newest fold are allowed.

        IMPORTANT: only a LIST determines the tip. HINT may be wrong and a GET may miss a recent put; a writer that
        relied on either would build its entry on a log that is not the run's.
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
            # IMPORTANT: HINT is written after the entry that it names, so that entry existed. If the shorter listing
            # were accepted, losing the newest entries would silently resume from an older step, or none.
            raise LogGap(
                f"the log ends at entry {seen.tip}, and {floor} was written (recorded in {self.key('log/HINT')}): the "
                "newest entries are gone",
                where=f"{self.store.url}/{self.key('log/')}",
                remedy=f"{_INTERRUPTED}. Else restore the objects from a copy or a version; `deltashard repair` "
                "continues without them",
            )
        return seen

    def listed(self, first: int = 0) -> Listing:
        """List slots from `first` on, and folded states."""
        start_after = entry_key(first - 1) if first > 0 else "log/"
        found = self.store.list(self.key("log/"), start_after=self.key(start_after))
        return listing((info.key[len(self.run) + 1 :] for info in found), first)

    def _gap(self, missing: int, tip: int) -> LogGap:
        return LogGap(
            f"log entry {missing} is missing, but entry {tip} exists",
            where=f"{self.store.url}/{self.key('log/')}",
            remedy=f"{_INTERRUPTED}. Else restore the object from a copy or a version (deltashard never deletes "
            "entries); `deltashard repair` continues without it",
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
        """Read one entry. Unparsable bytes are read again; a slot is unreadable only if two reads agree."""
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
        """Return the bytes of one entry, read like `read_slot`."""
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
        """Append the entry that `build` returns for the state at the tip; None if it returns None.

        `before` and `after` name the crash points around the put. `voiding` allows an entry after a stopped log.
        `frees`: the entry only frees space, so no probe is written.
        Raises `LogStopped`, `LogRolledBack`, `EntryRefused`, `AppendUnknown`, `ConditionalPutUnsupported`, `StoreFull`
        if no room could be made, and the errors of `build` and `refresh`.
        """
        with self._lock:
            try:
                return self._append(build, before, after, deadline_s, voiding, frees=frees, folds=True)
            except StoreFull:
                if not self._make_room():
                    raise
                # Do not put a folded state: it would use the room again.
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
        """`folds`: whether a folded state may be put, for the entry to name."""
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
                # The state may be stale: retry with the state at the slot.
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
        """Check that the entry at the tip still exists and has the known hash; else raise `LogRolledBack`.

        IMPORTANT: a store that was emptied or rolled back accepts appends as usual. Only this check shows a running
        writer that its commits would follow a hole, or belong to a log that no longer exists.
        """
        while state.tip >= 0:
            try:
                slot = self.read_slot(state.tip)
            except StoreUnavailable:
                try:  # a 404 is inconclusive, a listing is not
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
                    f"log entry {state.tip} is not the entry that was written or read before"
                )
            return

    def _rolled_back(self, what: str) -> LogRolledBack:
        return LogRolledBack(
            f"the log was rolled back while this writer was running: {what}",
            where=f"{self.store.url}/{self.key('log/')}",
            remedy="the store was emptied, restored from an older copy, or damaged: repair it, or end training and "
            "its sidecar (in a cluster: delete the pod); a new one continues from the store's content at that time",
        )

    def _is_removed(self) -> bool:
        hint = self.hint()
        return hint == REMOVAL or (hint.seq < 0 and not self.listed().seqs)

    def removed(self) -> LogRemoved:
        """Return the error of a writer whose run no longer exists."""
        place = f"{self.store.url}/{self.run}"
        return LogRemoved(
            f"run {self.run!r} was removed, or its store emptied, while this writer was running",
            where=place,
            remedy="nothing more of it is saved: restart its trainer to begin a new run, or end it. Objects of a save "
            f"in progress remain under data/: `deltashard rm {place}` removes them",
        )

    def _create(self, sealed: Sealed, retry_budget: RetryBudget) -> bool:
        """Whether this entry took the slot: True, False (another entry has it) or `AppendUnknown`.

        IMPORTANT: the put is create-only, with the same bytes at every retry; after any response except success the
        bytes in the slot decide. Different bytes on a retry, or trusting a 404, could count one entry twice or
        overwrite another.
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
                        remedy="the outcome is known once the store answers again",
                    ) from error
            else:
                return True
            if not retry_budget.pause():
                raise AppendUnknown(f"log entry {sealed.entry.seq} could not be read back in time", where=key)

    def _resolve_slot(self, sealed: Sealed) -> bool | None:
        """After "exists": True if the slot holds this entry, False if not, None if it cannot be read now."""
        try:
            slot = self.read_slot(sealed.entry.seq)
        except StoreUnavailable:
            return None
        return isinstance(slot, Sealed) and slot.data == sealed.data

    def _update_hint(self, sealed: Sealed) -> None:
        """Best effort: update HINT and drop obsolete folds. Losing either only slows down a cold reader."""
        seq = sealed.entry.seq
        self.folds.learn([sealed])
        # IMPORTANT: the entry is durable. Errors from here on must not make the append look failed.
        with suppress(Exception), deadline(BEST_EFFORT_S):
            self.put_hint(Hint(fold=self.folds.newest_seq, seq=seq))
            if seq % _DROP_EVERY == 0:
                self.folds.drop_old()

    def _make_room(self) -> bool:
        """Delete, in a full store, all folded states except the newest, else HINT. Returns whether any existed.

        Entries do not depend on them. Raises store errors.
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
        """Check now, as the first append would, that the store honours create-only puts.

        Raises `ConditionalPutUnsupported`, `StoreUnavailable` after the deadline, and other store errors.
        """
        self._probe(self.retry_budget(deadline_s))

    def _probe(self, retry_budget: RetryBudget) -> None:
        if not is_probed(self.store):
            probe(self.store, self.key(f"probe/{new_token()}"), pause=retry_budget.pause)


def _by_number(slots: Iterable[Slot]) -> dict[int, Slot]:
    return {slot.entry.seq if isinstance(slot, Sealed) else slot.seq: slot for slot in slots}
