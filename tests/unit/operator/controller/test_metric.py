"""A scrape returns metrics of runs, labeled with the workload's name and without a UID."""

from __future__ import annotations

from dataclasses import replace

from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.operator.full_run import full_run


def test_only_measured_run_values_are_exported() -> None:
    metrics, runs = ControllerMetrics(), list[WatchedRun]([full_run()])
    metrics.register_runs(lambda: runs)

    def value(name: str, run: str = "train", **labels: str) -> float | None:
        labels |= {"namespace": "team", "run": run}
        return metrics.registry.get_sample_value(f"deltashard_run_{name}", labels)

    assert value("trained_seconds_total") == runs[0].trained_s
    counts = [value(f"{name}_total") for name in ("failures", "restores", "lost_steps")]
    assert counts == [3, 2, 50]
    assert (value("step_seconds"), value("save_cost_seconds")) == (0.25, 0.53)
    decision = {"subject": "interval", "goal": "lost-work=5m", "reachable": "false"}
    assert value("decision_info", **decision, value="4 min", proposed="4 min") == 1
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not [each for each in samples if {"u-1", "p-1"} & set(each.labels.values())]
    other = replace(runs[0], workload=replace(runs[0].workload, kind="Pod", uid="u-2"))
    runs += [replace(other, progress=replace(other.progress, measured=None))]
    assert value("step", run=other.name) == 1200, "the first of two runs with one name"
    assert value("save_cost_seconds", run=other.name) is None
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    keys = [(each.name, *sorted(each.labels.items())) for each in samples]
    assert len(set(keys)) == len(keys), "Prometheus would refuse the whole scrape"
    runs[0] = replace(runs[0], finished="Completed")
    assert (value("step"), value("step", run=other.name)) == (1200, None)
