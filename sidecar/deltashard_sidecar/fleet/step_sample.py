"""The steps of this pod's ranks at moments that all pods share, so that those of a group can be compared.

Heartbeats of pods are seconds apart, and so are steps that are told in them. A step is looked at whenever the clock
passes a multiple of `EVERY_S`; pods' clocks are as close as their nodes'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deltashard_proto.v1 import fleet_pb2 as fleet

EVERY_S = 10
KEPT = 4
"""More than go by between two heartbeats of any pod."""


class StepSamples:
    """The newest samples. Written by the sidecar's tick, read by the fleet's thread: a deque of whole values."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, dict[int, int]]] = deque(maxlen=KEPT)
        self._at_s = 0

    def due(self, now_s: float) -> bool:
        """Whether a shared moment has passed since the last sample."""
        return int(now_s) // EVERY_S * EVERY_S > self._at_s

    def take(self, now_s: float, steps: Iterable[tuple[int, int]]) -> None:
        """Keep (rank, step) of now; of a moment that was missed by a second nothing is kept."""
        self._at_s = int(now_s) // EVERY_S * EVERY_S
        found = dict(steps)
        if found and now_s - self._at_s < 1.0:
            self._kept.append((self._at_s, found))

    def message(self) -> list[fleet.StepSample]:
        return [
            fleet.StepSample(at_s=at_s, ranks=list(steps), steps=list(steps.values()))
            for at_s, steps in list(self._kept)
        ]
