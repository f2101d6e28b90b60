"""Which checkpoint is meant, and what became of one that is not there any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from deltashard_checkpoint.errors import FormatError
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.chain import CheckpointNotFound, those_live
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Retired, Sealed
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes, settled
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose
from deltashard_checkpoint.stores.abc import Store

from deltashard_cli.output import warn, when
from deltashard_cli.target import POLICY, Target

T = TypeVar("T")
_READERS = 8


def read_state(target: Target) -> RunState:
    """The run at the tip of its log. Raises `LogGap`, `StoreUnavailable` and other store errors."""
    return RunLog(target.store, target.run).refresh(deadline_s=POLICY.deadline_s)


def open_checkpoint(target: Target, which: str, *, state: RunState | None = None) -> OpenCheckpoint:
    """The checkpoint `which` of the run, with the indexes its restore needs.

    Raises `CheckpointNotFound`, `InvalidCheckpoint`, `StoreUnavailable` and what the log raises.
    """
    if state is None:
        return using(target, which, lambda checkpoint: checkpoint)
    try:
        entry = choose(state, which)
    except CheckpointNotFound as error:
        raise _retired(target, state, which) or error from None
    return OpenCheckpoint.of(target.store, state, entry)


def using(target: Target, which: str, use: Callable[[OpenCheckpoint], T]) -> T:
    """What `use` makes of the checkpoint `which`, from the start again when the run went on under it.

    Raises what `open_checkpoint` and `use` raise.
    """
    said: list[str] = []

    def turn(state: RunState) -> T:
        if (damage := state.damage()) is not None and damage not in said:
            said.append(damage)
            warn(damage)
        return use(open_checkpoint(target, which, state=state))

    return settled(RunLog(target.store, target.run), turn, deadline_s=POLICY.deadline_s)


def _retired(target: Target, state: RunState, which: str) -> CheckpointNotFound | None:
    """What became of a checkpoint that is not live: the newest one of that name that was retired, and when."""
    log = RunLog(target.store, target.run)
    with ThreadPoolExecutor(_READERS) as pool:
        there = [seq for seq in log.listed().seqs if seq <= state.tip]  # what is lost says nothing
        slots = pool.map(log.read_slot, there)
        entries = [slot.entry for slot in slots if isinstance(slot, Sealed)]
    kind, _, value = f"seq:{which}".partition(":") if which.isdecimal() else which.partition(":")
    named = {
        entry.seq: entry
        for entry in entries
        if isinstance(entry, Checkpoint)
        and (
            value in entry.pins
            if kind == "pin"
            else value == str({"seq": entry.seq, "step": entry.step}.get(kind))
        )
    }
    gone = [(seq, entry) for entry in entries if isinstance(entry, Retired) for seq in entry.checkpoints]
    for seq, retired in sorted(gone, key=lambda pair: pair[0], reverse=True):
        if seq in named:
            return CheckpointNotFound(
                f"checkpoint {seq} (step {named[seq].step}, saved {when(named[seq].at_s)}) was retired by log entry "
                f"{retired.seq}, {when(retired.at_s)}",
                where=f"run {state.run}",
                remedy=those_live(state.checkpoints.values()),
            )
    return None


def compaction_indexes(store: Store, state: RunState) -> Mapping[str, Index]:
    """The indexes of all live compactions that can be read, by index key."""
    found: dict[str, Index] = {}
    for compaction in state.compactions.values():
        with suppress(FormatError):  # `verify` says what is wrong with it
            found |= load_indexes(store, state.run, compaction.parts)
    return found
