"""What `make papers` says that saves cost is what they were made to cost, and what a death loses is what it loses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

STEP_S = 0.01


def trained(papers, steps: int, cuts: dict[int, int], *, cost_s: float, slope: float = 0.0):
    """(seconds of each step, saves); `cuts`: cut -> durable. A save's cost is shared by the steps of its flight."""
    save_costs = papers("save_costs")
    seconds = [STEP_S * (1 + slope * step / steps) for step in range(steps)]
    for cut, durable in cuts.items():
        for step in range(cut, durable + 1):
            seconds[step] += cost_s / (durable - cut + 1)
    return seconds, [save_costs.Save(cut=cut, durable=durable) for cut, durable in cuts.items()]


def test_costs_are_those_that_were_put_in(papers):
    save_costs = papers("save_costs")
    cuts = {at: at + 20 for at in range(100, 1000, 100)}
    seconds, saves = trained(papers, 1_050, cuts, cost_s=0.05)
    assert save_costs.costs(seconds, saves) == pytest.approx([0.05] * 9)
    share = save_costs.Share.of_span(seconds, saves, 50, 950)
    assert (share.saves, share.of) == (9, 9)
    assert share.overhead == pytest.approx(9 * 0.05 / (900 * STEP_S))
    assert share.error == pytest.approx(0, abs=1e-9)
    assert share.step_s == pytest.approx(STEP_S)
    assert share.interval_steps == 100
    assert share.interval_s == pytest.approx(100 * STEP_S + 0.05)


def test_a_machine_that_grows_slower_is_no_cost(papers):
    """Twice as slow at the end: quiet steps on one side only would make each save dearer than it is."""
    save_costs = papers("save_costs")
    cuts = {at: at + 20 for at in range(100, 1000, 100)}
    seconds, saves = trained(papers, 1_050, cuts, cost_s=0.05, slope=1.0)
    assert save_costs.costs(seconds, saves) == pytest.approx([0.05] * 9, rel=1e-3)


def test_no_quiet_step_no_cost(papers):
    """Saves without a step in between, and one that was never durable."""
    save_costs = papers("save_costs")
    seconds, saves = trained(papers, 40, {0: 9, 10: 19, 20: 29, 30: 39}, cost_s=0.1)
    assert save_costs.costs(seconds, saves) == [None] * 4
    share = save_costs.Share.of_span(seconds, saves, 0, 40)
    assert (share.overhead, share.error, share.saves, share.of) == (None, None, 0, 4)
    lost = [save_costs.Save(cut=20)]
    assert save_costs.costs([STEP_S] * 100, lost) == [None]
    assert save_costs.windows([STEP_S] * 100, lost)[0][1] == 100


def test_windows_are_apart_and_all_else_is_quiet(papers):
    save_costs = papers("save_costs")

    @given(st.data())
    def holds(data):
        steps = data.draw(st.integers(1, 200))
        places = sorted(data.draw(st.sets(st.integers(0, steps - 1), max_size=8)))
        saves = []
        for at, following in pairwise([*places, steps]):
            durable = data.draw(st.none() | st.integers(at, following))
            saves.append(save_costs.Save(cut=at, durable=durable))
        seconds = data.draw(st.lists(st.floats(0.001, 0.1), min_size=steps, max_size=steps))
        spans = save_costs.windows(seconds, saves)
        for (first, end), save in zip(spans, saves, strict=True):
            assert first <= save.cut < end
            assert save.durable is None or save.durable <= end
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        inside = {step for first, end in spans for step in range(first, end)}
        assert sorted(inside | set(save_costs.quiet(seconds, saves))) == list(range(steps))
        assert not inside & set(save_costs.quiet(seconds, saves))

    holds()


def test_lost_steps_are_those_since_the_newest_that_was_durable(papers):
    save_costs = papers("save_costs")

    @given(st.data())
    def holds(data):
        steps = data.draw(st.integers(1, 60))
        saves = [
            save_costs.Save(cut=cut, durable=data.draw(st.none() | st.integers(cut, 70)))
            for cut in sorted(data.draw(st.sets(st.integers(0, 59), max_size=6)))
        ]
        wanted = []
        for step in range(steps):
            known = [save.cut for save in saves if save.durable is not None and save.durable <= step]
            if known:
                wanted.append(step - max(known))
        assert save_costs.lost_steps(steps, saves) == wanted

    holds()


def test_blocks_are_paired_with_their_neighbours(papers):
    """Half as fast in the end; each block with saves costs a tenth."""
    save_costs = papers("save_costs")
    off = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    on = [1.1 * (before + after) / 2 for before, after in pairwise(off)]
    overhead, error = save_costs.paired(on, off)
    assert overhead == pytest.approx(0.1)
    assert error == pytest.approx(0, abs=1e-9)
    assert save_costs.paired([1.1], [1.0, 1.0])[1] is None
