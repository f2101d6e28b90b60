"""When deciders are told of failures: when they come, when a rate doubled or halved, rarely, and never all at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from deltashard_checkpoint.deciding import evidence
from deltashard_checkpoint.deciding.evidence import Evidence, Rates
from deltashard_operator.controller import evidence_pace
from deltashard_operator.controller.evidence_pace import (
    BURST,
    LOST_S,
    PER_S,
    RUN_S,
    Bucket,
    Informed,
    cut_off,
    due,
)
from hypothesis import given
from hypothesis import strategies as st

HERE = {"p-1": "s-1"}
NOW_S = 1_000_000.0
HOUR_S = 3600.0


def rates(lossy: float = 0.0, restores: float = 0.0, hours: float = 100.0) -> Rates:
    return evidence.rates(Evidence(exposure_s=hours * HOUR_S, lossy=lossy, restores=restores), pods=8)


def told(found: Rates, deciders: Mapping[str, str] = HERE) -> Informed:
    return Informed(rates=found, at_s=NOW_S, newest_s=NOW_S, told=deciders)


def test_the_first_word_comes_at_once_and_when_there_is_someone_to_hear_it() -> None:
    assert due(None, rates(), HERE, NOW_S) == HERE
    assert not due(None, rates(), {}, NOW_S)


def test_the_same_again_is_no_news_however_late() -> None:
    assert not due(told(rates()), rates(), HERE, NOW_S + 100 * RUN_S)
    assert not due(told(rates(2.0)), rates(2.1), HERE, NOW_S + 100 * RUN_S)


def test_a_rate_that_doubled_or_halved_is_news_once_an_hour() -> None:
    few, many = rates(1.0, 1.0), rates(6.0, 6.0)
    for before, after in ((few, many), (many, few), (rates(restores=1.0), rates(restores=6.0))):
        assert not due(told(before), after, HERE, NOW_S + RUN_S - 1)
        assert due(told(before), after, HERE, NOW_S + RUN_S)


def test_a_clock_that_was_set_back_keeps_nobody_waiting_for_ever() -> None:
    assert due(told(rates(1.0)), rates(6.0), HERE, NOW_S - 10 * RUN_S)


def test_another_process_that_decides_is_told_at_once() -> None:
    for moved in ({"p-2": "s-2"}, {"p-1": "s-2"}):
        assert due(told(rates()), rates(), moved, NOW_S + 1) == moved
    assert not due(told(rates()), rates(), {}, NOW_S + 1), "its trainer is away for a moment"


def test_of_many_that_decide_only_those_that_come_are_told_and_all_when_a_rate_changed() -> None:
    many = {f"p-{number}": "s" for number in range(5)}
    before = told(rates(), many)
    away = {uid: each for uid, each in many.items() if uid != "p-0"}
    came = {**away, "p-9": "s"}
    assert due(before, rates(), came, NOW_S + 1) == {"p-9": "s"}
    after = before.also({"p-9": "s"}, here={*many, "p-9"} - {"p-4"}, now_s=NOW_S + 1)
    assert not due(after, rates(), {**many, "p-9": "s"}, NOW_S + 2).keys() - {"p-4"}, "p-0 came again"
    assert "p-4" not in after.told, "its pod is gone"
    assert due(after, rates(6.0), came, NOW_S + RUN_S) == came


def test_a_word_told_just_before_its_stream_ended_is_told_anew() -> None:
    before = told(rates())
    assert due(cut_off(before, "p-1", "s-1", NOW_S + LOST_S - 1), rates(), HERE, NOW_S + LOST_S) == HERE
    assert cut_off(before, "p-1", "s-1", NOW_S + LOST_S) is before, "a stream that is renewed"
    assert cut_off(before, "p-1", "s-0", NOW_S + 1) is before, "of the process before"
    assert cut_off(before, "p-2", "s-2", NOW_S + 1) is before
    assert cut_off(None, "p-1", "s-1", NOW_S) is None


def test_a_fleet_that_fails_at_once_is_told_one_after_another() -> None:
    bucket, sent, now_s = Bucket(), 0, NOW_S
    for _ in range(1000):
        bucket = bucket.filled(now_s)
        less = bucket.taken()
        sent += less is not None
        bucket = less or bucket
    assert sent == BURST
    bucket = bucket.filled(now_s + 1)
    assert bucket.left == PER_S
    assert bucket.filled(now_s - 100).left == PER_S
    assert bucket.filled(now_s + 1e6).left == BURST


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 5 * RUN_S)), max_size=50))
def test_a_run_hears_of_changed_rates_once_an_hour_at_most(story: list[tuple[float, float, float]]) -> None:
    now_s, before, times = NOW_S, None, list[float]()
    for lossy, restores, passed_s in story:
        now_s += passed_s
        found = rates(lossy, restores)
        if due(before, found, HERE, now_s):
            before = Informed(rates=found, at_s=now_s, newest_s=now_s, told=HERE)
            times.append(now_s)
    assert all(b - a >= evidence_pace.RUN_S for a, b in itertools.pairwise(times))
