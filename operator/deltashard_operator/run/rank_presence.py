"""Presence of a run's ranks. Pure.

The expected number is the world size that the ranks of the newest attempt report; a group that reforms with fewer ranks
is complete. Ranks count as missing only if every pod that can hold one has reported. In per-pod runs no number is
expected.
"""

from __future__ import annotations

from collections.abc import Mapping

from deltashard_operator.fleet import report
from deltashard_operator.run.observed_object import NodeView, PodView
from deltashard_operator.run.watched_run import (
    MAX_MISSED_INTERVALS,
    NO_NODES,
    PEER_INTERVAL_S,
    LastReport,
    WatchedRun,
    live_reports,
)


def of_run(run: WatchedRun, now_s: float, nodes: Mapping[str, NodeView] = NO_NODES) -> tuple[int, int, bool]:
    """Return (expected ranks, 0 if unknown; present ranks, on ready nodes; whether ranks are known to be missing)."""
    if run.per_pod:
        return 0, 0, False
    live = {uid: each.pod for uid, each in live_reports(run, now_s, nodes).items() if run.pods[uid].alive}
    newest = max((pod.attempt for pod in live.values() if pod.ranks), default=0)
    group = [pod for pod in live.values() if pod.attempt in (0, newest)]  # 0: the attempt is being opened
    sizes = [rank.world_size for pod in group if pod.attempt == newest for rank in pod.ranks]
    expected = max(sizes, default=run.progress.world_size)
    ranks = [rank for pod in group for rank in pod.ranks]
    there = {each.rank for each in ranks if each.world_size == expected and each.rank < expected}
    present = len(there)
    if expected == run.progress.world_size and not is_known(run, now_s, nodes):
        present = max(present, run.progress.ranks_present)  # a controller restart does not remove ranks
    # Trainers that closed cleanly are not missing, and a pod without reports may hold a rank.
    all_open = all(
        uid in live and live[uid].phase is not report.SidecarPhase.CLOSED
        for uid, pod in run.pods.items()
        if _can_hold(pod, nodes)
    )
    return expected, present, 1 < expected > len(there) and all_open


def is_known(run: WatchedRun, now_s: float, nodes: Mapping[str, NodeView] = NO_NODES) -> bool:
    """Return whether presence is known: all pods that can hold a rank reported, the run is new, or the wait is over."""
    if not run.loaded_status_s or 0 < run.first_report_s < now_s - MAX_MISSED_INTERVALS * PEER_INTERVAL_S:
        return True
    return all(uid in run.last_reports for uid, pod in run.pods.items() if _can_hold(pod, nodes))


def phases(run: WatchedRun, live: Mapping[str, LastReport], *, known: bool) -> frozenset[report.SidecarPhase]:
    """Return the phases of the sidecars. Those without a trainer count only if ranks are known to be missing."""
    every = frozenset(each.pod.phase for each in live.values())
    holding = frozenset(each.pod.phase for each in live.values() if each.pod.ranks)
    if not known:
        return frozenset() if run.per_pod else holding
    return (holding or every) if 0 < run.progress.world_size <= run.progress.ranks_present else every


def _can_hold(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether the pod can hold a trainer: it has started, is alive, and its node is not known to be lost."""
    node = nodes.get(pod.node)
    return pod.alive and pod.started and (node is None or node.ready)
