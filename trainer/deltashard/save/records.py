"""What all parts of `save` write into and ask: saves that are asked for, failures, counts, and the current state."""

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
    """Of one Checkpointer; each is written through its own methods only."""

    requests: Requests
    failure_tracker: SaveFailureTracker
    stats: Stats
    watchdog: Watchdog
    term: TermHandler | None = None
    """None: SIGTERM is left alone."""
    state: SnapshotState = field(default_factory=SnapshotState)
    """Where the current snapshot stands."""
