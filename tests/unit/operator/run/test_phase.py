"""Phases by table, and conditions whose times move only when they do."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.fleet import report
from deltashard_operator.run import condition
from deltashard_operator.run import phase as phases
from deltashard_operator.run.condition import Condition, fact
from deltashard_operator.run.phase import Phase, Signs
from hypothesis import given
from hypothesis import strategies as st

P = report.Phase
CASES: list[tuple[str, dict[str, Any], Phase]] = [
    ("nothing yet", {}, Phase.PENDING),
    ("a pod, no trainer", {"alive": True, "heard": {P.WAITING}}, Phase.PENDING),
    ("the first restore", {"alive": True, "heard": {P.RESTORING}}, Phase.RESTORING),
    ("training", {"alive": True, "started": True, "heard": {P.TRAINING}}, Phase.TRAINING),
    ("closed", {"alive": True, "started": True, "heard": {P.CLOSED}}, Phase.TRAINING),
    ("the pod is lost", {"started": True, "before": Phase.TRAINING}, Phase.RECOVERING),
    ("suspended", {"started": True, "suspended": True, "before": Phase.TRAINING}, Phase.PENDING),
    (
        "one of two waits",
        {"alive": True, "started": True, "heard": {P.TRAINING, P.WAITING}},
        Phase.RECOVERING,
    ),
    (
        "one of two restores",
        {"alive": True, "started": True, "heard": {P.TRAINING, P.RESTORING}},
        Phase.RESTORING,
    ),
    (
        "one of four is away",
        {"alive": True, "started": True, "heard": {P.TRAINING}, "missing": True},
        Phase.RECOVERING,
    ),
    (
        "unsafe",
        {"alive": True, "started": True, "heard": {P.TRAINING}, "unsafe": True},
        Phase.DEGRADED,
    ),
    ("unsafe, but restoring", {"alive": True, "heard": {P.RESTORING}, "unsafe": True}, Phase.RESTORING),
    ("not heard", {"alive": True, "started": True, "before": Phase.DEGRADED}, Phase.DEGRADED),
    (
        "a new pod that is not heard yet",
        {"alive": True, "started": True, "before": Phase.RECOVERING},
        Phase.RECOVERING,
    ),
    ("came back after its end", {"alive": True, "started": True, "before": Phase.FINISHED}, Phase.RECOVERING),
    ("over", {"finished": True, "alive": True, "heard": {P.TRAINING}, "unsafe": True}, Phase.FINISHED),
]


@pytest.mark.parametrize(("signs", "phase"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_phase_is_read_from_the_signs(signs: dict[str, Any], phase: Phase) -> None:
    heard = frozenset(signs.pop("heard", ()))
    assert phases.phase_of(Signs(heard=heard, **signs)) is phase


@given(
    st.builds(
        Signs,
        finished=st.booleans(),
        suspended=st.booleans(),
        started=st.booleans(),
        alive=st.booleans(),
        heard=st.frozensets(st.sampled_from(P)),
        missing=st.booleans(),
        unsafe=st.booleans(),
        before=st.sampled_from(Phase),
    )
)
@pytest.mark.slow
def test_every_combination_has_a_phase_and_finished_means_what_it_says(signs: Signs) -> None:
    phase = phases.phase_of(signs)
    assert (phase is Phase.FINISHED) == signs.finished
    if phase in phases.TRAINS and signs.before not in phases.TRAINS:
        assert signs.alive
        assert signs.heard & {P.TRAINING, P.CLOSED}


def at(found: tuple[Condition, ...], type_: str) -> Condition:
    return next(each for each in found if each.type == type_)


def test_a_condition_moves_its_time_with_its_status_alone() -> None:
    first, changed = condition.updated((), [fact("Stale", "Old", "300 s")], 10.0)
    assert [each.type for each in changed] == ["Stale"]
    second, changed = condition.updated(first, [fact("Stale", "Old", "305 s")], 20.0)
    assert (at(second, "Stale").since_s, at(second, "Stale").message, changed) == (10.0, "305 s", ())
    third, changed = condition.updated(second, [], 30.0)
    assert (at(third, "Stale").status, at(third, "Stale").since_s, at(third, "Stale").reason) == (
        "False",
        30.0,
        "Over",
    )
    assert [each.status for each in changed] == ["False"]
    fourth, changed = condition.updated(third, [], 40.0)
    assert (fourth, changed) == (third, ())


def test_a_trouble_that_never_was_is_not_listed() -> None:
    assert condition.updated((), [], 10.0) == ((), ())


@given(st.lists(st.frozensets(st.sampled_from(condition.TROUBLES)), max_size=10))
def test_conditions_hold_exactly_what_was_found_last(story: list[frozenset[str]]) -> None:
    found: tuple[Condition, ...] = ()
    for n, troubles in enumerate(story):
        found, _ = condition.updated(found, [fact(each, "Because") for each in troubles], float(n))
        assert {each.type for each in found if each.status == "True"} == troubles
        assert len({each.type for each in found}) == len(found)


def test_a_checkpoint_is_stale_after_three_intervals_but_never_soon_and_never_without_a_timer() -> None:
    assert condition.stale_after_s(300.0, 10.0) == 910.0
    assert condition.stale_after_s(5.0, 0.0) == condition.STALE_FLOOR_S
    assert condition.stale_after_s(0.0, 10.0) is None
