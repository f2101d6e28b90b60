"""Which ranks of a run are there, how far apart they are, and which of them is behind. Pure.

How many there should be, the ranks of the newest attempt say by their world size; a group that came together anew with
fewer is complete again. Ranks count as missing only where every pod that can hold one is heard: a controller that
starts, or a stream that breaks, takes nobody for lost. Where each pod is a run of its own nobody is expected.

Steps are compared at a moment that all pods looked at (`StepSample`): those in the heartbeats are of different times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator.fleet import sidecar_report
from deltashard_operator.fleet.sidecar_report import Heartbeat
from deltashard_operator.run.observed_object import NodeView, PodView
from deltashard_operator.run.watched_run import Run

NO_NODES: Mapping[str, NodeView] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """The ranks of a run."""

    expected: int = 0
    """How many there should be; 0: not known."""
    present: int = 0
    """How many are attached to a sidecar that is heard."""
    missing: bool = False
    """Whether some are known to be away."""
    skew: int | None = None
    """Steps between the first and the last of them; None: not known."""
    slowest_rank: int = 0
    slowest_pod: str = ""
    """The pod of the rank that is furthest behind; empty: they are at one step, or that is not known."""

    @property
    def complete(self) -> bool:
        return 0 < self.expected <= self.present

    @property
    def sentence(self) -> str:
        """What people read, such as `7/8`; empty where nothing is known."""
        return f"{self.present}/{self.expected}" if self.expected else ""


NOBODY = RollCall()


def of_run(run: Run, nodes: Mapping[str, NodeView] = NO_NODES) -> RollCall:
    """Ranks of a run by its newest heartbeats; `nodes`: those that are not ready hold no rank."""
    if run.parts or run.wish.runs == RUN_PER_POD:
        return NOBODY
    heard = [
        (report.hello.pod, report.heartbeat)
        for uid, report in run.reports.items()
        if report.connected and report.heartbeat is not None and (uid not in run.pods or run.pods[uid].alive)
    ]
    newest = max((beat.attempt for _, beat in heard if beat.ranks), default=0)
    group = [(pod, beat) for pod, beat in heard if beat.attempt in (0, newest)]  # 0: it is being opened
    sizes = [rank.world_size for _, beat in group if beat.attempt == newest for rank in beat.ranks]
    expected = max(sizes, default=run.progress.world_size)
    there = {
        rank.rank: pod
        for pod, beat in group
        for rank in beat.ranks
        if rank.world_size == expected and rank.rank < expected
    }
    away = expected > 1 and len(there) < expected and _all_heard(run, nodes)
    roll = RollCall(expected=expected, present=len(there), missing=away)
    steps = _steps([beat for _, beat in group], frozenset(there))
    if not steps:
        return roll
    slowest = min(steps, key=lambda rank: (steps[rank], rank))
    skew = max(steps.values()) - steps[slowest]
    return RollCall(
        expected=expected,
        present=len(there),
        missing=away,
        skew=skew,
        slowest_rank=slowest,
        slowest_pod=there[slowest] if skew else "",
    )


def _steps(beats: Iterable[Heartbeat], ranks: frozenset[int]) -> Mapping[int, int]:
    """Steps by rank at the newest moment that all these ranks were looked at; none where there is none."""
    by_time: dict[int, dict[int, int]] = {}
    for beat in beats:
        for sample in beat.samples:
            by_time.setdefault(sample.at_s, {}).update(sample.steps)
    if len(ranks) < 2:
        return {}
    return next(
        (
            {rank: steps[rank] for rank in ranks}
            for _, steps in sorted(by_time.items(), reverse=True)
            if ranks <= steps.keys()
        ),
        {},
    )


def _all_heard(run: Run, nodes: Mapping[str, NodeView]) -> bool:
    """Whether every pod that can hold a rank is heard, and none of their trainers has closed in good order."""
    for uid, pod in run.pods.items():
        if not _can_hold(pod, nodes):
            continue
        report = run.reports.get(uid)
        if report is None or not report.connected or report.heartbeat is None:
            return False
        if report.heartbeat.phase is sidecar_report.Phase.CLOSED:
            return False
    return True


def _can_hold(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Whether a trainer may be in this pod: one ever ran there, it lives, and its node is not known to be lost."""
    node = nodes.get(pod.node)
    return pod.alive and pod.started and (node is None or node.ready)
