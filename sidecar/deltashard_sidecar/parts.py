"""What the services of one sidecar process share; `Sidecar` makes it once."""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_sidecar.activity import Activity
from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.deciding.decider import Decider
from deltashard_sidecar.handoff import PendingUploadMarkers
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import InFlightSaves
from deltashard_sidecar.session.session import Sessions
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each part is thread-safe and has its own lock."""

    settings: Settings
    sessions: Sessions
    in_flight_saves: InFlightSaves
    keeper: ArenaKeeper
    run: Run
    activity: Activity
    markers: PendingUploadMarkers
    decider: Decider
    metrics: Metrics
    log: Logger
