"""A run's phase: one word for what it is at. Pure.

Reports are those of sidecars that are heard; a run whose sidecars
are not heard (the controller started anew, the network is cut) keeps its phase as long as its pods are alive, because
training needs no controller.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deltashard_operator.fleet import report


class Phase(enum.StrEnum):
    """Phase of a run, as `kubectl get checkpointruns` shows it."""

    PENDING = "Pending"
    RESTORING = "Restoring"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    DEGRADED = "Degraded"
    FINISHED = "Finished"


TRAINS = frozenset({Phase.TRAINING, Phase.DEGRADED})
"""Phases in which steps are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs from which a phase is read."""

    finished: bool = False
    suspended: bool = False
    started: bool = False
    """Whether training ever began."""
    alive: bool = False
    """Whether a pod that can train exists."""
    heard: frozenset[report.Phase] = frozenset()
    """Phases of the sidecars that are heard."""
    missing: bool = False
    """Ranks are known to be away."""
    unsafe: bool = False
    """A condition says that checkpoints are not made or not safe."""
    before: Phase = Phase.PENDING


_BEGUN = frozenset({report.Phase.TRAINING, report.Phase.CLOSED})
_ABSENT = frozenset({report.Phase.WAITING, report.Phase.STOPPING})


def phase_of(signs: Signs) -> Phase:
    """The phase of a run with these signs: of the first test that holds."""
    begun, was = signs.started, signs.before
    if signs.finished:
        return Phase.FINISHED
    if not signs.alive:
        return Phase.RECOVERING if begun and not signs.suspended else Phase.PENDING
    if not signs.heard & (_BEGUN | _ABSENT | {report.Phase.RESTORING}):
        return Phase.RECOVERING if was is Phase.FINISHED else was
    if report.Phase.RESTORING in signs.heard:
        return Phase.RESTORING
    if signs.missing or signs.heard & _ABSENT:
        return Phase.RECOVERING if begun else Phase.PENDING
    return Phase.DEGRADED if signs.unsafe else Phase.TRAINING
