"""Resolution of a run's state and of the checkpoint that the user selects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from deltashard_checkpoint.errors import FormatError
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes, read_consistent
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose
from deltashard_checkpoint.stores.abc import Store

from deltashard_cli.output import warn
from deltashard_cli.target import POLICY, Target

T = TypeVar("T")


def read_state(target: Target) -> RunState:
    """Return the state at the tip of the log. Raises `LogGap`, `StoreUnavailable` and other store errors."""
    return RunLog(target.store, target.run).refresh(deadline_s=POLICY.deadline_s)


def read_to_tip(log: RunLog) -> tuple[RunState | None, str]:
    """Return (state at the tip, "") or (None, why the log cannot be read to its tip). Raises store errors."""
    try:
        state = log.refresh(deadline_s=POLICY.deadline_s)
    except (LogGap, FormatError) as error:
        return None, error.what
    return (state, "") if state.stopped is None else (None, state.damage() or "")


def open_checkpoint(target: Target, which: str, *, state: RunState | None = None) -> OpenCheckpoint:
    """Open the checkpoint `which` of the run, with the indexes that its restore needs.

    Raises `CheckpointNotFound`, `InvalidCheckpoint`, `StoreUnavailable` and errors of the log.
    """
    if state is None:
        return with_checkpoint(target, which, lambda checkpoint: checkpoint)
    return OpenCheckpoint.of(target.store, state, choose(state, which))


def with_checkpoint(target: Target, which: str, use: Callable[[OpenCheckpoint], T]) -> T:
    """Return `use(checkpoint)` for the checkpoint `which`; starts over if the run advances meanwhile.

    Raises the errors of `open_checkpoint` and `use`.
    """
    warned: list[str] = []

    def open_and_use(state: RunState) -> T:
        if (damage := state.damage()) is not None and damage not in warned:
            warned.append(damage)
            warn(damage)
        return use(open_checkpoint(target, which, state=state))

    return read_consistent(RunLog(target.store, target.run), open_and_use, deadline_s=POLICY.deadline_s)


def compaction_indexes(store: Store, state: RunState) -> Mapping[str, Index]:
    """Return the readable indexes of all live compactions, by index key."""
    found: dict[str, Index] = {}
    for compaction in state.compactions.values():
        with suppress(FormatError):  # `verify` reports the fault
            found |= load_indexes(store, state.run, compaction.parts)
    return found
