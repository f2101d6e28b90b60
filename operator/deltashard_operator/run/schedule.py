"""Which sidecar speaks for its run, and when each reports again. Pure; the controller alone decides it."""

from __future__ import annotations

from deltashard_operator.run.watched_run import OTHERS_BEAT_S, SPEAKER_BEAT_S, Run

URGENT_S = 5.0
CHANGED_S = 15.0
CHANGED_FOR_S = 120.0
REPORTS_PER_S = 300.0
"""What the controller takes of all sidecars together, without a hurry."""


def speaks(run: Run, pod_uid: str, now_s: float) -> bool:
    """Whether this pod's sidecar is to send the run's state, too, by its newest report."""
    found = run.heard.get(pod_uid)
    return found is not None and found.speaks and found.is_fresh(now_s)


def least_s(live: int) -> float:
    """The least time between two reports of a sidecar, of so many that are live."""
    return live / REPORTS_PER_S


def next_s(run: Run, pod_uid: str, now_s: float, *, urgent: bool = False, live: int = 0) -> float:
    """When a sidecar is to report again, in seconds from now.

    `urgent`: an order is open for it; `live`: sidecars of all runs.
    """
    found = run.heard.get(pod_uid)
    if urgent:
        wanted_s = URGENT_S
    elif found is None or now_s - found.changed_s < CHANGED_FOR_S:
        wanted_s = CHANGED_S
    else:
        wanted_s = SPEAKER_BEAT_S if found.speaks else OTHERS_BEAT_S
    return max(wanted_s, least_s(live))
