"""Intervals: special cases of the formulas, and bounds that hold for every goal."""

import math
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import get_args

import pytest
from deltashard_checkpoint.deciding.cost import Measure
from deltashard_checkpoint.deciding.goal import FIXED, Aim, Goal, goal
from deltashard_checkpoint.deciding.interval import (
    BAND,
    FEWEST_STEPS,
    IN_FLIGHT_SHARE,
    LONGEST_S,
    MIN_SAVES,
    PLS_SHARE,
    SHORTEST_S,
    Basis,
    Interval,
    IntervalInputs,
    checkfreq_steps,
    choose_interval,
    failure_shards,
    fewest_saves,
    overhead_share,
    should_replace,
    young_interval_s,
)
from hypothesis import given
from hypothesis import strategies as st

costs = st.floats(-1, 1e4)
mtbfs = st.floats(60, 1e8)
amounts = {"overhead": st.floats(1e-6, 0.5), "lost-work": st.floats(1e-3, 604800), "pls": st.floats(1e-6, 1)}
goals = st.sampled_from([aim for aim in get_args(Aim) if aim != "fixed"]).flatmap(
    lambda aim: amounts.get(aim, st.just(0.0)).map(lambda amount: Goal(aim=aim, amount=amount))
)
situations = st.builds(
    IntervalInputs, cost_s=costs, durable_s=st.floats(0, 1e5),
    step_s=st.one_of(st.just(0.0), st.floats(1e-3, 100)), mtbf_s=mtbfs, shards=st.integers(1, 4096),
    partial=st.booleans(), left_s=st.one_of(st.just(math.inf), st.floats(1, 1e8)),
    user=st.builds(SimpleNamespace, min_interval_s=st.floats(0, 1e5), max_interval_s=st.just(0.0) | st.floats(1, 1e6)),
)  # fmt: skip


def quiet(*, min_interval_s: float = 0.0, max_interval_s: float = 0.0, **changes: float) -> IntervalInputs:
    """Return a case in which no bound applies by default."""
    user = SimpleNamespace(min_interval_s=min_interval_s, max_interval_s=max_interval_s)
    now = IntervalInputs(cost_s=1.0, durable_s=0.0, step_s=0.0, mtbf_s=10 * 3600.0, user=user)
    return replace(now, **changes)


# -- formulas ---------------------------------------------------------------------------------------------------


@given(costs, mtbfs)
def test_interval_without_slack_is_youngs_formula(cost_s, mtbf_s):
    assert fewest_saves(cost_s, mtbf_s, 0.0) == pytest.approx(young_interval_s(cost_s, mtbf_s), rel=1e-6)


@given(st.floats(1e-6, 1e4), mtbfs, st.floats(1e-5, 0.1))
def test_interval_is_the_longest_within_the_slack(cost_s, mtbf_s, slack):
    interval_s = fewest_saves(cost_s, mtbf_s, slack)
    best_s = young_interval_s(cost_s, mtbf_s)
    best = overhead_share(best_s, cost_s, mtbf_s)
    assert best <= min(overhead_share(best_s * by, cost_s, mtbf_s) for by in (0.5, 0.99, 1.01, 2)) * (
        1 + 1e-12
    )
    assert best == pytest.approx(math.sqrt(2 * cost_s / mtbf_s))
    assert interval_s >= best_s * (1 - 1e-12)
    assert overhead_share(interval_s, cost_s, mtbf_s) == pytest.approx(best + slack, rel=1e-6)
    assert overhead_share(interval_s * 1.01, cost_s, mtbf_s) > best + slack


# -- goals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "seconds", "bound"),
    [
        ({"cost_s": 0.0, "mtbf_s": 3600.0}, SHORTEST_S, "a minute"),
        ({"durable_s": 100.0}, 100.0 / IN_FLIGHT_SHARE, "durable"),
        ({"step_s": 60.0}, 60.0 * FEWEST_STEPS, "10 steps"),
        ({"cost_s": 0.1, "mtbf_s": 1e6}, LONGEST_S, "30 minutes"),
        ({"cost_s": 100.0, "mtbf_s": 1e6}, young_interval_s(100.0, 1e6), "the best"),
        ({"min_interval_s": 1000.0}, 1000.0, "the user allows"),
        ({"max_interval_s": 90.0}, 90.0, "the user allows"),
        ({"max_interval_s": 90.0, "durable_s": 100.0}, 500.0, "durable"),
    ],
)
def test_auto_interval_names_the_bound_that_applies(changes, seconds, bound):
    found = choose_interval(goal("auto"), quiet(**changes))
    assert found.seconds == pytest.approx(seconds)
    assert bound in found.bound


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1e-3, 0.5))
def test_overhead_interval_matches_checkfreq(cost_s, durable_s, allowed):
    wanted = Goal(aim="overhead", amount=allowed)
    found = choose_interval(wanted, quiet(cost_s=cost_s, durable_s=durable_s))
    assert found.seconds == pytest.approx(max(durable_s, cost_s / allowed, 0.001))
    stepped = choose_interval(wanted, quiet(cost_s=cost_s, durable_s=durable_s, step_s=0.5))
    assert stepped.seconds / 0.5 == pytest.approx(checkfreq_steps(cost_s, durable_s, 0.5, allowed))
    assert cost_s <= allowed * stepped.seconds * (1 + 1e-9)


@given(st.floats(1, 604800), situations)
def test_lost_work_goal_is_met_or_reported_unreachable(max_interval_s, now):
    found = choose_interval(Goal(aim="lost-work", amount=max_interval_s), now)
    worst_s = found.seconds + now.durable_s
    if found.unreachable:
        assert worst_s > max_interval_s
    else:
        assert worst_s <= max_interval_s * (1 + 1e-6)


def test_pls_goal_applies_only_under_partial_recovery():
    now = quiet(partial=True, shards=18, mtbf_s=20 * 3600.0)
    assert choose_interval(goal("pls=0.02"), now).seconds == pytest.approx(14.4 * 3600)
    assert choose_interval(goal("pls=0.1"), now).seconds == pytest.approx(72 * 3600)
    late = choose_interval(goal("pls=0.1"), replace(now, left_s=36000.0))
    assert late.seconds == pytest.approx(PLS_SHARE * 36000)
    assert "tenth" in late.bound
    full = choose_interval(goal("pls=0.1"), replace(now, partial=False))
    assert full.seconds == choose_interval(goal("auto"), now).seconds
    assert "partial recovery" in full.unreachable


def test_fixed_interval_is_used_unchanged():
    with pytest.raises(ValueError, match="fixed"):
        choose_interval(FIXED, quiet())


@given(goals, situations)
def test_lower_bound_takes_precedence(goal, now):
    found = choose_interval(goal, now)
    auto = goal.aim == "auto" or (goal.aim == "pls" and not now.partial)
    low_s = max(now.durable_s, now.step_s, 0.001, now.min_interval_s)
    high_s = now.max_interval_s
    if auto:
        # The user's own bounds replace the minute.
        shortest_s = 0.0 if now.min_interval_s else min(SHORTEST_S, now.max_interval_s)
        low_s = max(
            shortest_s, now.durable_s / IN_FLIGHT_SHARE, FEWEST_STEPS * now.step_s, now.min_interval_s
        )
        high_s = min(high_s, max(LONGEST_S, young_interval_s(now.cost_s, now.mtbf_s)))
    elif goal.aim == "pls":
        high_s = min(high_s, PLS_SHARE * now.left_s)
    elif goal.aim == "overhead" and now.step_s:
        low_s = max(low_s, now.step_s * math.ceil(now.durable_s / now.step_s))  # whole steps
    assert math.isfinite(found.seconds)
    assert found.seconds >= low_s * (1 - 1e-12)
    assert found.seconds <= max(low_s, high_s) * (1 + 1e-12)
    assert found.why
    if found.bound:
        assert found.seconds == pytest.approx(low_s) or found.seconds == pytest.approx(high_s)


# -- changes ----------------------------------------------------------------------------------------------------


def measured(*values: float) -> Measure:
    return reduce(Measure.with_sample, values, Measure())


STEADY = measured(*[1.0, 1.1, 0.9, 1.0] * 3)
BASIS = Basis(seconds=300.0, cost_s=1.0, mtbf_s=36000.0)


@pytest.mark.parametrize(
    ("basis", "costs", "seconds", "changes", "changed"),
    [
        (BASIS, measured(*[9.0] * (MIN_SAVES - 1)), 900.0, {}, False),  # too few saves
        (BASIS, measured(*[9.0, 9.1] * MIN_SAVES), 300.0 * BAND[1], {}, False),  # too little to gain
        (BASIS, measured(*[9.0, 9.1] * MIN_SAVES), 900.0, {}, True),
        (BASIS, measured(*[0.1, 0.12] * MIN_SAVES), 100.0, {}, True),
        (BASIS, STEADY, 900.0, {}, False),  # random variation
        (BASIS, measured(*[0.0] * MIN_SAVES, 30.0), 900.0, {}, False),  # one outlier does not count
        (BASIS, STEADY, 900.0, {"mtbf_s": 80000.0}, True),
        (BASIS, STEADY, 200.0, {"mtbf_s": 17000.0}, True),
        (BASIS, STEADY, 900.0, {"mtbf_s": 60000.0}, False),
        (BASIS, STEADY, 900.0, {"durable_s": 301.0}, True),  # saves overlap
    ],
)
def test_only_significant_changes_change_the_interval(basis, costs, seconds, changes, changed):
    assert should_replace(basis, Interval(seconds=seconds), costs, quiet(**changes)) is changed


@pytest.mark.parametrize(
    ("ranks", "pods", "shards"), [(1, 1, 1), (4, 1, 4), (4, 4, 4), (128, 16, 16), (2, 4, 2), (1, 4, 1)]
)
def test_pod_loss_loses_all_its_ranks(ranks: int, pods: int, shards: int) -> None:
    assert failure_shards(ranks, pods) == shards
