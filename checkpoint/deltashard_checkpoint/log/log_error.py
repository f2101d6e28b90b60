"""Errors that prevent reading a run's log or appending to it."""

from __future__ import annotations

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import EnvironmentFault, FormatError
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import StoreUnavailable


class LogGap(EnvironmentFault):
    """The listing lacks an entry. deltashard never deletes entries: another program did, or the listing is stale."""

    cause = Cause.LOG_LOST


class LogRolledBack(LogGap):
    """The log is not the one this writer appended to: emptied, restored from an older copy, or with a corrupt tip.

    An entry appended now would be durable, but no reader would reach it.
    """


class LogRemoved(LogRolledBack):
    """The run was removed, or is being removed, while this writer was running; nothing it puts will be read."""

    cause = Cause.REMOVED


class LogStopped(FormatError):
    """An entry of the log cannot be read or breaks a rule, so nothing may be appended after it."""


class AppendUnknown(StoreUnavailable):
    """The deadline ended before the store confirmed the entry; it may still appear."""


def stopped(state: RunState) -> LogStopped:
    """Return the error that describes where and why the fold of `state` stopped."""
    bad = state.stopped
    assert bad is not None
    return LogStopped(
        f"the log cannot be followed past entry {bad.seq}: {bad.error.what}",
        where=f"run {state.run}",
        remedy="everything before it can be restored; the next attempt voids the unreadable part"
        if bad.voidable
        else "upgrade deltashard to the version that wrote it",
    )
