"""Phase of a run. Pure.

A run without live reports (controller restart, network partition) keeps its phase while its pods are alive, because
training does not depend on the controller.
"""

from __future__ import annotations

import enum
from collections.abc import Set as AbstractSet

from deltashard_operator.fleet import report


class Phase(enum.StrEnum):
    """Phase of a run, as `kubectl get checkpointruns` shows it."""

    PENDING = "Pending"
    RESTORING = "Restoring"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    DEGRADED = "Degraded"
    FINISHED = "Finished"


TRAINING_PHASES = frozenset({Phase.TRAINING, Phase.DEGRADED})
"""Phases in which training makes progress."""
_NO_TRAINER = frozenset({report.SidecarPhase.WAITING, report.SidecarPhase.STOPPING})


def phase_of(
    before: Phase,
    phases: AbstractSet[report.SidecarPhase],
    *,
    alive: bool,
    started: bool,
    suspended: bool,
    missing: bool,
    unsafe: bool,
) -> Phase:
    """Return the phase of a run that is not finished.

    `phases`: phases of the live sidecars. `alive`: a pod that can train exists. `started`: training has ever begun.
    `missing`: ranks are known to be missing. `unsafe`: a problem prevents checkpoints or makes them unsafe.
    """
    if not alive:
        return Phase.RECOVERING if started and not suspended else Phase.PENDING
    if not phases - {report.SidecarPhase.UNKNOWN}:
        return Phase.RECOVERING if before is Phase.FINISHED else before
    if report.SidecarPhase.RESTORING in phases:
        return Phase.RESTORING
    if missing or phases & _NO_TRAINER:
        return Phase.RECOVERING if started else Phase.PENDING
    return Phase.DEGRADED if unsafe else Phase.TRAINING
