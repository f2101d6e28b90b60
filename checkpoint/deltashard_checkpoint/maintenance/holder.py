"""Detection of a trainer that may still hold a run, from the store alone.

There is no lease: a trainer that is disconnected, suspended or between two saves writes nothing, so silence proves
nothing. The log does record how an attempt ended: its last commit names its reason, and a close is an end, as is the
eviction of a trainer without peers (`deciding.shutdown_reason`). An attempt without a trainer (from a rewind) has no
holder either. Every other attempt may be alive until a user confirms that it has ended. A wrong confirmation is safe,
because the log fences a trainer that is still alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_checkpoint.deciding.shutdown_reason import has_ended
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import AttemptOpened, Sealed
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.write.closing import CLOSING_WAIT_S, closing_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The newest attempt, whose trainer may be alive."""

    attempt: int
    seen_s: float
    """Last sign of life: when the newest live entry of the attempt was written, by its writer's clock."""
    workload: str
    closing: bool
    """Whether a save of the attempt is still uploading while its pod terminates."""


class RunInUse(UserError):
    """The run may be held by a living trainer."""


def holder(log: RunLog, state: RunState) -> Holder | None:
    """Return the possible holder of the run; None if there is certainly none. Raises store errors."""
    if state.attempt is None:
        return None
    try:
        slot = log.read_slot(state.attempt)
    except StoreUnavailable:
        entry = None  # removed behind a folded state: its details are unknown
        if state.attempt in log.listed(state.attempt).seqs:
            raise
    else:
        entry = slot.entry if isinstance(slot, Sealed) else None
    if entry is not None and (not isinstance(entry, AttemptOpened)):
        return None
    opened = state.attempts[state.attempt]
    last = None if opened.last_seq is None else state.checkpoints.get(opened.last_seq)
    closing = _closing(log, state.attempt)
    if last is not None and has_ended(last, opened.world_size) and not closing:
        return None
    return Holder(
        attempt=state.attempt,
        seen_s=last.at_s if last is not None else 0.0 if entry is None else entry.at_s,
        workload=opened.workload,
        closing=closing,
    )


def check_ended(log: RunLog, state: RunState, *, ended: bool, what: str) -> None:
    """Raise `RunInUse` for operation `what` if a trainer may hold the run; `ended`: a user confirms it does not."""
    if ended or (found := holder(log, state)) is None:
        return
    raise RunInUse(
        f"{what} is refused while a trainer may hold the run: attempt {found.attempt}{_workload_suffix(found)} "
        + ("is still uploading a save" if found.closing else "has not recorded its end"),
        where=f"run {state.run}",
        remedy="end the trainer (closing it records the end); if it has died, pass --ended",
    )


def not_last_trained_by(log: RunLog, state: RunState, workload: str) -> str | None:
    """Return why the run was not left by this ended workload, or None if it was. Raises store errors."""
    if state.attempt is None:
        return "no attempt was opened yet"
    opened = state.attempts[state.attempt]
    if not workload or opened.workload != workload:
        who = f"workload {opened.workload}" if opened.workload else "another trainer"
        return f"{who} opened it since, as attempt {state.attempt}"
    return "its save is still uploading" if _closing(log, state.attempt) else None


def _workload_suffix(found: Holder) -> str:
    return f" of workload {found.workload}" if found.workload else ""


def _closing(log: RunLog, attempt: int) -> bool:
    """Return whether a recent marker shows a save of this attempt in progress."""
    marks = list(log.store.list(log.key(closing_key(attempt, ""))))
    return bool(marks) and any(log.clocks.wall_s() - mark.modified_at_s < CLOSING_WAIT_S for mark in marks)
