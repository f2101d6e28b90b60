"""A run's phase: one word for what it is at, from a table read top down. Pure.

The first row whose test holds is the phase. Reports are those of sidecars that are heard; a run whose sidecars
are not heard (the controller started anew, the network is cut) keeps its phase as long as its pods are alive, because
training needs no controller.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
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

TABLE: tuple[tuple[str, Callable[[Signs], bool], Callable[[Signs], Phase]], ...] = (
    ("the workload ended", lambda s: s.finished, lambda _: Phase.FINISHED),
    (
        "no pod is alive",
        lambda s: not s.alive,
        lambda s: Phase.RECOVERING if s.started and not s.suspended else Phase.PENDING,
    ),
    (
        "no sidecar is heard",
        lambda s: not s.heard & (_BEGUN | _ABSENT | {report.Phase.RESTORING}),
        lambda s: Phase.RECOVERING if s.before is Phase.FINISHED else s.before,
    ),
    ("a trainer restores", lambda s: report.Phase.RESTORING in s.heard, lambda _: Phase.RESTORING),
    (
        "a trainer is missing",
        lambda s: bool(s.heard & _ABSENT),
        lambda s: Phase.RECOVERING if s.started else Phase.PENDING,
    ),
    (
        "ranks are missing",
        lambda s: s.missing,
        lambda s: Phase.RECOVERING if s.started else Phase.PENDING,
    ),
    ("checkpoints are not safe", lambda s: s.unsafe, lambda _: Phase.DEGRADED),
    ("all train", lambda _: True, lambda _: Phase.TRAINING),
)
"""(when, test, phase); the docs show it."""


def phase_of(signs: Signs) -> Phase:
    return next(phase(signs) for _, test, phase in TABLE if test(signs))
