"""What is said of runs at a scrape: read from them, under the workload's name, and no UID anywhere."""

from __future__ import annotations

from dataclasses import replace

from deltashard_operator.controller.metric import MAX_WHY, ControllerMetrics
from deltashard_operator.run.watched_run import Run
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator.full_run import DECISION, changed, full_run

WHY = f"{DECISION.why}, {DECISION.bound}"


class OneRun:
    """A controller that has this run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = ControllerMetrics()
        self.metrics.follow(lambda: (self.run,))

    def value(self, name: str, **labels: str) -> float | None:
        labels |= {"namespace": "team", "run": "train"}
        return self.metrics.registry.get_sample_value(f"deltashard_run_{name}", labels)

    def decided(self, **fields: str) -> set[tuple[str, str]]:
        """(value, why) of each decision that is said when this is what was decided."""
        decision = changed(DECISION, **fields)
        self.run = replace(self.run, progress=replace(self.run.progress, decisions=(decision,)))
        return {
            (sample.labels["value"], sample.labels["why"])
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "deltashard_run_decision_info"
        }


def test_what_is_known_of_a_run_is_exported_and_what_was_not_measured_is_not() -> None:
    one = OneRun(full_run())
    assert one.value("trained_seconds_total") == one.run.trained_s
    assert one.value("interruptions_total", cause="Evicted") == 1
    assert (one.value("failures_total"), one.value("restores_total"), one.value("lost_steps_total")) == (
        one.run.failures,
        2,
        50,
    )
    assert (one.value("ranks_expected"), one.value("ranks_present")) == (8, 2)
    assert (one.value("stall_seconds"), one.value("lost_samples_share")) == (0.125, 0.00075)
    assert (one.value("step_seconds"), one.value("save_cost_seconds")) == (0.25, 0.53)
    labels = {"subject": "interval", "goal": "lost-work=5m", "reachable": "false"}
    assert one.value("decision_info", **labels, value="4 min", would="4 min", why=WHY) == 1
    said = [sample for family in one.metrics.registry.collect() for sample in family.samples]
    assert not [each for each in said if {"u-1", "p-1"} & set(each.labels.values())]
    one.run = replace(one.run, progress=replace(one.run.progress, measured=None))
    assert one.value("save_cost_seconds") is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=20))
def test_there_are_as_many_series_of_a_decision_as_it_changed(history: list[tuple[str, int]]) -> None:
    """Each save measures its figures anew; the sentence in the label is the one that came with what holds."""
    one, held, said = OneRun(full_run()), "", ""
    for value, figure in history:
        why = f"because of {figure}"
        if value != held:
            held, said = value, why
        assert one.decided(value=value, why=why, bound="") == {(held, said)}


def test_a_long_sentence_is_cut_and_a_run_that_is_gone_is_forgotten() -> None:
    one = OneRun(full_run())
    ((_, why),) = one.decided(why="x" * 500, bound="")
    assert why == "x" * (MAX_WHY - 3) + "..."
    one.run = replace(one.run, finished="Completed")
    assert one.decided() == set()
    one.run = replace(one.run, finished="")
    assert one.decided(why="anew", bound="") == {("4 min", "anew")}
