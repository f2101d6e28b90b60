"""What keeps a run's log from being read on, or appended to."""

from __future__ import annotations

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import EnvironmentFault, FormatError
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import StoreUnavailable


class LogGap(EnvironmentFault):
    """The listing lacks an entry: entries are never deleted, so something else did that, or the listing is stale."""

    cause = Cause.LOG_LOST


class LogRolledBack(LogGap):
    """The log is not the one that this writer wrote into: emptied, restored from an older copy, or its tip has rotted.

    An entry put on top of that would be durable, and no reader would ever come to it.
    """


class LogRemoved(LogRolledBack):
    """The run was removed, or is being removed, while this writer lived: nothing it puts will ever count."""

    cause = Cause.REMOVED


class LogStopped(FormatError):
    """An entry of the log cannot be read or breaks a rule: nothing may be appended that builds on it."""


class AppendUnknown(StoreUnavailable):
    """The deadline ended before the store said whether the entry was created; it may still appear."""


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
