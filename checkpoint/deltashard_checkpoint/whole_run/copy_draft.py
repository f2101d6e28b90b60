"""What a copy is to be made of, looked at at one moment: the source's log, its indexes, and what lies at the target.

Reads only. Before the copy's `log/HINT` is there the moment is the source's newest; afterwards it is the one that HINT
promised, whatever the source did since.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltashard_checkpoint.errors import InvalidCheckpoint, UserError
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.format.object_key import validate_new_run
from deltashard_checkpoint.log.chain import closure, parts_of
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog, stopped
from deltashard_checkpoint.log.entry import Sealed, seq_of
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.replay import fold
from deltashard_checkpoint.log.run_state import RunState, Slot
from deltashard_checkpoint.maintenance.word import chosen
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes
from deltashard_checkpoint.whole_run import transcript
from deltashard_checkpoint.whole_run.transcript import Numbers

LOG_WORKERS = 16
"""Entries of a log that are read or put at once."""


class TargetTaken(UserError):
    """The run that was to be the copy is there, and is no copy of this source."""


class SourceLetGo(UserError):
    """A copy that is under way needs what the source has retired and deleted since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is to be copied, at one moment of the source."""

    source: RunLog
    target: RunLog
    state: RunState
    """Of the source, with the parts that manifests list."""
    slots: tuple[Slot, ...]
    """The source's log up to that moment; of one checkpoint only genesis."""
    seq: int | None
    """None: the whole run."""
    numbers: Numbers
    indexes: Mapping[str, Index]
    there: Mapping[str, int]
    """Objects of the target, by key relative to its root, with their sizes."""

    @property
    def seqs(self) -> frozenset[int]:
        """The checkpoints whose objects are copied."""
        return frozenset(self.state.checkpoints) if self.seq is None else closure(self.state, (self.seq,))

    @property
    def bytes(self) -> int:
        """Of all packs."""
        return sum(pack.bytes for index in self.indexes.values() for pack in index.packs)


def draft(
    source: RunLog, target: RunLog, which: str | None = None, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> Draft:
    """Look at both runs; `which`: only this checkpoint and what it builds on. Reads only.

    Where a copy of one checkpoint was begun, and `which` means another one by now (the newest, the bearer of a pinned
    name), it is the one that was begun.

    Raises `TargetTaken`, `NotCopyable` for a log that lacks entries, `InvalidCheckpoint`, what `chosen` raises, and
    store errors.
    """
    validate_new_run(target.run)
    if source.store.url == target.store.url and source.run == target.run:
        raise UserError(
            "a run cannot be copied onto itself", where=source.store.url, remedy="name another run"
        )
    state = source.refresh(deadline_s=deadline_s)
    if state.stopped is not None:
        raise stopped(state)
    there = {
        info.key[len(target.run) + 1 :]: info.size_bytes
        for space in ("data/", "layout/", "log/")
        for info in target.store.list(target.key(space))
    }
    genesis = _genesis(source, state)
    seq = chosen(state, "latest" if which is None else which).seq
    if which is not None:
        seq = _wanted(which, seq, target, _begun(state, seq, genesis, target, there))
        slots: tuple[Slot, ...] = (genesis,)
        numbers = transcript.numbered(state, seq)
    else:
        numbers = Numbers()
        # IMPORTANT: once HINT is there the copy's log is under way: it must become the one that was begun.
        state, slots = _at(source, state, _promised(target, there))
    listed = Manifests(source.store, source.run)
    wanted = closure(state, (seq,)) if which is not None else frozenset(state.checkpoints)
    try:
        state = listed.listing(state, wanted)
        parts = [part for each in sorted(wanted) for part in parts_of(state, each)]
        indexes = load_indexes(source.store, source.run, parts, deadline_s=deadline_s)
    except InvalidCheckpoint as error:
        if which is None and state.tip < source.state.tip:
            raise SourceLetGo(
                f"the copy was begun with what the source has let go since: {error.what}",
                where=error.where,
                remedy=f"copy to another name (--to-run). Where {target.run!r} is a copy that was cut short, which "
                "`deltashard ls` does not list, `deltashard rm` removes it",
            ) from error
        raise
    return Draft(
        source=source,
        target=target,
        state=state,
        slots=slots,
        seq=None if which is None else seq,
        numbers=numbers,
        indexes=indexes,
        there=there,
    )


def _wanted(which: str, seq: int, target: RunLog, begun: int | None) -> int:
    """The checkpoint to copy: `seq`, which `which` means now, unless a copy of `begun` is under way, or there.

    Raises `TargetTaken` when that is another one than a number asks for.
    """
    if begun is None or begun == seq or not which.removeprefix("seq:").isdecimal():
        return seq if begun is None else begun
    raise TargetTaken(
        f"a copy of checkpoint {begun} was begun there, or is there, and not of {seq}",
        where=f"{target.store.url}/{target.run}",
        remedy=f"-c {begun} goes on with it; `deltashard rm` removes it; or name another run",
    )


def _begun(
    state: RunState, seq: int, genesis: Sealed, target: RunLog, there: Mapping[str, int]
) -> int | None:
    """The live checkpoint of the source of which the target has a copy, or a part of one; None: it has none.

    `seq`, where its copy could be what is there; else the newest.
    """
    slots = [at for key in there if (at := seq_of(key)) is not None]
    promised = _promised(target, there)
    if not slots or promised is None:
        return None
    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        found = list(pool.map(target.read_slot, slots))
    said = {slot.entry.seq: slot.entry.writer for slot in found if isinstance(slot, Sealed)}
    if len(said) < len(slots):
        return None
    for each in (seq, *sorted(state.checkpoints, reverse=True)):
        names = transcript.writers(state, each, genesis)
        if len(names) == promised + 1 and said.items() <= dict(enumerate(names)).items():
            return each
    return None


def _at(source: RunLog, state: RunState, promised: int | None) -> tuple[RunState, tuple[Slot, ...]]:
    """(the source at its tip, or at the slot that the copy was promised to end with; its slots up to there)."""
    tip = state.tip if promised is None else promised
    if tip > state.tip:
        raise TargetTaken(
            f"the run there ends at log entry {tip}, the source at {state.tip}",
            where=f"run {state.run}",
            remedy="name another run: it is a copy of something else",
        )
    seen = frozenset(source.listed().seqs)
    if lost := [seq for seq in range(tip + 1) if seq not in seen]:
        raise transcript.lost(lost[0], source.run)
    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        slots = tuple(pool.map(source.read_slot, range(tip + 1)))
    return fold(RunState(run=source.run), slots), slots


def _genesis(source: RunLog, state: RunState) -> Sealed:
    """Slot 0; where it is lost behind a folded state, one that says the same."""
    if 0 in source.listed().seqs:
        slot = source.read_slot(0)
        if isinstance(slot, Sealed):
            return slot
    return transcript.lost_genesis(source.run, state.owner)


def _promised(target: RunLog, there: Mapping[str, int]) -> int | None:
    """The slot with which the log of a copy under way is to end; None: nothing is promised yet."""
    if "log/HINT" not in there:
        return None
    said = target.hint().seq
    return None if said < 0 else said
