"""The snapshots of one Checkpointer as a machine: where the current one stands, and what may happen to it. Pure.

`TABLE` lists for every state which events may happen and where they lead; any other raises `IllegalEvent`. There is one
snapshot at a time: while it is COPYING or STAGED no other is begun, neither ahead nor at once. What is asked for while
it is STAGED waits in `request`, and why it waits is the table of `wait`. What a getter of `state=` or a signal's
handler asks for while it is COPYING is that snapshot itself.

- IDLE: none was taken yet, or what was copied ahead of one was dropped.
- PRECOPY: rows are copied ahead of a snapshot that is near, while training continues.
- COPYING: training waits at a boundary until rows and blobs are handed over.
- STAGED: training continues; the sidecar stores it. Its marks are pending, its handles wait.
- COMMITTED: it is durable: its marks are dropped, and the next one may be based on it.
- FAILED: it is given up: its marks are set again, so that the next one holds its rows. A commit of it that is heard of
  later (its sidecar died right after the log entry) still counts.

docs/reference/snapshot-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import after, page


class SnapshotPhase(Enum):
    """Where a snapshot is."""

    IDLE = "IDLE"
    PRECOPY = "PRECOPY"
    COPYING = "COPYING"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class SnapshotEvent(Enum):
    """What may happen to it."""

    AHEAD = "ahead"
    DROP = "drop"
    TAKE = "take"
    SEAL = "seal"
    COMMIT = "commit"
    FAIL = "fail"


_NEXT = {SnapshotEvent.AHEAD: SnapshotPhase.PRECOPY, SnapshotEvent.TAKE: SnapshotPhase.COPYING}
TABLE: dict[SnapshotPhase, dict[SnapshotEvent, SnapshotPhase]] = {
    SnapshotPhase.IDLE: _NEXT,
    SnapshotPhase.PRECOPY: {
        SnapshotEvent.TAKE: SnapshotPhase.COPYING,
        SnapshotEvent.DROP: SnapshotPhase.IDLE,
    },
    SnapshotPhase.COPYING: {
        SnapshotEvent.SEAL: SnapshotPhase.STAGED,
        SnapshotEvent.FAIL: SnapshotPhase.FAILED,
    },
    SnapshotPhase.STAGED: {
        SnapshotEvent.COMMIT: SnapshotPhase.COMMITTED,
        SnapshotEvent.FAIL: SnapshotPhase.FAILED,
    },
    SnapshotPhase.COMMITTED: _NEXT,
    SnapshotPhase.FAILED: _NEXT,
}

MEANING: dict[SnapshotEvent, str] = {
    SnapshotEvent.AHEAD: "a save is due soon: rows that change are watched from here on, and a thread copies",
    SnapshotEvent.DROP: "what was copied ahead is of no use: the sidecar is away, the tables changed, or `close()`",
    SnapshotEvent.TAKE: "a save is due or asked for, and the table of reasons to wait has none",
    SnapshotEvent.SEAL: "all rows and blobs are with the sidecar: the marks become pending",
    SnapshotEvent.COMMIT: "the sidecar reports its log entry",
    SnapshotEvent.FAIL: "refused, not answered, not copied in time; or the sidecar failed, was restarted or fenced off",
}


class SnapshotState:
    """Of the current snapshot of one Checkpointer; on the training thread only, but for reading `now`."""

    def __init__(self) -> None:
        self._now = SnapshotPhase.IDLE

    @property
    def now(self) -> SnapshotPhase:
        return self._now

    def transition(self, event: SnapshotEvent) -> None:
        """Apply `event`; raises `IllegalEvent` for one that cannot happen now."""
        self._now = after(TABLE, self._now, event, where="snapshot lifecycle")


def reference() -> str:
    return page("Life of a snapshot", "trainer/deltashard/save/lifecycle.py", TABLE, MEANING)
