"""Which ranks of a run are there, how far apart they are, and which of them is behind. Pure.

How many there should be, the ranks of the newest attempt say by their world size; a group that came together anew with
fewer is complete again. Ranks count as missing only where every pod that lives is heard: a controller that starts, or
a stream that breaks, takes nobody for lost. Where each pod is a run of its own nobody is expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_operator.fleet import sidecar_report
from deltashard_operator.run.watched_run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """The ranks of a run."""

    expected: int = 0
    """How many there should be; 0: not known."""
    present: int = 0
    """How many are attached to a sidecar that is heard."""
    missing: bool = False
    """Whether some are known to be away."""
    skew: int = 0
    """Steps between the first and the last of them."""
    slowest_rank: int = 0
    slowest_pod: str = ""
    """The pod of the rank that is furthest behind; empty: they are at one step, or there is one."""

    @property
    def sentence(self) -> str:
        """What people read, such as `7/8`; empty where nothing is known."""
        return f"{self.present}/{self.expected}" if self.expected else ""


NOBODY = RollCall()


def of_run(run: Run) -> RollCall:
    """Ranks of a run by its newest heartbeats."""
    if run.parts:
        return NOBODY
    heard = [
        (report.hello.pod, report.heartbeat)
        for uid, report in run.reports.items()
        if report.connected and report.heartbeat is not None and (uid not in run.pods or run.pods[uid].alive)
    ]
    newest = max((beat.attempt for _, beat in heard if beat.ranks), default=0)
    sizes = [rank.world_size for _, beat in heard if beat.attempt == newest for rank in beat.ranks]
    expected = max(sizes, default=run.progress.world_size)
    steps = {
        rank.rank: (rank.step, pod)
        for pod, beat in heard
        for rank in beat.ranks
        if rank.world_size == expected and rank.rank < expected
    }
    if not steps:
        return RollCall(expected=expected, missing=_all_heard(run) and expected > 1)
    slowest = min(steps, key=lambda rank: (steps[rank][0], rank))
    skew = max(step for step, _ in steps.values()) - steps[slowest][0]
    return RollCall(
        expected=expected,
        present=len(steps),
        missing=len(steps) < expected and _all_heard(run),
        skew=skew,
        slowest_rank=slowest,
        slowest_pod=steps[slowest][1] if skew else "",
    )


def _all_heard(run: Run) -> bool:
    """Whether every pod that lives is heard, and none of their trainers has closed in good order."""
    for uid, pod in run.pods.items():
        report = run.reports.get(uid)
        if not pod.alive:
            continue
        if report is None or not report.connected or report.heartbeat is None:
            return False
        if report.heartbeat.phase is sidecar_report.Phase.CLOSED:
            return False
    return True
