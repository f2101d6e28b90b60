"""Markers for saves that a terminating pod still uploads; an opener waits for them.

The wait is bounded because a killed process may leave its marker behind.
"""

from __future__ import annotations

import re

from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import StoreUnavailable

CLOSING_WAIT_S = 60.0
"""Longest wait of an opener for the save of a terminating pod, and the maximum age of a marker."""
_MARKER = re.compile(r"closing/(\d{20})/[0-9a-z-]{1,64}", re.ASCII)


def closing_key(attempt: int, name: str) -> str:
    """Return the key of a marker, relative to the run's root; `name` identifies the process (rank and token)."""
    return f"closing/{attempt:020d}/{name}"


def attempt_of_marker(key: str) -> int | None:
    """Return the attempt of a marker's key (relative to the run's root), or None for any other key."""
    match = _MARKER.fullmatch(key)
    return int(match[1]) if match else None


def mark_closing(log: RunLog, attempt: int, name: str) -> None:
    """Record that this process is still uploading a save while its pod terminates."""
    log.store.put(log.key(closing_key(attempt, name)), b"")


def unmark_closing(log: RunLog, attempt: int, name: str) -> None:
    """Remove the marker after the save has finished, committed or not."""
    log.store.delete([log.key(closing_key(attempt, name))])


def wait_for_closing(log: RunLog, *, bound_s: float) -> float:
    """Wait until no recent marker is left, at most `bound_s` seconds; return the seconds spent.

    The wait is best effort: if the store does not answer, it is skipped.
    """
    retry_budget = log.retry_budget(bound_s)
    while has_recent_marker(log, bound_s):
        if not retry_budget.pause():
            break
    return retry_budget.spent_s


def has_recent_marker(log: RunLog, bound_s: float) -> bool:
    """Return whether a recent marker exists; True as well if the store does not answer."""
    try:
        marks = list(log.store.list(log.key("closing/")))
        now_s = log.store.now_s() if marks else 0.0
    except StoreUnavailable:
        return True
    return any(now_s - mark.modified_at_s < bound_s for mark in marks)
