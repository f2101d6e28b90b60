"""The state of a run: a pure fold over the entries of its log.

`fold` takes slots in order and returns an immutable `RunState`. `validate_entry` checks each entry against the state
before it: older attempts are fenced, snapshot ids increase, covered checkpoints are live and in the lineage, no entry
references a retired prefix, and a retire entry keeps every remaining chain intact. Writers validate their own entry
against the state at its slot before the put, and a slot is created only on top of the entry that `previous` names. So
writers and readers always agree, and a healthy log breaks no rule.

An entry that breaks a rule (corruption, a malicious or broken writer) or cannot be read *stops* the fold:
`state.stopped` has its position and the reason, everything before it stays restorable, and gc is blocked. If its bytes
are really bad (not merely newer than this library), the next attempt may set `voids=k`: every reader then ignores the
slots from k up to that attempt's entry. The commits in them are lost, so this is reported as damage.

Retired prefixes are remembered until a reclaim entry confirms that their objects are deleted, so a state is as large as
its live and retired checkpoints. Forgetting a prefix is always safe. A snapshot's prefix is retired only if the
snapshot can never be committed any more, which follows from its attempt and number alone. A compaction that began
before a forgotten one cannot be committed. Objects under a forgotten prefix (a put that arrived late) are orphaned:
they are retired again and deleted after another grace period.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from deltashard_checkpoint.errors import FormatError
from deltashard_checkpoint.format.object_key import compaction_slot
from deltashard_checkpoint.log import chain
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    Entry,
    Genesis,
    Ignored,
    Part,
    Pinned,
    Reclaimed,
    Repaired,
    Retired,
    Rewound,
    Sealed,
    snapshot_of,
)
from deltashard_checkpoint.log.pin import UserEntry, live_user_entries
from deltashard_checkpoint.log.run_state import Attempt, RunState, Slot, Unreadable


class EntryRefused(FormatError):
    """An entry breaks a rule of the log, given the entries before it."""


class VoidedAfterFold(FormatError):
    """Slots that were already folded are now void: fold again from before them."""


def fold(state: RunState, slots: Sequence[Slot]) -> RunState:
    """Return `state` after `slots`, which must follow its tip without a gap. Pure.

    Ignores slots that a later attempt in `slots` voids. Raises `VoidedAfterFold` if an attempt voids a slot that
    `state` already includes; the caller must then fold again from before it.
    """
    if not slots:
        return state
    base = state.tip + 1
    void = void_slots(slots)
    if void and min(void) < base:
        raise VoidedAfterFold(
            f"slots from {min(void)} were made void after they were folded", where=f"run {state.run}"
        )
    for position, slot in enumerate(slots):
        seq = base + position
        if seq in void or state.stopped is not None:
            state = replace(state, tip=seq, tip_hash=slot.hash)
        elif isinstance(slot, Unreadable):
            state = replace(state, tip=seq, tip_hash=slot.hash, stopped=slot)
        else:
            try:
                state = advance(state, slot)
            except EntryRefused as error:
                bad = Unreadable(seq=seq, error=error, voidable=True, hash=slot.hash)
                state = replace(state, tip=seq, tip_hash=slot.hash, stopped=bad)
    return state


def void_slots(slots: Iterable[Slot]) -> frozenset[int]:
    """Return the void slots: ranges voided by attempts that are not void themselves; the latest attempt wins."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if (
            isinstance(slot, Sealed)
            and isinstance(slot.entry, AttemptOpened)
            and slot.entry.voids is not None
        ):
            start, stop = slot.entry.voids, slot.entry.seq
            ranges = [r for r in ranges if not start <= r[1] < stop]
            ranges.append((start, stop))
    return frozenset(seq for start, stop in ranges for seq in range(start, stop))


def advance(state: RunState, sealed: Sealed) -> RunState:
    """Return `state` after one more entry; raises `EntryRefused` if the entry breaks a rule. Pure."""
    entry = sealed.entry
    validate_entry(state, entry)
    state = replace(state, tip=entry.seq, tip_hash=sealed.hash)
    match entry:
        case Genesis():
            return replace(state, owner=entry.owner)
        case AttemptOpened():
            resumed = None if entry.resumes_from is None else state.checkpoints[entry.resumes_from]
            opened = Attempt(
                world_size=entry.world_size,
                resumes_from=entry.resumes_from,
                resumes_attempt=None if resumed is None else resumed.attempt,
                last_step=None if resumed is None else resumed.step,
                workload=entry.workload,
                pod=entry.pod,
                layout=entry.layout,
            )
            return replace(
                state,
                owner=entry.owner,
                attempt=entry.seq,
                attempts={**state.attempts, entry.seq: opened},
                abandoned_at=entry.seq if entry.voids is not None else _next_abandoned_at(state),
            )
        case Checkpoint():
            opened = replace(
                state.attempts[entry.attempt],
                last_snapshot=entry.snapshot_id,
                last_seq=entry.seq,
                last_step=entry.step,
            )
            return replace(
                state,
                attempts={**state.attempts, entry.attempt: opened},
                checkpoints={**state.checkpoints, entry.seq: entry},
                committed=state.committed + 1,
            )
        case Compacted():
            before = chain.prefixes_of(state, entry.replaces)
            return replace(
                state,
                compactions={**state.compactions, entry.replaces: entry},
                superseded={**state.superseded, **dict.fromkeys(sorted(before), entry.replaces)},
            )
        case Retired():
            gone, prefixes = frozenset(entry.checkpoints), frozenset(entry.prefixes)
            kept = {seq: c for seq, c in state.checkpoints.items() if seq not in gone}
            return replace(
                state,
                checkpoints=kept,
                user_entries=live_user_entries(kept, state.user_entries),
                detached=state.detached - gone,
                compactions={seq: c for seq, c in state.compactions.items() if seq not in gone},
                superseded={p: seq for p, seq in state.superseded.items() if p not in prefixes},
                retired={
                    **state.retired,
                    **dict.fromkeys(sorted(prefixes - state.retired.keys()), entry.seq),
                },
            )
        case Pinned():
            user_entries = {**state.user_entries, entry.name: UserEntry(entry.seq, entry.checkpoint)}
            return replace(state, user_entries=live_user_entries(state.checkpoints, user_entries))
        case Rewound():
            return _apply_rewind(state, entry)
        case Reclaimed():
            forgotten = reclaimable(state, entry.through)
            begun = [slot for prefix in forgotten if (slot := compaction_slot(prefix)) is not None]
            return replace(
                state,
                retired={prefix: seq for prefix, seq in state.retired.items() if prefix not in forgotten},
                compactions_from=max([state.compactions_from, *(slot + 1 for slot in begun)]),
            )
        case Repaired():
            return replace(state, abandoned_at=entry.seq)
    return state


def _next_abandoned_at(state: RunState) -> int | None:
    """Return `abandoned_at` after one more attempt; attempts that never committed do not clear it."""
    newest = -1 if state.attempt is None else state.attempt
    committed = newest >= 0 and state.attempts[newest].last_seq is not None
    return (
        None
        if state.abandoned_at is not None and newest >= state.abandoned_at and committed
        else state.abandoned_at
    )


def _apply_rewind(state: RunState, entry: Rewound) -> RunState:
    """Return `state` after a rewind: like an attempt without ranks that resumes from `entry.to`.

    Later checkpoints become detached, and those already detached on another branch stay so. A rewind to a detached
    checkpoint re-attaches that checkpoint's lineage.
    """
    to = state.checkpoints[entry.to]
    opened = Attempt(
        world_size=0, resumes_from=entry.to, resumes_attempt=to.attempt, last_step=to.step, layout=""
    )
    attempts = {**state.attempts, entry.seq: opened}
    line = frozenset(chain.lineage(replace(state, attempts=attempts), entry.seq))
    detached = {seq for seq in state.checkpoints if seq > entry.to} | (state.detached - line)
    return replace(state, attempt=entry.seq, attempts=attempts, detached=frozenset(detached))


def validate_entry(state: RunState, entry: Entry) -> None:  # noqa: C901
    """Raise `EntryRefused` if `entry` must not follow `state`. Pure.

    IMPORTANT: writers apply these rules before a put (through `commit_log.RunLog.append`), readers when they fold. A
    rule that only one side applied would let two processes disagree about a run's history.
    """
    if entry.seq != state.tip + 1:
        raise _refused(entry, f"it was folded after slot {state.tip}")
    void_before = isinstance(entry, AttemptOpened) and entry.voids is not None
    if entry.previous != state.tip_hash and not void_before:
        raise _refused(entry, "`previous` does not match the hash of the entry before it")
    match entry:
        case Genesis():
            _validate_genesis(state, entry)
        case _ if state.tip < 0:
            raise _refused(entry, "a log begins with genesis")
        case AttemptOpened():
            _validate_attempt(state, entry)
        case Checkpoint():
            _validate_checkpoint(state, entry)
        case Compacted():
            _validate_compact(state, entry)
        case Retired():
            _validate_retire(state, entry)
        case Pinned():
            if entry.checkpoint is not None and entry.checkpoint not in state.checkpoints:
                raise _refused(entry, f"it pins {entry.checkpoint}, which is not live")
        case Rewound():
            if entry.to not in state.checkpoints:
                raise _refused(entry, f"it rewinds to {entry.to}, which is not live")
        case Reclaimed():
            if entry.through >= entry.seq:
                raise _refused(entry, f"it reclaims up to slot {entry.through}, which is not before it")
        case Ignored() | Repaired():
            pass


def _refused(entry: Entry, why: str) -> EntryRefused:
    return EntryRefused(f"log entry {entry.seq} breaks a rule: {why}", where=f"log slot {entry.seq}")


def _validate_genesis(state: RunState, entry: Genesis) -> None:
    if state.tip >= 0:
        raise _refused(entry, "only slot 0 is genesis")
    if entry.run != state.run:
        raise _refused(entry, f"it is of run {entry.run!r}, not {state.run!r}")


def _validate_attempt(state: RunState, entry: AttemptOpened) -> None:
    if entry.owner != state.owner and not entry.takeover:
        raise _refused(entry, f"{entry.owner!r} opens an attempt of {state.owner!r} without takeover")
    if entry.resumes_from is not None and entry.resumes_from not in state.checkpoints:
        raise _refused(entry, f"it resumes from {entry.resumes_from}, which is not live")


def _validate_checkpoint(state: RunState, entry: Checkpoint) -> None:
    opened = state.attempts.get(entry.attempt)
    if opened is None:
        raise _refused(entry, f"attempt {entry.attempt} was never opened")
    if entry.attempt != state.attempt:
        raise _refused(entry, f"attempt {entry.attempt} is fenced by attempt {state.attempt}")
    if opened.last_snapshot is not None and entry.snapshot_id <= opened.last_snapshot:
        raise _refused(
            entry, f"snapshot {entry.snapshot_id} is not newer than snapshot {opened.last_snapshot}"
        )
    if opened.last_step is not None and entry.step < opened.last_step:
        raise _refused(entry, f"step {entry.step} is before step {opened.last_step} of the lineage")
    if entry.world_size != opened.world_size:
        raise _refused(entry, f"{entry.world_size} parts of {opened.world_size} ranks")
    if entry.layout != opened.layout:
        raise _refused(entry, f"its layout {entry.layout or 'none'} is not its attempt's")
    _validate_covers(state, entry)
    _validate_prefixes(state, entry, entry.prefixes)


def _validate_covers(state: RunState, entry: Checkpoint) -> None:
    """Check that covered checkpoints are live and in the lineage: otherwise their rows have no source."""
    for covers in entry.covered:
        if not chain.in_lineage(state, entry.attempt, covers):
            raise _refused(
                entry, f"it covers {covers}, which is not live in the lineage of attempt {entry.attempt}"
            )
        if state.checkpoints[covers].layout != entry.layout:
            raise _refused(entry, f"it covers {covers}, which has another layout")


def _validate_prefixes(state: RunState, entry: Entry, prefixes: AbstractSet[str]) -> None:
    if dead := sorted(prefixes & state.retired.keys()):
        raise _refused(entry, f"it references {dead[0]}, which is retired and may be deleted")


def _validate_compact(state: RunState, entry: Compacted) -> None:
    replaced = state.checkpoints.get(entry.replaces)
    if replaced is None:
        raise _refused(entry, f"it replaces {entry.replaces}, which is not live")
    if replaced.listed is not None:
        raise _refused(entry, f"it replaces {entry.replaces}, whose parts a manifest lists")

    def boxes(parts: Iterable[Part]) -> list[tuple[str, int, int, int, int]]:
        return sorted(
            (b.table, b.row_start, b.row_stop, b.col_start, b.col_stop) for part in parts for b in part.boxes
        )

    if boxes(entry.parts) != boxes(replaced.parts):
        raise _refused(entry, f"its boxes are not those of checkpoint {entry.replaces}")
    prefixes = {part.prefix for part in entry.parts}
    if prefixes & chain.live_prefixes(state):
        raise _refused(entry, "it re-uses the prefix of another compaction")
    _validate_prefixes(state, entry, prefixes)
    _validate_start_slot(state, entry, prefixes)


def _validate_start_slot(state: RunState, entry: Compacted, prefixes: set[str]) -> None:
    """Reject a compaction as old as a forgotten one: it may be that one, already retired and deleted."""
    for prefix in sorted(prefixes):
        slot = compaction_slot(prefix)
        if slot is not None and slot < state.compactions_from:
            raise _refused(
                entry,
                f"it began at slot {slot}; objects of compactions from before {state.compactions_from} may be deleted",
            )


def _validate_retire(state: RunState, entry: Retired) -> None:
    gone = frozenset(entry.checkpoints)
    if unknown := sorted(gone - state.checkpoints.keys()):
        raise _refused(entry, f"it retires {unknown[0]}, which is not live")
    kept = state.checkpoints.keys() - gone
    current = state.checkpoints.keys() - state.detached or state.checkpoints.keys()
    if current and current <= gone:
        raise _refused(entry, "it retires every checkpoint")
    if torn := sorted(chain.closure(state, kept) & gone):
        raise _refused(entry, f"it retires {torn[0]}, which a remaining checkpoint's chain reads")
    if (resuming_from := state.resuming_from()) is not None:
        # Its trainers may be reading it now, with a plan made before a later compaction.
        reading = chain.closure(state, (resuming_from,), written=True)
        if torn := sorted(reading & gone):
            raise _refused(
                entry,
                f"it retires {torn[0]}, which the newest attempt, resuming from {resuming_from}, may read",
            )
        if named := sorted(p for p in entry.prefixes if state.superseded.get(p) in reading):
            raise _refused(entry, f"it names {named[0]}, which the newest attempt may still read")
    live = {prefix for seq in kept for prefix in chain.prefixes_of(state, seq)}
    for prefix in entry.prefixes:
        if prefix in live:
            raise _refused(entry, f"it names {prefix}, which a live checkpoint reads")
        place = snapshot_of(prefix)
        if place is not None and not is_uncommittable(state, *place):
            raise _refused(entry, f"it names {prefix}, whose snapshot may still be committed")
        if is_protected(state, prefix):
            raise _refused(entry, f"it names {prefix}, which may belong to a voided or lost entry")


def is_protected(state: RunState, prefix: str) -> bool:
    """Whether `prefix` may belong to an entry that the newest attempt or repair abandoned.

    A user who recovers the entry, for example from a copy, still needs its data.
    """
    if state.abandoned_at is None or prefix in state.superseded:
        return False
    place = snapshot_of(prefix)
    begun = compaction_slot(prefix) if place is None else place[0]
    if begun is not None and begun >= state.abandoned_at:
        return False
    return all(
        prefix not in state.checkpoints[seq].prefixes and prefix not in chain.prefixes_of(state, seq)
        for seq in state.checkpoints
    )


def reclaimable(state: RunState, through: int) -> frozenset[str]:
    """Return the retired prefixes named up to slot `through` that may be forgotten once they are empty.

    Excludes compactions whose names lack their start slot (written before this rule): only the retired set prevents
    those from being committed.
    """
    return frozenset(
        prefix
        for prefix, named_by in state.retired.items()
        if named_by <= through and (snapshot_of(prefix) is not None or compaction_slot(prefix) is not None)
    )


def is_uncommittable(state: RunState, attempt: int, snapshot_id: int) -> bool:
    """Whether this snapshot can never be committed: a higher attempt, or an equal or later snapshot, is in the log."""
    opened = state.attempts.get(attempt)
    if state.attempt is None or attempt > state.attempt:
        return False
    return attempt < state.attempt or (
        opened is not None and opened.last_snapshot is not None and snapshot_id <= opened.last_snapshot
    )
