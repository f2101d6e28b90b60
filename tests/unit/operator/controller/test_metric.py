"""What is said of runs at a scrape: read from them, under the workload's name, and no UID anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.run.watched_run import Run

from tests.support.operator.full_run import full_run

RUN = {"namespace": "team", "run": "train"}


class OneRun:
    """A controller that has this run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def runs(self) -> Iterator[Run]:
        return iter((self.run,))

    def unwritten(self) -> int:
        return 0


def test_evidence_costs_and_decisions_of_a_run_are_exported() -> None:
    run, metrics = full_run(), ControllerMetrics()
    metrics.follow(OneRun(run))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"deltashard_run_{name}", RUN | labels)

    assert value("trained_seconds_total") == run.trained_s
    assert value("interruptions_total", cause="Evicted", lossy="true") == 1
    assert value("interruptions_total", cause="Evicted", lossy="false") == 1
    assert value("interruptions_total", cause="Error", lossy="false") == 0
    assert value("mtbf_seconds") == run.rates.mtbf_s
    assert value("save_cost_seconds") == 0.53
    assert (value("ranks_expected"), value("ranks_present"), value("step_skew")) == (8, 2, 3)
    assert (value("stall_seconds"), value("lost_samples_share")) == (0.125, 0.00075)
    labels = {"subject": "interval", "mode": "apply", "goal": "lost-work=5m", "reachable": "false"}
    assert value("decision_info", **labels) == 1
    said = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not [each for each in said if "u-1" in each.labels.values() or "p-1" in each.labels.values()]


def test_what_was_not_measured_is_not_said() -> None:
    metrics = ControllerMetrics()
    metrics.follow(OneRun(replace(full_run(), measured=None, started_at_s=0.0)))
    for name in ("mtbf_seconds", "expected_restores", "save_cost_seconds", "restore_seconds"):
        assert metrics.registry.get_sample_value(f"deltashard_run_{name}", RUN) is None
