"""What is said of runs at a scrape: read from them, under the workload's name, and no UID anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deltashard_operator.controller.metric import MAX_WHY, ControllerMetrics
from deltashard_operator.run.watched_run import Run
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator.full_run import changed, full_run

RUN = {"namespace": "team", "run": "train"}


WHY = (
    "a failure loses at most 5 min, 58 s of them until a save is durable, "
    "not below 58 s (a save takes 58 s to be durable)"
)


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
    assert value("step_seconds") == 0.25
    labels = {"subject": "interval", "goal": "lost-work=5m", "reachable": "false"}
    assert value("decision_info", **labels, value="4 min", would="4 min", why=WHY) == 1
    said = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not [each for each in said if "u-1" in each.labels.values() or "p-1" in each.labels.values()]


def test_what_was_not_measured_is_not_said() -> None:
    metrics = ControllerMetrics()
    metrics.follow(OneRun(replace(full_run(), measured=None, started_at_s=0.0)))
    for name in ("mtbf_seconds", "expected_restores", "save_cost_seconds", "restore_seconds"):
        assert metrics.registry.get_sample_value(f"deltashard_run_{name}", RUN) is None


def series(metrics: ControllerMetrics) -> set[tuple[str, str]]:
    """(value, why) of each decision that is said."""
    return {
        (sample.labels["value"], sample.labels["why"])
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "deltashard_run_decision_info"
    }


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=20))
def test_there_are_as_many_series_of_a_decision_as_it_changed(history: list[tuple[str, int]]) -> None:
    """Each save measures its figures anew; the sentence in the label is the one that came with what holds."""
    run, metrics = full_run(), ControllerMetrics()
    one = OneRun(run)
    metrics.follow(one)
    (made,) = run.decisions
    held, said = None, ""
    for value, figure in history:
        now = changed(made, value=value, why=f"because of {figure}", bound="")
        one.run = replace(run, decisions=(now,))
        if value != held:
            held, said = value, now.why
        assert series(metrics) == {(held, said)}


def test_a_long_sentence_is_cut_and_a_run_that_is_gone_is_forgotten() -> None:
    run, metrics = full_run(), ControllerMetrics()
    one = OneRun(run)
    metrics.follow(one)
    (made,) = run.decisions
    one.run = replace(run, decisions=(changed(made, why="x" * 500, bound=""),))
    ((_, why),) = series(metrics)
    assert why == "x" * (MAX_WHY - 3) + "..."
    one.run = replace(run, finished="Completed")
    assert series(metrics) == set()
    one.run = replace(run, decisions=(changed(made, why="anew", bound=""),))
    assert series(metrics) == {("4 min", "anew")}
