"""Phases by table, and conditions whose times change only with their status."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.fleet import report
from deltashard_operator.run import condition
from deltashard_operator.run import phase as phases
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.reconcile import PROBLEMS
from hypothesis import given
from hypothesis import strategies as st

P = report.SidecarPhase
ALIVE = {"alive": True}
BEGUN = {"alive": True, "started": True}
CASES: list[tuple[str, dict[str, Any], set[P], Phase, Phase]] = [
    ("nothing yet", {}, set(), Phase.PENDING, Phase.PENDING),
    ("a pod, no trainer", ALIVE, {P.WAITING}, Phase.PENDING, Phase.PENDING),
    ("the first restore", ALIVE, {P.RESTORING}, Phase.PENDING, Phase.RESTORING),
    ("training", BEGUN, {P.TRAINING}, Phase.PENDING, Phase.TRAINING),
    ("closed", BEGUN, {P.CLOSED}, Phase.PENDING, Phase.TRAINING),
    ("the pod is lost", {"started": True}, set(), Phase.TRAINING, Phase.RECOVERING),
    ("suspended", {"started": True, "suspended": True}, set(), Phase.TRAINING, Phase.PENDING),
    ("one of two is waiting", BEGUN, {P.TRAINING, P.WAITING}, Phase.TRAINING, Phase.RECOVERING),
    ("one of two restores", BEGUN, {P.TRAINING, P.RESTORING}, Phase.TRAINING, Phase.RESTORING),
    ("one is missing", BEGUN | {"missing": True}, {P.TRAINING}, Phase.TRAINING, Phase.RECOVERING),
    ("unsafe", BEGUN | {"unsafe": True}, {P.TRAINING}, Phase.TRAINING, Phase.DEGRADED),
    ("unsafe, but restoring", ALIVE | {"unsafe": True}, {P.RESTORING}, Phase.PENDING, Phase.RESTORING),
    ("no report", BEGUN, set(), Phase.DEGRADED, Phase.DEGRADED),
    ("of a newer sidecar", BEGUN, {P.UNKNOWN}, Phase.DEGRADED, Phase.DEGRADED),
    ("a new pod without a report", BEGUN, set(), Phase.RECOVERING, Phase.RECOVERING),
    ("restarted after its end", BEGUN, set(), Phase.FINISHED, Phase.RECOVERING),
]
NONE = dict.fromkeys(("alive", "started", "suspended", "missing", "unsafe"), False)


@pytest.mark.parametrize(
    ("observations", "reported", "before", "phase"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_phase_follows_from_the_observations(
    observations: dict[str, bool], reported: set[P], before: Phase, phase: Phase
) -> None:
    assert phases.phase_of(before, reported, **(NONE | observations)) is phase


def fact(type_: str, message: str = "") -> Condition:
    return Condition(type=type_, status="True", reason=type_, message=message)


def test_condition_transition_time_changes_only_with_its_status() -> None:
    first = condition.updated((), [fact("Stale", "300 s")], 10.0)
    (found,) = second = condition.updated(first, [fact("Stale", "305 s")], 20.0)
    assert (found.since_s, found.message) == (10.0, "305 s")
    (resolved,) = third = condition.updated(second, [], 30.0)
    assert (resolved.status, resolved.since_s, resolved.reason) == ("False", 30.0, "Over")
    assert condition.updated(third, [], 40.0) == third


@given(st.lists(st.frozensets(st.sampled_from([*PROBLEMS])), max_size=10))
def test_conditions_match_the_latest_facts(history: list[frozenset[str]]) -> None:
    found: tuple[Condition, ...] = ()
    for n, problems in enumerate(history):
        found = condition.updated(found, map(fact, problems), float(n))
        assert {each.type for each in found if each.status == "True"} == problems
        assert {each.type for each in found} == frozenset().union(*history[: n + 1])
