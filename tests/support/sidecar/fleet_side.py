"""A sidecar as its fleet stream sees it: what it has to say, and what it was told."""

from __future__ import annotations

from deltashard_checkpoint.backoff import Backoff
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_sidecar.telemetry.incident import Incidents
from deltashard_sidecar.telemetry.metric import Metrics

SOON = Backoff(first_s=0.05, longest_s=0.1)


class Side:
    """What a sidecar would do with what it hears."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.incidents = Incidents(self.metrics)
        self.directives: list[fleet.Directive] = []
        self.asked: list[fleet.SaveRequested] = []
        self.phase = fleet.PHASE_WAITING

    def beat(self) -> fleet.Heartbeat:
        return fleet.Heartbeat(phase=self.phase, incidents=self.incidents.kept())

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def refused(self, cause: str) -> float:
        return self.value("deltashard_fleet_refusals_total", cause=cause)
