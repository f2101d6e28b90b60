"""Saves that a terminating pod still uploads: its sidecar leaves a marker, and who opens an attempt waits for it.

The wait is bounded, because that save is worth waiting for, but a marker may be left by a process that was killed.
"""

from __future__ import annotations

import re

from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import StoreUnavailable

CLOSING_WAIT_S = 60.0
"""How long an opener waits for a save that a terminating pod still uploads, and how old a marker may be."""
_MARKER = re.compile(r"closing/(\d{20})/[0-9a-z-]{1,64}", re.ASCII)


def closing_key(attempt: int, name: str) -> str:
    """Key of a marker, relative to the run's root; `name` tells the attempt's processes apart (rank and token)."""
    return f"closing/{attempt:020d}/{name}"


def attempt_of_marker(key: str) -> int | None:
    """The attempt a marker's key (relative to the run's root) speaks of; None for any other key."""
    match = _MARKER.fullmatch(key)
    return int(match[1]) if match else None


def mark_closing(log: RunLog, attempt: int, name: str) -> None:
    """This process's save is still uploading though its pod is terminating."""
    log.store.put(log.key(closing_key(attempt, name)), b"")


def unmark_closing(log: RunLog, attempt: int, name: str) -> None:
    """It has ended, committed or not."""
    log.store.delete([log.key(closing_key(attempt, name))])


def wait_for_closing(log: RunLog, *, bound_s: float) -> float:
    """Wait until no young marker is left, at most `bound_s`; the seconds spent.

    Only a courtesy: nothing but the waiting depends on markers, so a store that does not answer here is passed over.
    """
    retry_budget = log.retry_budget(bound_s)
    while has_recent_marker(log, bound_s):
        if not retry_budget.pause():
            break
    return retry_budget.spent_s


def has_recent_marker(log: RunLog, bound_s: float) -> bool:
    """Whether a young marker is there, or may be for all that the store says."""
    try:
        marks = list(log.store.list(log.key("closing/")))
        now_s = log.store.now_s() if marks else 0.0
    except StoreUnavailable:
        return True
    return any(now_s - mark.modified_at_s < bound_s for mark in marks)
