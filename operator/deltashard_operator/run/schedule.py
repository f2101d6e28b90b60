"""Which sidecar speaks for its run, and when each reports again. Pure; the controller alone decides it."""

from __future__ import annotations

from deltashard_operator.run.watched_run import PEER_INTERVAL_S, REPORTER_INTERVAL_S, WatchedRun

URGENT_INTERVAL_S = 5.0
CHANGED_INTERVAL_S = 15.0
CHANGED_FOR_S = 120.0
REPORTS_PER_S = 300.0
"""What the controller takes of all sidecars together, without a hurry."""


def is_reporter(run: WatchedRun, pod_uid: str, now_s: float) -> bool:
    """Whether this pod's sidecar is to send the run's state, too, by its newest report."""
    found = run.last_reports.get(pod_uid)
    return found is not None and found.is_reporter and found.is_fresh(now_s)


def min_interval_s(live: int) -> float:
    """The least time between two reports of a sidecar, of so many that are live."""
    return live / REPORTS_PER_S


def next_s(run: WatchedRun, pod_uid: str, now_s: float, *, urgent: bool = False, live: int = 0) -> float:
    """When a sidecar is to report again, in seconds from now.

    `urgent`: an order is open for it; `live`: sidecars of all runs.
    """
    found = run.last_reports.get(pod_uid)
    if urgent:
        wanted_s = URGENT_INTERVAL_S
    elif found is None or now_s - found.changed_s < CHANGED_FOR_S:
        wanted_s = CHANGED_INTERVAL_S
    else:
        wanted_s = REPORTER_INTERVAL_S if found.is_reporter else PEER_INTERVAL_S
    return max(wanted_s, min_interval_s(live))
