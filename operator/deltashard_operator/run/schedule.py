"""Reporter selection and report intervals of sidecars, decided by the controller alone. Pure."""

from __future__ import annotations

from deltashard_operator.run.watched_run import PEER_INTERVAL_S, REPORTER_INTERVAL_S, WatchedRun

URGENT_INTERVAL_S = 5.0
CHANGED_INTERVAL_S = 15.0
CHANGED_FOR_S = 120.0
REPORTS_PER_S = 300.0
"""Reports per second that the controller accepts from all sidecars together without delay."""


def is_reporter(run: WatchedRun, pod_uid: str, now_s: float) -> bool:
    """Return whether this pod's sidecar must include the run's state in its reports, by its newest report."""
    found = run.last_reports.get(pod_uid)
    return found is not None and found.is_reporter and found.is_fresh(now_s)


def min_interval_s(live: int) -> float:
    """Return the minimum time between two reports of a sidecar with `live` live sidecars."""
    return live / REPORTS_PER_S


def next_s(run: WatchedRun, pod_uid: str, now_s: float, *, urgent: bool = False, live: int = 0) -> float:
    """Return the seconds until the next report. `urgent`: it has an open order. `live`: live sidecars of all runs."""
    found = run.last_reports.get(pod_uid)
    if urgent:
        wanted_s = URGENT_INTERVAL_S
    elif found is None or now_s - found.changed_s < CHANGED_FOR_S:
        wanted_s = CHANGED_INTERVAL_S
    else:
        wanted_s = REPORTER_INTERVAL_S if found.is_reporter else PEER_INTERVAL_S
    return max(wanted_s, min_interval_s(live))
