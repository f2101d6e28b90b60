"""Plans: sizes of the encodings, the paper's cycle, goals side by side, prices, and numbers that agree with one another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding import simulation
from deltashard_checkpoint.deciding.evidence import Gamma, Rates
from deltashard_checkpoint.deciding.goal import AUTO, goal
from deltashard_checkpoint.deciding.interval import PLS_SHARE, fewest_saves, young
from deltashard_checkpoint.deciding.recovery import expected_pls
from deltashard_checkpoint.errors import UserError
from deltashard_cli.planning.assumption import NotEnough, Said, settled
from deltashard_cli.planning.chart import HEIGHT, Mark, chart
from deltashard_cli.planning.failure_trace import failure_trace
from deltashard_cli.planning.forecast import (
    FEWEST_GAPS,
    Known,
    Planner,
    Prices,
    at_interval,
    cycle,
    precision,
)
from deltashard_cli.planning.growth import PAPER, fitted
from deltashard_cli.planning.quantity import Model
from hypothesis import given, settings
from hypothesis import strategies as st

HOUR = 3600.0


def known_rate(mtbf_s: float) -> Rates:
    gamma = Gamma(shape=1e6, rate_s=1e6 * mtbf_s)
    return Rates(lossy=gamma, restores=gamma)


KNOWN = Known(
    rows=10**9, columns=64, state_bytes=4, dense_bytes=0.0, pods=16, ranks=128, bandwidth=4e8, stall_s=0.1,
    slowdown_s=0.9, step_s=0.0, restart_s=180.0, planned_s=168 * HOUR, growth=fitted([PAPER]),
    rates=known_rate(20 * HOUR),
)  # fmt: skip
LOST = goal("lost-work=5m")


@pytest.mark.parametrize(
    ("columns", "encoding", "reduction", "mean_capacity"),
    [
        (64, "q8", 7.5, 2.6),
        (64, "q4", 14.3, 4.9),
        (64, "q2", 23.7, 8.2),
        (128, "q4", 15.8, 5.4),
        (32, "q8", 6.6, 2.3),
    ],
)
def test_check_n_runs_cycle_and_reduction(columns, encoding, reduction, mean_capacity):
    """Every half hour: a baseline, seven increments, and what is written less of 4 bytes a value and state."""
    of = replace(KNOWN, columns=columns)
    held = cycle(of, encoding, 1800.0)
    assert len(held.increments) == 7
    assert of.raw_bytes / held.mean_bytes == pytest.approx(reduction, rel=0.06)
    mean_held = held.baseline_bytes + sum(held.increments) / len(held.increments)
    assert of.raw_bytes / mean_held == pytest.approx(mean_capacity, rel=0.08)


def test_a_baseline_of_dense_parameters_alone_is_every_save():
    held = cycle(replace(KNOWN, rows=1, dense_bytes=1e9), "q8", 60.0)
    assert held.mean_bytes == pytest.approx(1e9, rel=0.01)


def test_auto_and_youngs_are_the_rules():
    planner = Planner(KNOWN)
    found = planner.plan(AUTO, LOST)
    by_name = {each.name: each for each in found.goals}
    assert found.chosen is found.goals[0]
    assert found.chosen.interval_s == pytest.approx(min(1800.0, fewest_saves(1.0, 20 * HOUR)))
    assert by_name["Young/Daly"].interval_s == pytest.approx(young(1.0, 20 * HOUR))
    assert by_name["Check-N-Run"].interval_s == 1800
    assert by_name["lost work"].worst_lost_s == pytest.approx(300)
    assert by_name["overhead 1 %"].save_share == pytest.approx(0.01)
    assert min(each.overhead for each in found.goals) == by_name["Young/Daly"].overhead


def test_the_simulation_agrees_with_the_exact_form_within_its_error():
    for each in Planner(KNOWN).plan(AUTO, LOST).goals:
        assert 0 < each.simulated_error < 0.02 * each.overhead
        # All goals share one set of gaps, and with it one deviation.
        assert abs(each.simulated - each.overhead) <= 4 * each.simulated_error
        assert each.mean_lost_s == pytest.approx(each.interval_s / 2 + each.durable_s, rel=0.02)
        assert each.mean_lost_s < each.worst_lost_s


def test_a_traces_own_gaps_are_drawn_where_there_are_enough():
    few = Planner(replace(KNOWN, gaps=(5.0,) * (FEWEST_GAPS - 1)))
    assert len(set(few.gaps)) > 1000
    regular = Planner(replace(KNOWN, gaps=(5.0,) * FEWEST_GAPS))
    assert set(regular.gaps) == {20 * HOUR}


def test_bits_follow_the_restores_to_come():
    def bits(mtbf_s: float, rule: str = "budget") -> str:
        return precision(replace(KNOWN, rates=known_rate(mtbf_s), bits=rule))[1]

    assert bits(1e9) == "q3", "of a checkpoint at least one restore is expected"
    assert bits(200 * HOUR) == "q4"
    assert bits(3 * HOUR) == "q8"
    assert bits(168 * HOUR / 3, "check-n-run") == "q3"
    assert bits(3 * HOUR, "bf16") == "bf16"


def test_partial_recovery_at_a_pls():
    planner = Planner(replace(KNOWN, pls=0.02, ranks=36, pods=18, planned_s=1e9))
    found = planner.plan(goal("pls=0.02"), LOST)
    first = found.chosen
    assert first.interval_s == pytest.approx(2 * 0.02 * 18 * 20 * HOUR)
    assert first.pls == pytest.approx(expected_pls(first.interval_s, 20 * HOUR, 18)) == pytest.approx(0.02)
    assert first.mean_lost_s == first.worst_lost_s == 0
    assert found.recovery is not None
    assert found.recovery.would == "partial"
    exact = simulation.partial_renewal_overhead(planner.run(first.interval_s), planner.mtbf_s)
    assert first.overhead == exact
    assert abs(first.simulated - exact) <= 4 * first.simulated_error
    assert Planner(KNOWN).plan(AUTO, LOST).recovery is None


@pytest.mark.parametrize("prices", [Prices(), Prices(pod_hour=3.0, put=0.5)])
def test_recovery_is_what_the_run_would_be_advised_to(prices):
    """Its interval is that of the table's row, bounds included, and so is its share as far as first order goes."""
    known = replace(KNOWN, pls=0.1, ranks=16, restart_s=30.0, planned_s=168 * HOUR, prices=prices)
    found = Planner(known).plan(AUTO, LOST)
    row = next(each for each in found.goals if each.name == "PLS, partial")
    assert row.interval_s == pytest.approx(PLS_SHARE * 168 * HOUR)
    assert found.recovery is not None
    assert found.recovery.would == "partial"
    assert f"partial {100 * row.overhead:.2g} % saving every 16.8 h" in found.recovery.why
    assert f"PLS of {row.pls:.2g};" in found.recovery.why


def test_partial_recovery_must_be_worth_it_and_leave_somebody():
    cheap = replace(KNOWN, pls=0.1, stall_s=1e-4, slowdown_s=0.0, rates=known_rate(2000 * HOUR))
    found = Planner(cheap).plan(AUTO, LOST).recovery
    assert found is not None
    assert (found.would, "more than 0.1 %" in found.why) == ("full", True)
    alone = Planner(replace(KNOWN, pls=0.1, ranks=1)).plan(AUTO, LOST).recovery
    assert alone is not None
    assert (alone.would, "nobody survives" in alone.why) == ("full", True)


def test_money():
    prices = Prices(gb_month=0.023, put=0.005, get=0.0004, pod_hour=30.0)
    free, paid = Planner(KNOWN), Planner(replace(KNOWN, prices=prices))
    assert paid.situation.cost_s > free.situation.cost_s == paid.cost_s == free.cost_s == pytest.approx(1.0)
    first = paid.plan(AUTO, LOST).chosen
    assert first.money_per_day["overhead"] == pytest.approx(30 * 16 * 24 * first.overhead)
    assert first.money_per_day["requests"] == pytest.approx(
        (first.puts_per_day * 0.005 + first.gets_per_day * 0.0004) / 1000
    )
    assert first.money_per_day["storage"] == pytest.approx(first.held_bytes / 1e9 * 0.023 / 30.44)
    assert free.plan(AUTO, LOST).chosen.money_per_day == {}


def test_the_price_of_requests_steers_the_choice_and_is_paid_once():
    free = Planner(replace(KNOWN, prices=Prices(pod_hour=3.0)))
    paid = Planner(replace(KNOWN, prices=Prices(pod_hour=3.0, put=0.5)))
    without, found = free.plan(AUTO, LOST), paid.plan(AUTO, LOST)
    assert found.chosen.interval_s > without.chosen.interval_s, "requests are worth saving"
    assert found.cost_s == without.cost_s, "no trainer waits for money"
    assert "price of its requests" in found.why
    assert "price" not in without.why
    assert paid.request_s == pytest.approx(
        paid._puts(cycle(KNOWN, paid.encoding, without.chosen.interval_s).mean_bytes) * 0.0005 * 75
    )
    rows = (
        {each.name: each for each in found.goals}["Check-N-Run"],
        {each.name: each for each in without.goals}["Check-N-Run"],
    )
    assert rows[0].overhead == rows[1].overhead
    money = [sum(row.money_per_day.values()) for row in rows]
    assert money[0] == pytest.approx(money[1] + rows[0].puts_per_day * 0.0005)


def test_what_a_run_does_now_is_judged_by_its_own_bits():
    planner = Planner(KNOWN)
    now = at_interval(planner, "now", 60.0, bits="fp32")
    assert now.interval_s == 60.0
    assert now.bytes_per_day > 10 * planner.plan(AUTO, LOST).chosen.bytes_per_day


@settings(max_examples=20)
@given(
    rows=st.integers(1, 10**12),
    columns=st.integers(1, 1024),
    dense_bytes=st.floats(0, 1e12),
    pods=st.integers(1, 1000),
    bandwidth=st.floats(1e6, 1e11),
    stall_s=st.floats(0, 100),
    mtbf_s=st.floats(300, 1e7),
    planned_s=st.floats(360, 1e8),
    pls=st.sampled_from([0.0, 0.02]),
)
def test_any_run_gets_a_plan(rows, columns, dense_bytes, pods, bandwidth, stall_s, mtbf_s, planned_s, pls):
    given_ = replace(
        KNOWN, rows=rows, columns=columns, dense_bytes=dense_bytes, pods=pods, ranks=pods, bandwidth=bandwidth,
        stall_s=stall_s, rates=known_rate(mtbf_s), planned_s=planned_s, pls=pls,
    )  # fmt: skip
    found = Planner(given_).plan(AUTO, LOST)
    for each in found.goals:
        assert each.interval_s > 0
        assert math.isfinite(each.interval_s)
        assert each.overhead >= 0
        assert each.bytes_per_day > 0
    marks = [Mark(letter="@", interval_s=e.interval_s, overhead=e.overhead) for e in found.goals]
    assert chart(found.curve, marks)


# -- chart ------------------------------------------------------------------------------------------------------


def test_the_chart_shows_the_curve_and_every_mark():
    found = Planner(KNOWN).plan(AUTO, LOST)
    marks = [
        Mark(letter=str(at), interval_s=e.interval_s, overhead=e.overhead) for at, e in enumerate(found.goals)
    ]
    lines = chart(found.curve, marks)
    assert len(lines) == HEIGHT + 2
    text = "\n".join(lines)
    assert text.isascii()
    assert text.count("*") > 30
    assert "0" in text
    assert "0 %" in text
    assert max(map(len, lines)) <= 80
    places = [row.find("0", 9) for row in lines[:HEIGHT]]
    column = max(places) - 10
    shown = found.curve[column][0]
    assert shown == pytest.approx(found.chosen.interval_s, rel=0.1)


def test_a_chart_without_any_hope_says_so():
    assert chart([(1.0, math.inf), (2.0, math.inf)], []) == ["no interval keeps up with these failures"]


# -- where numbers come from ------------------------------------------------------------------------------------


def test_what_is_said_comes_first_and_what_is_assumed_is_named():
    known, notes = settled(Said(raw_bytes=260e9, pods=4, mtbf_s=72000.0, stall_s=0.25), None)
    by_name = {each.name: each for each in notes}
    assert known.rows == 10**9
    assert known.raw_bytes == pytest.approx(260e9)
    assert known.rates.mtbf_s == pytest.approx(72000)
    assert known.stall_s == 0.25
    assert by_name["a save's stall"].source == "said"
    assert by_name["bandwidth of a pod"].source.startswith("assumed")
    assert known.slowdown_s == pytest.approx(0.5 * 65)
    assert by_name["ranks"].value == "4"


def test_without_failures_a_pods_are_assumed():
    known, notes = settled(Said(model=Model(1000, 8, 4), pods=8), None)
    assert known.rates.mtbf_s == pytest.approx(90 * HOUR)
    assert any("30 d" in each.source for each in notes)


@pytest.mark.parametrize(
    ("said", "between_s", "source"),
    [
        (Said(model=Model(1000, 8, 4)), 24 * HOUR, "assumed"),
        (Said(model=Model(1000, 8, 4), mtbf_s=72000.0), 20 * HOUR, "as often as failures"),
        (Said(model=Model(1000, 8, 4), pods=1000), 0.72 * HOUR, "as often as failures"),
        (
            Said(model=Model(1000, 8, 4), trace=failure_trace(["0", "1e6", "2e6"], where="trace")),
            (2e6 + 43200) / 2.5,
            "the trace: 2 in",
        ),
    ],
)
def test_restores_are_listed_and_come_as_often_as_failures_at_least(said, between_s, source):
    """Bits rest on them, whoever said nothing of them too."""
    known, notes = settled(said, None)
    assert known.rates.restores.mean_between_s == pytest.approx(between_s, rel=1e-3)
    assert known.rates.restores.mean_between_s <= known.rates.mtbf_s
    restores = next(each for each in notes if each.name == "restores")
    assert restores.source.startswith(source)


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(NotEnough) as refused:
        settled(Said(), None)
    assert isinstance(refused.value, UserError)
    assert "--bytes" in refused.value.remedy
