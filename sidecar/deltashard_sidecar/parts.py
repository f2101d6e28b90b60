"""What the services of one sidecar process share; `Sidecar` makes it once."""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.deciding.decider import Decider
from deltashard_sidecar.fleet.activity import Activity
from deltashard_sidecar.handoff import Closings
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.flight import Flights
from deltashard_sidecar.session.session import Sessions
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each part is thread-safe and has its own lock."""

    settings: Settings
    sessions: Sessions
    flights: Flights
    keeper: ArenaKeeper
    run: Run
    activity: Activity
    closings: Closings
    decider: Decider
    metrics: Metrics
    log: Logger
