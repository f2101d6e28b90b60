"""Lifecycle of the snapshots of one Checkpointer, as a pure state machine.

`TABLE` lists the events of each state and the resulting state; any other event raises `IllegalEvent`. One snapshot
exists at a time: during COPYING and STAGED no other snapshot or copy ahead begins. Saves requested during STAGED wait
in `request`, for the reasons listed in `snapshot_gate`. A save that a getter of `state=` or a signal handler requests
during COPYING joins the current snapshot.

- IDLE: no snapshot was taken yet, or the rows copied ahead were dropped.
- PRECOPY: rows are copied ahead of the next snapshot while training continues.
- COPYING: training waits at a boundary until rows and blobs are handed over.
- STAGED: training continues while the sidecar stores the snapshot. Its marks are pending, its handles wait.
- COMMITTED: the snapshot is durable. Its marks are cleared, and the next snapshot may be based on it.
- FAILED: the snapshot is given up. Its marks are set again, so that the next snapshot contains its rows. A late report
  of its commit (the sidecar died right after the log entry) still counts.

docs/reference/snapshot-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import after, page


class SnapshotPhase(Enum):
    """State of the current snapshot."""

    IDLE = "IDLE"
    PRECOPY = "PRECOPY"
    COPYING = "COPYING"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class SnapshotEvent(Enum):
    """Event of a snapshot's lifecycle."""

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
    SnapshotEvent.AHEAD: "a save is due soon: changed rows are tracked from here on, and a thread copies rows",
    SnapshotEvent.DROP: "rows copied ahead are unusable: the sidecar is disconnected, the tables changed, or `close()`",
    SnapshotEvent.TAKE: "a save is due or requested, and no reason blocks it",
    SnapshotEvent.SEAL: "the sidecar has all rows and blobs: the marks become pending",
    SnapshotEvent.COMMIT: "the sidecar reports the log entry",
    SnapshotEvent.FAIL: "rejected, not answered or not copied in time; or the sidecar failed, was restarted or fenced",
}


class SnapshotState:
    """State of the current snapshot; changed on the training thread only, `now` may be read from any thread."""

    def __init__(self) -> None:
        self._now = SnapshotPhase.IDLE

    @property
    def now(self) -> SnapshotPhase:
        return self._now

    def transition(self, event: SnapshotEvent) -> None:
        """Apply `event`; raises `IllegalEvent` if the current state does not allow it."""
        self._now = after(TABLE, self._now, event, where="snapshot lifecycle")


def reference() -> str:
    return page("Life of a snapshot", "trainer/deltashard/save/lifecycle.py", TABLE, MEANING)
