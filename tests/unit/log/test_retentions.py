"""Retention keeps what must be kept, and gc deletes what retire named, after its grace, and nothing else."""

import pytest
from deltashard_checkpoint import gcs, retentions
from deltashard_checkpoint.entries import entry_key
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.folds import EntryRefused
from deltashard_checkpoint.keys import cut_prefix
from deltashard_checkpoint.logs import LogStopped
from deltashard_checkpoint.retentions import Retention, append_retirement, kept, retire

from tests.unit.log.builders import Run


def chains(run: Run, attempt: int, count: int = 4) -> list[tuple[int, int]]:
    """(baseline, delta) pairs."""
    found = []
    for n in range(count):
        base = run.commit(attempt, 10 * n + 1, step=100 * n)
        found.append((base, run.commit(attempt, 10 * n + 2, base, step=100 * n + 50)))
    return found


def test_the_last_k_are_kept_with_their_chains_and_a_second_independent_chain():
    run = Run()
    pairs = chains(run, run.open().attempt)
    assert kept(run.log.state, Retention(keep_last=1)) == {*pairs[-1], *pairs[-2]}
    assert kept(run.log.state, Retention(keep_last=5)) == {*pairs[-1], *pairs[-2], *pairs[-3]}


def test_every_nth_step_hour_and_pins_are_kept():
    run = Run()
    attempt = run.open().attempt
    seqs = []
    for cut in range(1, 13):
        seqs.append(run.commit(attempt, cut, step=cut * 10, pins=("best",) if cut in {3, 5} else ()))
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


def test_what_the_newest_attempt_resumed_from_stays_until_its_first_commit():
    run = Run()
    first = run.open().attempt
    pairs = chains(run, first)
    opened = run.open(which=f"seq:{pairs[0][1]}")
    assert set(pairs[0]) <= kept(run.log.state, Retention(keep_last=1))
    with pytest.raises(EntryRefused, match="newest attempt"):
        run.retire([pairs[0][1]])
    run.commit(opened.attempt, 1, step=1000)
    assert not set(pairs[0]) & kept(run.log.state, Retention(keep_last=1))
    assert append_retirement(run.log, Retention(keep_last=1)).checkpoints


def test_a_retirement_is_planned_once_and_then_there_is_nothing_to_do():
    run = Run()
    attempt = run.open().attempt
    pairs = chains(run, attempt)
    entry = append_retirement(run.log, Retention(keep_last=1))
    assert entry.checkpoints == (*pairs[0], *pairs[1])
    assert entry.prefixes == tuple(cut_prefix(attempt, cut) for cut in (1, 2, 11, 12))
    assert append_retirement(run.log, Retention(keep_last=1)) is None
    assert retire(run.log.state, Retention(keep_last=1)) is None


@pytest.mark.parametrize(
    ("checkpoints", "prefixes", "why"),
    [
        ([2], [], "chain reads"),
        ([2, 3, 4, 5, 6, 7, 8, 9], [], "every checkpoint"),
        ([99], [], "not live"),
        ([], [cut_prefix(1, 1)], "live checkpoint reads"),
        ([], [cut_prefix(1, 33)], "may still be committed"),
        ([], [cut_prefix(7, 1)], "may still be committed"),
    ],
)
def test_the_log_refuses_a_retirement_that_would_lose_something(checkpoints, prefixes, why):
    run = Run()
    chains(run, run.open().attempt)
    with pytest.raises(EntryRefused, match=why):
        run.retire(checkpoints, prefixes)


def test_numbers_must_be_positive():
    for bad in ({"keep_last": 0}, {"every_steps": 0}, {"every_s": -1.0}):
        with pytest.raises(UserError):
            Retention(**bad)


# gc


def test_gc_waits_for_the_grace_by_the_stores_clock_and_is_idempotent():
    run = Run()
    attempt = run.open().attempt
    chains(run, attempt)
    append_retirement(run.log, Retention(keep_last=1))
    before = list(run.memory.list("job/data/"))
    early = gcs.collect(run.log, grace_s=100)
    assert (early.objects, len(early.waiting)) == (0, 4)
    run.time.now_s += 101
    dry = gcs.collect(run.log, grace_s=100, dry_run=True)
    assert list(run.memory.list("job/data/")) == before
    done = gcs.collect(run.log, grace_s=100)
    assert (dry.objects, dry.prefixes) == (done.objects, done.prefixes) == (4, early.waiting)
    left = {info.key for info in run.memory.list("job/data/")}
    assert left == {info.key for info in before} - {
        i.key for i in before if gcs.prefix_of(i.key[4:]) in done.prefixes
    }
    assert gcs.collect(run.log, grace_s=100).objects == 0
    run.memory.put(f"job/{done.prefixes[0]}late.pack", b"a zombie's put that landed late")
    assert gcs.collect(run.log, grace_s=100).objects == 1


def test_litter_of_dead_cuts_is_named_and_deleted_and_that_of_live_ones_is_not():
    run = Run()
    attempt = run.open().attempt
    for cut in (1, 2, 3):
        run.memory.put(f"job/{cut_prefix(attempt, cut)}00000-{'a' * 16}-00000.pack", b"x")
    run.commit(attempt, 2)
    assert gcs.debris(run.log, run.log.state) == (cut_prefix(attempt, 1),)
    run.memory.put("job/data/strange", b"not ours")
    compaction = "data/compact-cccccccccccccccc/"
    run.memory.put(f"job/{compaction}00000.pack", b"x")
    assert compaction not in gcs.debris(run.log, run.log.state)
    run.time.now_s += 25 * 3600
    assert gcs.debris(run.log, run.log.state) == (cut_prefix(attempt, 1), compaction)
    entry = append_retirement(run.log, Retention(), debris=gcs.debris(run.log, run.log.state))
    assert entry.prefixes == (cut_prefix(attempt, 1), compaction)
    run.time.now_s += 1000
    assert gcs.collect(run.log).objects == 2
    run.open()
    assert gcs.debris(run.log, run.log.state) == (cut_prefix(attempt, 3),)


def test_an_unreadable_entry_blocks_gc():
    run = Run()
    attempt = run.open().attempt
    chains(run, attempt)
    append_retirement(run.log, Retention(keep_last=1))
    tip = run.log.state.tip
    run.time.now_s += 1e6
    run.memory.put("job/" + entry_key(tip + 1), b"rotten")
    with pytest.raises(LogStopped):
        gcs.collect(run.reader())


def test_what_the_newest_was_written_against_is_kept_for_the_next_cut():
    run = Run()
    attempt = run.open().attempt
    base = run.commit(attempt, 1)
    for cut in range(2, 8):
        run.commit(attempt, cut, base)
    keep = retentions.kept(run.log.state, Retention(keep_last=1))
    assert keep == {base, run.log.state.newest().seq}
