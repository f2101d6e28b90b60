"""CPR's overheads: the paper's corners, and a comparison that is one."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.deciding.interval import SLACK, Situation, pls_interval_s, young
from deltashard_checkpoint.deciding.recovery import (
    Costs,
    advised,
    cheaper,
    expected_pls,
    full_overhead,
    partial_overhead,
)
from hypothesis import given
from hypothesis import strategies as st

HOUR = 3600.0


def costs(save_min: float, recover_min: float) -> Costs:
    return Costs(save_s=60 * save_min, load_s=60 * recover_min, reschedule_s=0.0, mtbf_s=20 * HOUR)


@pytest.mark.parametrize(
    ("save_min", "recover_min", "full", "partial"),
    [(3.7, 6.6, 8.40, 0.636), (3.9, 5.3, 8.50, 0.53), (3.5, 7.2, 8.2, 0.68)],
)
def test_the_papers_corners(save_min, recover_min, full, partial):
    """8.2 to 8.5 % of full recovery against 0.53 to 0.68 % of partial, PLS 0.1 on 18 shards, a failure in 20 h."""
    given_ = costs(save_min, recover_min)
    found = cheaper(given_, pls=0.1, shards=18)
    assert found.kind == "partial"
    assert found.interval_s == pytest.approx(72 * HOUR)
    assert 100 * found.full == pytest.approx(full, abs=0.06)
    assert 100 * found.partial == pytest.approx(partial, abs=0.01)


def test_all_four_corners_are_within_the_stated_ranges():
    corners = [(s, r) for s in (3.5, 3.9) for r in (5.3, 7.2)]
    full = [100 * full_overhead(costs(*corner)) for corner in corners]
    partial = [100 * partial_overhead(costs(*corner), 72 * HOUR) for corner in corners]
    assert min(full) <= 8.2 + 0.05
    assert max(full) >= 8.5 - 0.05
    assert min(partial) == pytest.approx(0.53, abs=0.01)
    assert max(partial) == pytest.approx(0.68, abs=0.015)


positive = st.floats(1e-3, 1e4)


@given(positive, positive, positive, st.floats(3600, 1e8), st.floats(1e-4, 1), st.integers(1, 4096))
def test_the_cheaper_kind_is_taken_each_at_its_own_interval(
    save_s, load_s, reschedule_s, mtbf_s, pls, shards
):
    given_ = Costs(save_s=save_s, load_s=load_s, reschedule_s=reschedule_s, mtbf_s=mtbf_s)
    found = cheaper(given_, pls=pls, shards=shards)
    best_s = young(save_s, mtbf_s)
    assert found.full == pytest.approx(full_overhead(given_, best_s))
    assert found.full <= min(full_overhead(given_, best_s * by) for by in (0.5, 0.9, 1.1, 2)) * (1 + 1e-12)
    partial_s = pls_interval_s(pls, mtbf_s, shards)
    assert expected_pls(partial_s, mtbf_s, shards) == pytest.approx(pls)
    assert found.partial == partial_overhead(given_, partial_s)
    assert (found.kind == "partial") is (found.partial < found.full)
    assert found.interval_s == (partial_s if found.kind == "partial" else best_s)


def test_a_save_that_costs_nothing_leaves_what_a_recovery_costs():
    free = Costs(save_s=0.0, load_s=60.0, reschedule_s=60.0, mtbf_s=12000.0)
    assert full_overhead(free) == pytest.approx(0.01)


@given(
    positive, st.floats(0, 100), st.floats(3600, 1e8), st.floats(1e-4, 1), st.integers(2, 4096), st.booleans()
)
def test_advice_is_full_unless_partial_saves_more_than_the_slack(
    save_s, durable_s, mtbf_s, pls, shards, partial
):
    """Load and reschedule are paid either way and change nothing; what is in force is no argument."""
    now = Situation(
        cost_s=save_s, durable_s=durable_s, step_s=1.0, mtbf_s=mtbf_s, shards=shards, partial=partial
    )
    found = advised(now, pls=pls, load_s=0.0, reschedule_s=0.0)
    assert found.value == ("partial" if partial else "full")
    assert found.subject == "recovery"
    assert advised(now, pls=pls, load_s=100.0, reschedule_s=50.0).would == found.would
    # Where failures cost next to nothing there is nothing to gain.
    if mtbf_s > 2 * max(1800.0, 5 * durable_s) / SLACK and save_s / 1800.0 < SLACK / 4 and durable_s < 300:
        assert found.would == "full"


def test_one_rank_has_no_survivor():
    now = Situation(cost_s=1.0, durable_s=1.0, step_s=1.0, mtbf_s=HOUR)
    assert advised(now, pls=0.1, load_s=1.0, reschedule_s=1.0).would == "full"


def test_the_papers_case_is_partial():
    now = Situation(cost_s=222.0, durable_s=222.0, step_s=1.0, mtbf_s=20 * HOUR, shards=18)
    found = advised(now, pls=0.1, load_s=396.0, reschedule_s=0.0)
    assert (found.value, found.would) == ("full", "partial")
    assert "partial 0.64 % saving every 3 d, at an expected PLS of 0.1" in found.why
