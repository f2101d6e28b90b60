"""What finished runs let one expect of others like them: those of a namespace on nodes of a kind.

Exposure and failures are of pods, so that runs of any width can be put together. A run is in its pool from its end
until its CheckpointRun is removed, days later; a new controller has the pools again when it has read those.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltashard_checkpoint.deciding.evidence import NONE, Evidence

from deltashard_operator.fleet.sidecar_report import RunKey
from deltashard_operator.run.watched_run import Run

PoolKey = tuple[str, str]
"""(namespace, pool of nodes)."""


def pool_key(run: Run) -> PoolKey:
    """Which pool a run is of."""
    return run.workload.namespace, run.node_pool


def of_pods(run: Run) -> Evidence:
    """A run's evidence as that of its pods. Where each is a run of its own it is of their mean."""
    seen, runs = run.incidents.evidence, max(run.parts, 1)
    width = max(run.width, runs)
    return Evidence(
        exposure_s=seen.exposure_s * width, lossy=seen.lossy * runs, restores=seen.restores * runs
    )


class RunPools:
    """Evidence of finished runs, by pool."""

    def __init__(self) -> None:
        self._pools: dict[PoolKey, dict[RunKey, Evidence]] = {}
        self._totals: dict[PoolKey, Evidence] = {}
        self._pool_of: dict[RunKey, PoolKey] = {}

    def of(self, run: Run) -> Evidence:
        """What a run's prior rests on."""
        key = pool_key(run)
        if key not in self._totals:
            members = self._pools.get(key)
            if not members:
                return NONE
            self._totals[key] = _sum(members.values())
        return self._totals[key]

    def follow(self, run: Run) -> None:
        """The run is as it is now: in its pool when it is finished and not any more when it has begun anew."""
        if not run.finished:
            self.leave(run.key)
        elif run.key not in self._pool_of:
            key = self._pool_of[run.key] = pool_key(run)
            self._pools.setdefault(key, {})[run.key] = of_pods(run)
            self._totals.pop(key, None)

    def leave(self, run_key: RunKey) -> None:
        """The run is removed."""
        key = self._pool_of.pop(run_key, None)
        if key is None:
            return
        del self._pools[key][run_key]
        self._totals.pop(key, None)
        if not self._pools[key]:
            del self._pools[key]


def _sum(many: Iterable[Evidence]) -> Evidence:
    total = NONE
    for each in many:
        total = total.plus(each)
    return total
