"""Lifecycle of a save as a table: STAGING -> STAGED -> UPLOADING -> COMMITTED | ABORTED.

`TABLE` has the valid events of each state and their next states; any other event is a bug (`IllegalEvent`).

- STAGING: the trainer holds blocks, and training is paused. Its death ends the save without a trace in the log.
- STAGED: the sidecar has all data. The save commits even if the trainer dies.
- UPLOADING: every batch is encoded and every block is free again; packs, index and log entry remain.
- COMMITTED, ABORTED: final; the rank may begin another save.

docs/reference/save-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import page


class SaveState(Enum):
    """State of a save."""

    STAGING = "STAGING"
    STAGED = "STAGED"
    UPLOADING = "UPLOADING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class SaveEvent(Enum):
    """Event in the life of a save."""

    SEAL = "seal"
    ABORT = "abort"
    BREAK = "break"
    ENCODED = "encoded"
    COMMIT = "commit"
    FAIL = "fail"


TABLE: dict[SaveState, dict[SaveEvent, SaveState]] = {
    SaveState.STAGING: {
        SaveEvent.SEAL: SaveState.STAGED,
        SaveEvent.ABORT: SaveState.ABORTED,
        SaveEvent.BREAK: SaveState.ABORTED,
        SaveEvent.FAIL: SaveState.ABORTED,
    },
    SaveState.STAGED: {SaveEvent.ENCODED: SaveState.UPLOADING, SaveEvent.FAIL: SaveState.ABORTED},
    SaveState.UPLOADING: {SaveEvent.COMMIT: SaveState.COMMITTED, SaveEvent.FAIL: SaveState.ABORTED},
    SaveState.COMMITTED: {},
    SaveState.ABORTED: {},
}

MEANING: dict[SaveEvent, str] = {
    SaveEvent.SEAL: "every block is handed over",
    SaveEvent.ABORT: "the trainer cancels (stall budget, veto); its copies have stopped",
    SaveEvent.BREAK: "the stream broke or went silent; the trainer may still be writing",
    SaveEvent.ENCODED: "the last batch is encoded",
    SaveEvent.COMMIT: "the log entry exists",
    SaveEvent.FAIL: "the sidecar cancels (error, deadline, fenced, superseded)",
}

ENDED = frozenset(state for state, arrows in TABLE.items() if not arrows)


def reference() -> str:
    return page("Life of a save", "sidecar/deltashard_sidecar/save/lifecycle.py", TABLE, MEANING)
