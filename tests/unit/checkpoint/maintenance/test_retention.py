"""Retention keeps what must be kept; gc deletes retired objects after their grace, and the log then forgets them."""

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.chain import live_prefixes
from deltashard_checkpoint.log.entry import Reclaimed
from deltashard_checkpoint.log.replay import EntryRefused, fold
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement, kept
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import MemoryRun, started_run


def chains(run: MemoryRun, attempt: int, count: int = 4) -> list[tuple[int, int]]:
    found = []
    for n in range(count):
        base = run.commit(attempt, 10 * n + 1, step=100 * n)
        found.append((base, run.commit(attempt, 10 * n + 2, base, step=100 * n + 50)))
    return found


def test_last_k_are_kept_with_their_chains_and_one_independent_chain():
    run = MemoryRun()
    pairs = chains(run, run.open().attempt)
    assert kept(run.log.state, Retention(keep_last=1)) == {*pairs[-1], *pairs[-2]}
    assert kept(run.log.state, Retention(keep_last=5)) == {*pairs[-1], *pairs[-2], *pairs[-3]}


def test_every_nth_step_every_hour_and_pins_are_kept():
    run, attempt = started_run()
    seqs = []
    for snapshot_id in range(1, 13):
        seqs.append(
            run.commit(
                attempt, snapshot_id, step=snapshot_id * 10, pins=("best",) if snapshot_id in {3, 5} else ()
            )
        )
        run.time.now_s += 600
    last_two = set(seqs[-2:])
    assert kept(run.log.state, Retention(keep_last=1, keep_pins=False)) == last_two
    assert kept(run.log.state, Retention(keep_last=1)) == last_two | {seqs[4]}
    by_step = kept(run.log.state, Retention(keep_last=1, keep_pins=False, every_steps=40))
    assert by_step == last_two | {seqs[0], seqs[3], seqs[7], seqs[11]}
    hours = {int(run.log.state.checkpoints[seq].at_s // 3600): seq for seq in reversed(seqs)}
    assert kept(run.log.state, Retention(keep_last=1, keep_pins=False, every_s=3600)) == last_two | set(
        hours.values()
    )


@pytest.mark.parametrize(
    ("checkpoints", "prefixes", "why"),
    [
        ([2], [], "chain reads"),
        ([2, 3, 4, 5, 6, 7, 8, 9], [], "every checkpoint"),
        ([99], [], "not live"),
        ([], [snapshot_prefix(1, 1)], "live checkpoint reads"),
        ([], [snapshot_prefix(1, 33)], "may still be committed"),
        ([], [snapshot_prefix(7, 1)], "may still be committed"),
    ],
)
def test_log_refuses_retirement_of_needed_objects(checkpoints, prefixes, why):
    run = MemoryRun()
    chains(run, run.open().attempt)
    with pytest.raises(EntryRefused, match=why):
        run.retire(checkpoints, prefixes)


def test_zero_or_negative_retention_is_refused():
    for bad in ({"keep_last": 0}, {"every_steps": 0}, {"every_s": -1.0}):
        with pytest.raises(UserError):
            Retention(**bad)


# gc


def test_gc_waits_for_the_grace_period_and_is_idempotent():
    run, attempt = started_run()
    chains(run, attempt)
    append_retirement(run.log, Retention(keep_last=1))
    before = list(run.memory.list("job/data/"))
    early = garbage_collection.collect(run.log, grace_s=100)
    assert (early.objects, len(early.waiting)) == (0, 4)
    run.time.now_s += 101
    dry = garbage_collection.collect(run.log, grace_s=100, dry_run=True)
    assert list(run.memory.list("job/data/")) == before
    done = garbage_collection.collect(run.log, grace_s=100)
    assert (dry.objects, dry.prefixes) == (done.objects, done.prefixes) == (4, early.waiting)
    left = {info.key for info in run.memory.list("job/data/")}
    assert left == {info.key for info in before} - {
        i.key for i in before if garbage_collection.prefix_of(i.key[4:]) in done.prefixes
    }
    assert garbage_collection.collect(run.log, grace_s=100).objects == 0
    run.memory.put(f"job/{done.prefixes[0]}late.pack", b"a zombie's put that landed late")
    assert garbage_collection.collect(run.log, grace_s=100).objects == 1


def test_only_objects_of_dead_snapshots_are_collected():
    run, attempt = started_run()
    for snapshot_id in (1, 2, 3):
        run.memory.put(f"job/{snapshot_prefix(attempt, snapshot_id)}00000-{'a' * 16}-00000.pack", b"x")
    run.commit(attempt, 2)
    assert garbage_collection.orphaned_prefixes(run.log, run.log.state) == (snapshot_prefix(attempt, 1),)
    run.memory.put("job/data/strange", b"foreign")
    compaction = "data/compact-cccccccccccccccc/"
    run.memory.put(f"job/{compaction}00000.pack", b"x")
    assert compaction not in garbage_collection.orphaned_prefixes(run.log, run.log.state)
    run.time.now_s += 25 * 3600
    assert garbage_collection.orphaned_prefixes(run.log, run.log.state) == (
        snapshot_prefix(attempt, 1),
        compaction,
    )
    entry = append_retirement(
        run.log, Retention(), orphaned_prefixes=garbage_collection.orphaned_prefixes(run.log, run.log.state)
    )
    assert entry.prefixes == (snapshot_prefix(attempt, 1), compaction)
    run.time.now_s += 1000
    assert garbage_collection.collect(run.log).objects == 2
    run.open()
    assert garbage_collection.orphaned_prefixes(run.log, run.log.state) == (snapshot_prefix(attempt, 3),)


# Forgetting


def maintain(
    run: MemoryRun, *, keep_last: int = 1, grace_s: float = 600.0, **options
) -> garbage_collection.CollectResult:
    """Do one round of a sidecar's retention and garbage collection."""
    state = run.log.refresh()
    append_retirement(
        run.log,
        Retention(keep_last=keep_last),
        orphaned_prefixes=garbage_collection.orphaned_prefixes(run.log, state),
    )
    return garbage_collection.collect(run.log, grace_s=grace_s, **options)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    keep_last=st.integers(1, 4),
    chain=st.integers(1, 5),
    litter_every=st.integers(1, 9),
    grace_s=st.sampled_from([0.0, 600.0]),
)
def test_state_and_fold_size_are_independent_of_run_length(keep_last, chain, litter_every, grace_s):
    """With a save a minute and retention of the last few, the state never grows beyond that of the first 160 saves."""
    run, attempt = started_run()
    remembered, sizes, base = [], [], None
    for snapshot_id in range(1, 321):
        if snapshot_id % litter_every == 0:  # an unfinished save, replaced by another one
            run.memory.put(
                f"job/{snapshot_prefix(attempt, 2 * snapshot_id - 1)}00000-{'a' * 16}-00000.pack", b"x"
            )
        seq = run.commit(attempt, 2 * snapshot_id, None if snapshot_id % chain == 0 else base)
        base = seq if snapshot_id % chain == 0 or base is None else base
        run.time.now_s += 60
        maintain(run, keep_last=keep_last, grace_s=grace_s)
        remembered.append(len(run.log.state.retired))
        sizes.append(len(folded_state.dump(run.log.state)))
    assert max(remembered) <= garbage_collection.MIN_RECLAIM_PREFIXES + 2 * (
        10 + chain
    )  # objects in their grace period, and the end of one chain
    assert max(remembered[160:]) <= max(remembered[:160]) + 8  # rounds and chains have different periods
    assert max(sizes[160:]) <= max(sizes[:160]) + 1000
    left = {prefix for prefix, _ in garbage_collection.data_objects(run.log)}
    assert left <= live_prefixes(run.log.state) | run.log.state.retired.keys()
    assert run.reader().refresh() == run.log.state
    assert (
        fold(RunState(run="job"), [run.log.read_slot(n) for n in range(run.log.state.tip + 1)])
        == run.log.state
    )


def test_objects_in_their_grace_period_are_never_forgotten():
    """A forgotten prefix would be retired again at every save. Its grace would restart, and it would never be deleted."""
    run, attempt = started_run()
    first = snapshot_prefix(attempt, 1)
    for snapshot_id in range(1, 200):
        run.commit(attempt, snapshot_id)
        run.time.now_s += 1
        assert maintain(run, grace_s=1000.0).objects == 0
    named_by = run.log.state.retired[first]
    assert len(run.log.state.retired) > 2 * garbage_collection.MIN_RECLAIM_PREFIXES
    run.time.now_s += 900
    assert first in maintain(run, grace_s=1000.0).prefixes
    assert named_by < run.log.state.tip
    run.time.now_s += 1000
    maintain(run, grace_s=1000.0)
    assert not run.log.state.retired


def test_reclaim_entry_covers_only_earlier_entries():
    run = MemoryRun()
    run.commit(run.open().attempt, 1)
    with pytest.raises(EntryRefused, match="not before it"):
        run.append(Reclaimed, through=run.log.state.tip + 1)
