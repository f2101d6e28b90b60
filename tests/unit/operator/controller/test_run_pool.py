"""Finished runs feed the prior of others of their namespace and nodes, and of nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_checkpoint.deciding.evidence import NONE, Evidence
from deltashard_operator.controller import run_pool
from deltashard_operator.controller.run_pool import RunPools
from deltashard_operator.run import run_record
from deltashard_operator.run.incident import Incidents
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.watched_run import Progress, Run

HOUR_S = 3600.0
SEEN = Evidence(exposure_s=10 * HOUR_S, lossy=2.0, restores=3.0)


def run(name: str, namespace: str = "team", **more: Any) -> Run:
    workload = Workload(namespace=namespace, kind="Job", name=name, uid=f"uid-of-{name}")
    fields: dict[str, Any] = {"incidents": Incidents(evidence=SEEN), "width": 4, "node_pool": "a3"} | more
    return Run(workload=workload, **fields)


def test_a_run_is_in_its_pool_from_its_end_until_it_is_removed() -> None:
    pools, one = RunPools(), run("one")
    pools.follow(one)
    assert pools.of(run("two")) == NONE
    over = replace(one, finished="Completed")
    for _ in range(2):
        pools.follow(over)
    assert pools.of(run("two")) == Evidence(exposure_s=40 * HOUR_S, lossy=2.0, restores=3.0), "of pods"
    pools.follow(replace(run("two"), finished="Failed"))
    assert pools.of(run("three")).lossy == 4.0
    pools.follow(one)  # a StatefulSet that came back
    assert pools.of(run("three")).lossy == 2.0
    pools.leave(run("two").key)
    pools.leave(run("two").key)
    assert pools.of(run("three")) == NONE


def test_pools_are_of_a_namespace_and_of_nodes_of_a_kind() -> None:
    pools = RunPools()
    pools.follow(run("one", finished="Completed"))
    assert pools.of(run("x", namespace="other")) == NONE
    assert pools.of(run("x", node_pool="cpu")) == NONE


def test_pods_that_are_runs_of_their_own_count_each() -> None:
    """Their evidence is of the mean of them."""
    found = run_pool.of_pods(run("one", progress=Progress(attempts={str(n): 1 for n in range(4)})))
    assert found == Evidence(exposure_s=40 * HOUR_S, lossy=8.0, restores=12.0)


def test_a_pool_makes_the_next_prior_and_comes_back_from_statuses() -> None:
    over = replace(run("one"), finished="Completed", started_at_s=1.0, finished_at_s=5.0)
    document = run_record.document(over) | {"status": run_record.status(over, 9.0)}
    pools = RunPools()
    pools.follow(run_record.run_of(document))
    fresh = run("two", incidents=Incidents())
    known = replace(fresh, pool=pools.of(fresh))
    pod_s = (30 * 24 + 40) * HOUR_S / 3
    assert known.rates.mtbf_s == pytest.approx(pod_s / 4)
    assert fresh.rates.mtbf_s == pytest.approx(30 * 24 * HOUR_S / 4)
