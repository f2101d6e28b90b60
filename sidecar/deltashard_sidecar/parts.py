"""Parts that the services of one sidecar process share; `Sidecar` extends them."""

from __future__ import annotations

from deltashard_sidecar.activity import Activity
from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.deciding.decider import Decider
from deltashard_sidecar.handoff import PendingUploadMarkers
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import InFlightSaves
from deltashard_sidecar.session.session import Sessions


class Parts:
    """Shared parts. Each is thread-safe and has its own lock."""

    def __init__(self, keeper: ArenaKeeper, run: Run) -> None:
        self.keeper, self.run = keeper, run
        self.settings, self.metrics, self.log = run.settings, run.metrics, run.logger
        self.sessions = Sessions()
        self.in_flight_saves = InFlightSaves()
        self.activity = Activity(run.incidents)
        self.markers = PendingUploadMarkers(run)
        self.decider = Decider(self.settings, metrics=self.metrics, log=self.log)
