"""When a baseline is made by compaction: costs of both ways, the goal, and what is compacted."""

import pytest
from deltashard_checkpoint.maintenance.synthetic import (
    CHECKPOINT_S,
    SLACK,
    ChainRates,
    FullCut,
    Material,
    at_cut,
    at_rest,
    compaction_s,
    full_cut_s,
    material,
    restore_s,
    target,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import begun

GB = 10**9
RATES = ChainRates(read_bytes_per_s=1e8, write_bytes_per_s=1e8, stall_s=0.2)
CACHED = Material(checkpoints=2, chain_bytes=int(1.4 * GB), fetch_bytes=0, base_bytes=GB)
FULL = FullCut(raw_bytes=3 * GB, stored_bytes=GB)

sizes = st.integers(1, 10**12)
materials = st.builds(
    lambda base, deltas, missing, n: Material(
        checkpoints=n, chain_bytes=base + deltas, fetch_bytes=min(missing, base + deltas), base_bytes=base
    ),
    sizes, sizes, sizes, st.integers(2, 40),
)  # fmt: skip
some_rates = st.builds(
    ChainRates, read_bytes_per_s=st.floats(1e6, 1e10), write_bytes_per_s=st.floats(1e6, 1e10),
    encode_s_per_byte=st.floats(1e-10, 1e-7), stall_s=st.floats(0, 10), slowdown_s=st.floats(0, 10),
)  # fmt: skip


def test_a_cached_chain_is_compacted_when_the_predictor_asks_for_a_baseline():
    found = at_cut(CACHED, FULL, RATES, pays=True, goal_s=0)
    assert found is not None
    assert found.why == "cheaper"
    assert at_cut(CACHED, FULL, RATES, pays=False, goal_s=0) is None


def test_a_chain_that_would_be_fetched_over_a_slow_link_is_not():
    away = Material(checkpoints=2, chain_bytes=int(1.4 * GB), fetch_bytes=int(1.4 * GB), base_bytes=GB)
    assert at_cut(away, FULL, ChainRates(read_bytes_per_s=1e7, stall_s=0.2), pays=True, goal_s=0) is None
    assert at_cut(away, FULL, ChainRates(read_bytes_per_s=1e10, stall_s=0.2), pays=True, goal_s=0) is not None


@given(materials, some_rates, st.builds(FullCut, raw_bytes=sizes, stored_bytes=sizes), st.floats(0, 1e6))
def test_cheaper_is_said_only_of_what_is(found, rates, full, goal_s):
    verdict = at_cut(found, full, rates, pays=True, goal_s=goal_s)
    assert verdict is None or compaction_s(found, rates) < full_cut_s(full, rates)


@given(materials, some_rates, st.floats(0, 1e6))
def test_a_goal_asks_for_what_brings_it_nearer_and_for_nothing_once_it_is_reached(found, rates, goal_s):
    verdict = at_rest(found, rates, owes=False, longest=0, goal_s=goal_s)
    now_s = restore_s(found.chain_bytes, found.checkpoints, rates)
    alone_s = restore_s(found.base_bytes, 1, rates)
    if verdict is not None:
        assert goal_s > 0
        assert now_s > goal_s
        assert alone_s * SLACK < now_s
    elif goal_s > 0:
        assert now_s <= max(goal_s, SLACK * alone_s)
    after = Material(checkpoints=1, chain_bytes=found.base_bytes, fetch_bytes=0, base_bytes=found.base_bytes)
    assert at_rest(after, rates, owes=False, longest=0, goal_s=goal_s) is None


def test_the_goal_counts_bytes_and_checkpoints():
    assert restore_s(GB, 3, ChainRates(read_bytes_per_s=1e8)) == pytest.approx(10 + 3 * CHECKPOINT_S)
    long = Material(checkpoints=10, chain_bytes=3 * GB, fetch_bytes=0, base_bytes=GB)
    found = at_rest(long, RATES, owes=False, longest=16, goal_s=20.0)
    assert found is not None
    assert (found.why, found.text) == (
        "goal", "a restore would take 32.0 s, the goal is 20 s, compacted 10.2 s",
    )  # fmt: skip
    assert at_rest(long, RATES, owes=False, longest=16, goal_s=33.0) is None
    assert at_cut(CACHED, FULL, RATES, pays=False, goal_s=13.0) is not None


def test_what_the_next_cuts_build_on_is_compacted():
    run, attempt = begun()
    base = run.commit(attempt, 1, stored_bytes=1000)
    first = run.commit(attempt, 2, base, stored_bytes=300)
    second = run.commit(attempt, 3, first, stored_bytes=30)
    state = run.log.state
    assert target(state, second, consecutive=False) == first
    assert target(state, second, consecutive=True) == second
    assert target(state, base, consecutive=False) == base
    assert material(state, second, 0) == Material(
        checkpoints=3, chain_bytes=1330, fetch_bytes=1330, base_bytes=1000
    )
    assert material(state, second, 1200).fetch_bytes == 130
    run.compacted(first)
    assert material(run.log.state, second, 0) == Material(
        checkpoints=2, chain_bytes=39, fetch_bytes=39, base_bytes=9
    )


@pytest.mark.parametrize(
    ("checkpoints", "longest", "long"), [(2, 16, 0), (16, 16, 0), (17, 16, 1), (1000, 0, 0)]
)
def test_a_chain_is_too_long_beyond_the_setting(checkpoints, longest, long):
    chain = Material(checkpoints=checkpoints, chain_bytes=10, fetch_bytes=0, base_bytes=5)
    found = at_rest(chain, RATES, owes=False, longest=longest, goal_s=0)
    assert (found is not None and found.why == "length") == bool(long)
