"""When a compaction replaces a baseline: the costs of both, and what is compacted."""

from deltashard_checkpoint.maintenance.synthetic import (
    CompactionInputs,
    FullSnapshot,
    at_snapshot,
    between_snapshots,
    compaction_inputs,
    compaction_s,
    compaction_target,
    full_snapshot_s,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import MemoryRun

GB = 10**9
CACHED = CompactionInputs(checkpoints=2, chain_bytes=int(1.4 * GB), fetch_bytes=0, base_bytes=GB)
FULL = FullSnapshot(raw_bytes=3 * GB, stored_bytes=GB, stall_s=0.2)

sizes = st.integers(1, 10**12)
materials = st.builds(
    lambda base, deltas, missing, n: CompactionInputs(
        checkpoints=n, chain_bytes=base + deltas, fetch_bytes=min(missing, base + deltas), base_bytes=base
    ),
    sizes, sizes, sizes, st.integers(2, 40),
)  # fmt: skip


def test_only_cached_chains_of_equal_precision_are_compacted():
    """Compacted rows would keep their 8 bits permanently, and each restore would read them."""
    assert at_snapshot(CACHED, FULL).why == "cheaper"
    uncached = CompactionInputs(checkpoints=2, chain_bytes=14 * GB, fetch_bytes=14 * GB, base_bytes=GB)
    assert at_snapshot(uncached, FULL) is None
    assert at_snapshot(CACHED, FullSnapshot(raw_bytes=3 * GB, stored_bytes=GB // 3, stall_s=0.2)) is None


@given(materials, st.builds(FullSnapshot, raw_bytes=sizes, stored_bytes=sizes, stall_s=st.floats(0, 10)))
def test_compaction_is_chosen_only_if_cheaper(found, full):
    assert at_snapshot(found, full) is None or compaction_s(found) < full_snapshot_s(full)


def test_chain_longer_than_the_setting_is_compacted():
    found = [between_snapshots(n, deferred=False, longest=16) for n in (2, 16, 17)]
    assert [each and each.why for each in found] == [None, None, "length"]
    assert between_snapshots(1000, deferred=False, longest=0) is None
    assert between_snapshots(2, deferred=True, longest=16).why == "deferred"


def test_compaction_targets_the_base_of_the_next_snapshots():
    run = MemoryRun()
    attempt = run.open().attempt
    base = run.commit(attempt, 1, stored_bytes=1000)
    first = run.commit(attempt, 2, base, stored_bytes=300)
    second = run.commit(attempt, 3, first, stored_bytes=30)
    state = run.log.state
    assert compaction_target(state, second, consecutive=False) == first
    assert compaction_target(state, second, consecutive=True) == second
    assert compaction_target(state, base, consecutive=False) == base
    assert compaction_inputs(state, second, 0) == CompactionInputs(
        checkpoints=3, chain_bytes=1330, fetch_bytes=1330, base_bytes=1000
    )
    assert compaction_inputs(state, second, 1200).fetch_bytes == 130
    run.compacted(first)
    assert compaction_inputs(run.log.state, second, 0) == CompactionInputs(
        checkpoints=2, chain_bytes=39, fetch_bytes=39, base_bytes=9
    )
