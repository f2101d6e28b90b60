"""State shared by the parts of `save`: requests, failures, counters and the current snapshot's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltashard.attach.term_signal import TermHandler
from deltashard.save.failure_tracker import SaveFailureTracker
from deltashard.save.handle import Stats
from deltashard.save.lifecycle import SnapshotState
from deltashard.save.request import Requests
from deltashard.save.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecords:
    """Shared state of a Checkpointer; each field is written through its own methods only."""

    requests: Requests
    failure_tracker: SaveFailureTracker
    stats: Stats
    watchdog: Watchdog
    term: TermHandler | None = None
    """None if no SIGTERM handler is installed."""
    state: SnapshotState = field(default_factory=SnapshotState)
    """State of the current snapshot."""
