"""Repair of a log that cannot be followed, for `deltashard repair` and for an attempt that finds its log damaged.

Corruption or loss of an entry before the newest needs no repair: the next entry names a folded state (`folded_state`).
The remaining cases are the newest entry and damage of several objects. `salvage` keeps everything that can be read: it
folds from the newest trustworthy state, skips bad entries, and drops entries that depend on them (a checkpoint that
covers a lost one, or whose objects are missing). `repair` puts the result as a folded state, named by one new entry.
No entry is changed or deleted, and nothing under `data/` is touched. Readers start from that entry.

A running trainer is fenced by the next attempt; until then it saves based on its own state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deltashard_checkpoint.errors import (
    EnvironmentFault,
    FormatError,
    InternalBug,
    InvalidCheckpoint,
    UserError,
)
from deltashard_checkpoint.format.object_key import new_token
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.chain import closure, parts_of
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Genesis,
    Repaired,
    Sealed,
    entry_key,
    folding_writer,
    named_fold,
)
from deltashard_checkpoint.log.entry_codec import seal
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.log_error import LogGap, stopped
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.pin import live_user_entries
from deltashard_checkpoint.log.replay import EntryRefused, advance, void_slots
from deltashard_checkpoint.log.run_state import Attempt, RunState, Slot, Unreadable
from deltashard_checkpoint.stores.abc import ObjectExists


class NothingToRepair(UserError):
    """The log is healthy, or contains nothing that could be kept."""


class LogChanged(EnvironmentFault):
    """Another process appended to the log after `salvage`, so the salvaged state is incomplete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """The recoverable part of a damaged log."""

    state: RunState
    """State up to the last existing slot."""
    lost: tuple[int, ...]
    """Slots that are missing or unreadable, and those whose entries depend on them."""
    dropped: tuple[int, ...]
    """Checkpoints in the log whose objects are missing."""
    damage: str
    """Description of the damage, for display."""


def salvage(log: RunLog, *, even_newer: bool = False, deadline_s: float = DEFAULT_DEADLINE_S) -> Salvage:
    """Return what a repair would keep; read-only.

    `even_newer`: also skip intact entries that this version does not know; without it they raise `LogStopped`.
    Raises `NothingToRepair` and store errors.
    """
    try:
        found = log.refresh(deadline_s=deadline_s)
    except LogGap as gap:
        damage = gap.what
    else:
        if found.stopped is None:
            raise NothingToRepair(
                "the log is healthy: there is nothing to repair",
                where=f"run {log.run}",
                remedy="`deltashard verify` reports other problems",
            )
        damage = found.damage() or ""
    seen = log.listed()
    slots = {seq: log.read_slot(seq) for seq in seen.seqs}
    first = slots.get(0)
    if isinstance(first, Sealed) and isinstance(first.entry, Genesis) and first.entry.run != log.run:
        raise UserError(
            f"this is the log of run {first.entry.run!r}, not of {log.run!r}",
            where=log.store.url,
            remedy="name the store and --run, or the run's whole URL",
        )
    newer = next((s for _, s in sorted(slots.items()) if isinstance(s, Unreadable) and not s.voidable), None)
    if newer is not None and not even_newer:
        raise stopped(RunState(run=log.run, stopped=newer))
    state, lost = _kept(log, seen.tip, slots)
    state, dropped = _with_objects(log, state)
    committed = any(isinstance(s, Sealed) and isinstance(s.entry, Checkpoint) for s in slots.values())
    if not state.checkpoints and (committed or dropped or not slots):
        raise NothingToRepair(
            "no checkpoint could be kept",
            where=f"run {log.run}",
            remedy="`deltashard scan` lists the objects in the store",
        )
    return Salvage(state=state, lost=lost, dropped=dropped, damage=damage)


def repair(log: RunLog, found: Salvage, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
    """Make the salvaged state the run's state. Returns the seq of the repair entry. Safe to kill and run again.

    Raises `LogChanged` if another process appended meanwhile, and store errors.
    """
    log.probe(deadline_s=deadline_s)
    state = found.state
    data = folded_state.dump(state)
    name = folded_state.name_of(state, data)
    log.store.put(log.key(folded_state.fold_key(name)), data)
    seq = state.tip + 1
    sealed = seal(
        Repaired(
            seq=seq,
            previous=state.tip_hash,
            writer=folding_writer(new_token(), name),
            at_s=round(log.clocks.wall_s(), 3),
            lost=found.lost,
        )
    )
    try:
        log.store.put_if_absent(log.key(entry_key(seq)), sealed.data)
    except ObjectExists:
        if (
            log.store.get(log.key(entry_key(seq))) != sealed.data
        ):  # else: a retry after a lost acknowledgement
            raise LogChanged(
                f"log entry {seq} was written meanwhile",
                where=f"run {log.run}",
                remedy="end the trainers of this run, then repair again",
            ) from None
    # The old hint may name entries that are missing, which would make every read fail.
    log.put_hint(Hint(fold=name.seq, seq=seq))
    again = RunLog(log.store, log.run, clocks=log.clocks).refresh(deadline_s=deadline_s)
    if again.tip == seq and again != replace(state, tip=seq, tip_hash=sealed.hash, abandoned_at=seq):
        raise InternalBug("the repaired log does not read as it was written", where=f"run {log.run}")
    return seq


def _kept(log: RunLog, tip: int, slots: dict[int, Slot]) -> tuple[RunState, tuple[int, ...]]:
    """Return (state at `tip` without the lost entries, the lost slots)."""
    state = _base(log, slots)
    void = void_slots([slot for _, slot in sorted(slots.items())])
    lost: list[int] = []
    for seq in range(state.tip + 1, tip + 1):
        slot = slots.get(seq)
        if isinstance(slot, Sealed) and seq not in void:
            kept = _advanced(state, slot, lost)
            if kept is not None:
                state = kept
                continue
        if seq not in void:
            lost.append(seq)
        here = "" if slot is None else slot.hash
        state = replace(state, tip=seq, tip_hash=here)
    return state, tuple(lost)


def _base(log: RunLog, slots: dict[int, Slot]) -> RunState:
    """Return the newest folded state that an entry names, else an empty state with the first owner in the log."""
    entries = [slot.entry for _, slot in sorted(slots.items()) if isinstance(slot, Sealed)]
    for name in sorted({name for entry in entries if (name := named_fold(entry)) is not None}, reverse=True):
        try:
            return log.folds.load(name)
        except (FormatError, EnvironmentFault):
            continue
    owners = [entry.owner for entry in entries if isinstance(entry, (Genesis, AttemptOpened))]
    return RunState(run=log.run, owner=owners[0] if owners and not isinstance(slots.get(0), Sealed) else "")


def _advanced(state: RunState, slot: Sealed, lost: Iterable[int]) -> RunState | None:
    """Return `state` after an entry that may follow lost ones; None if it depends on a lost one."""
    entry = slot.entry
    state = replace(state, tip=entry.seq - 1, tip_hash=entry.previous)
    if isinstance(entry, Checkpoint) and entry.attempt not in state.attempts and entry.attempt in lost:
        state = _with_attempt(state, entry)
    try:
        return advance(state, slot)
    except EntryRefused:
        if not isinstance(entry, AttemptOpened) or entry.resumes_from is None:
            return None
    # The resumed checkpoint is lost: checkpoints that cover it are dropped, those that cover nothing stay.
    try:
        return advance(state, replace(slot, entry=replace(entry, resumes_from=None)))
    except EntryRefused:
        return None


def _with_attempt(state: RunState, entry: Checkpoint) -> RunState:
    """Return `state` with the attempt of `entry`, whose own entry is lost, reconstructed from its first commit."""
    covered = [seq for seq in entry.covered if seq in state.checkpoints]
    resumed = state.checkpoints[max(covered)] if covered else None
    opened = Attempt(
        world_size=entry.world_size,
        layout=entry.layout,
        resumes_from=None if resumed is None else resumed.seq,
        resumes_attempt=None if resumed is None else resumed.attempt,
    )
    newest = max(entry.attempt, state.attempt or 0)
    return replace(state, attempt=newest, attempts={**state.attempts, entry.attempt: opened})


def _with_objects(log: RunLog, state: RunState) -> tuple[RunState, tuple[int, ...]]:
    """Return (`state` without checkpoints that need a missing index, the seqs of those)."""
    there = {info.key for info in log.store.list(log.key("data/"))}
    manifests = Manifests(log.store, log.run)

    def whole(seq: int) -> bool:
        try:
            listed = manifests.listing(state, (seq,))
        except InvalidCheckpoint:
            return False
        return all(log.key(part.index_key) in there for part in parts_of(listed, seq))

    broken = {seq for seq in state.checkpoints if not whole(seq)}
    gone = {seq for seq in state.checkpoints if closure(state, (seq,)) & broken}
    checkpoints = {seq: c for seq, c in state.checkpoints.items() if seq not in gone}
    kept = replace(
        state,
        checkpoints=checkpoints,
        user_entries=live_user_entries(checkpoints, state.user_entries),
        detached=state.detached - gone,
        compactions={seq: c for seq, c in state.compactions.items() if seq not in gone},
    )
    return kept, tuple(sorted(gone))
