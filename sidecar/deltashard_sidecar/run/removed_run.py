"""A run that a person removes while its trainer lives: noticed by a save, and from then on nothing is written.

Training goes on, and each save is refused at its begin. What looks like it may pass (a directory that was mounted
elsewhere for a while): a save that begins looks whether the log is there again.
"""

from __future__ import annotations

from contextlib import suppress

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.stores.deadline import deadline

LOOK_S = 1.0
"""For that look: training waits for the save's begin."""


class RemovedRun:
    """Whether this sidecar's run was removed. Thread-safe: its one field is replaced as a whole."""

    def __init__(self) -> None:
        self.why: str | None = None
        """For people; None: it was not, as far as is known."""

    def noticed(self, why: str) -> None:
        """A save, or an open, found the log gone."""
        self.why = why

    def forget(self) -> None:
        self.why = None

    def look(self, log: RunLog, attempt: int) -> str | None:
        """Why a save of this attempt may write nothing; None: it may. Asks the store only after a removal."""
        if self.why is not None:
            with suppress(DeltashardError), deadline(LOOK_S):
                if log.state.tip < 0:
                    log.store.head(log.key(entry_key(attempt)))
                    self.why = None
                elif log.read_slot(log.state.tip).hash == log.state.tip_hash:
                    self.why = None
        return self.why
