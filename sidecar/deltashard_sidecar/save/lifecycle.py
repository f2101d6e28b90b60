"""The life of one save, as data: STAGING -> STAGED -> UPLOADING -> COMMITTED | ABORTED.

`TABLE` says for every state which events may happen and where they lead; any other is a bug of ours (`IllegalEvent`).
What each state means to the rest:

- STAGING: the trainer holds blocks and stands still. Its death ends the save; nothing of it is in the log.
- STAGED: every byte is the sidecar's. From here the trainer may die and the save still commits.
- UPLOADING: every batch is encoded and every block back on the free list; packs, index and log entry remain.
- COMMITTED, ABORTED: the end; the rank may begin another.

docs/reference/save-lifecycle.md is rendered from this table.
"""

from __future__ import annotations

from enum import Enum

from deltashard_checkpoint.transition import page


class SaveState(Enum):
    """Where a save is."""

    STAGING = "STAGING"
    STAGED = "STAGED"
    UPLOADING = "UPLOADING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class SaveEvent(Enum):
    """What may happen to a save."""

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
    SaveEvent.ABORT: "the trainer gives up (stall budget, veto); its copies have stopped",
    SaveEvent.BREAK: "the stream broke or went silent; the trainer may still be writing",
    SaveEvent.ENCODED: "the last batch is encoded",
    SaveEvent.COMMIT: "the log entry exists",
    SaveEvent.FAIL: "the sidecar gives up (error, deadline, fenced, superseded)",
}

ENDED = frozenset(state for state, arrows in TABLE.items() if not arrows)


def reference() -> str:
    return page("Life of a save", "sidecar/deltashard_sidecar/save/lifecycle.py", TABLE, MEANING)
