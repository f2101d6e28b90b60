"""Opening attempts: which writers are fenced, what is resumed, which owner may open a run."""

import pytest
from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogStopped
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.selection import NothingRestorable, select
from deltashard_checkpoint.maintenance.garbage_collection import collect, data_objects, orphaned_prefixes
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.stores.abc import ConditionalPutUnsupported
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import OwnerMismatch
from deltashard_checkpoint.write.closing import mark_closing
from deltashard_checkpoint.write.fencing import FencedError

from tests.support.checkpoint.run_builder import MemoryRun, started_run


def test_a_store_that_overwrites_is_refused():
    overwriting = MemoryStore()
    overwriting.put_if_absent = overwriting.put
    with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
        MemoryRun(overwriting).open()


def test_which_argument_selects_by_seq_step_pin_or_none():
    run, attempt = started_run()
    a, b, c = (
        run.commit(attempt, snapshot_id, step=step) for snapshot_id, step in ((1, 10), (2, 20), (3, 20))
    )
    state = run.log.state
    assert select(state, "none") is None
    assert [select(state, which).seq for which in ("latest", f"seq:{a}", "step:20")] == [c, a, c]
    assert select(state, "step:20", [c]).seq == b
    for which in ("step:11", "seq:99", "pin:worst"):
        with pytest.raises(CheckpointNotFound, match="no live, valid checkpoint"):
            select(state, which)
    for which in ("newest", "seq:", "seq:x", "step:-1", "seq:\u00b2"):
        with pytest.raises(UserError, match="is unknown"):
            select(state, which)


def test_fallback_excludes_every_chain_of_the_bad_checkpoint():
    run, attempt = started_run()
    old = run.commit(attempt, 1)
    base = run.commit(attempt, 2)
    run.commit(attempt, 3, base)
    opened = run.open(exclude=[base])
    assert opened.resume.seq == old
    assert opened.fell_back
    with pytest.raises(NothingRestorable):
        run.open(exclude=[base, old])


def test_another_owner_needs_takeover():
    run = MemoryRun()
    run.open()
    with pytest.raises(OwnerMismatch, match="belongs to 'me'"):
        run.open(owner="you")
    assert run.open(owner="you", takeover=True).state.owner == "you"
    with pytest.raises(OwnerMismatch):
        run.open(owner="me")


def test_abandoned_marker_costs_one_timeout_and_an_old_one_none():
    run, first = started_run()
    mark_closing(run.log, first, "00000-a")
    assert run.open(closing_wait_s=20.0).waited_s == pytest.approx(20.0, abs=0.1)
    assert run.open(closing_wait_s=20.0).waited_s == 0.0


def without_folds(run: MemoryRun) -> None:
    run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])


def test_unreadable_first_entry_is_refused():
    run, _ = started_run()
    run.memory.put("job/" + entry_key(0), b"corrupt")
    without_folds(run)
    run.log = run.reader()
    with pytest.raises(LogStopped, match="first entry"):
        run.open()


@pytest.mark.parametrize("damage", ["rot", "loss"])
@pytest.mark.parametrize("kind", ["checkpoint", "retire", "compact", "attempt"])
def test_attempt_repairs_the_log_before_voiding_slots(kind, damage):
    """Two faults coincide: the entry is damaged, and the folded states that would replace it are absent."""
    run, first = started_run()
    base = run.commit(first, 1)
    bad = {
        "checkpoint": lambda: run.commit(first, 2), "retire": lambda: run.retire((), [snapshot_prefix(first, 0)]),
        "compact": lambda: run.compacted(base) or run.log.state.tip, "attempt": lambda: run.open().attempt,
    }[kind]()  # fmt: skip
    attempt = run.log.state.attempt
    last = [run.commit(attempt, snapshot_id) for snapshot_id in (3, 4)][-1]
    without_folds(run)
    key = "job/" + entry_key(bad)
    run.memory.delete([key]) if damage == "loss" else run.memory.put(key, b"corrupt")
    run.log = run.reader()
    opened = run.open()
    assert (opened.resume.seq, opened.voided, opened.fell_back) == (last, (bad, last + 1), True)
    assert f"log entry {last + 1} continues without {bad}" in opened.damage
    after = run.commit(opened.attempt, 1, last)
    assert run.reader().refresh().newest().seq == after
    assert run.open().damage == ""


def test_attempt_checks_ownership_before_a_repair():
    run = MemoryRun()
    run.commit(run.open().attempt, 1)
    run.memory.delete(["job/" + entry_key(2)])
    before = {info.key for info in run.memory.list("")}
    run.log = run.reader()
    with pytest.raises(DeltashardError):  # no log entry remains, and another owner's run is not started again
        run.open(owner="you")
    assert {info.key for info in run.memory.list("")} == before


@pytest.mark.parametrize("how", ["void", "repair"])
def test_voided_checkpoint_keeps_its_data_during_the_attempt(how):
    """The entry may survive in a copy. The data is released at the next attempt after one that committed."""
    run, first = started_run()
    base, lost = run.commit(first, 1), run.commit(first, 2)
    key = "job/" + entry_key(lost)
    run.memory.put(key, b"corrupt") if how == "void" else run.memory.delete([key])
    run.log = run.reader()
    again = [run.open().attempt for _ in range(2)][-1]

    def retired() -> set[str]:
        state = run.log.refresh()
        append_retirement(
            run.log, Retention(keep_last=1), orphaned_prefixes=orphaned_prefixes(run.log, state)
        )
        collect(run.log, grace_s=0.0)
        return {snapshot_prefix(first, 2)} - {prefix for prefix, _ in data_objects(run.log)}

    for snapshot_id in (1, 2, 3):
        run.commit(again, snapshot_id)
        assert not retired()
    assert base not in run.log.state.checkpoints, "retention continues"
    with pytest.raises(EntryRefused, match="voided or lost"):
        run.retire((), [snapshot_prefix(first, 2)])
    assert run.reader().refresh() == run.log.state
    run.open()
    assert retired()


def test_reader_refolds_after_an_entry_is_voided():
    run, first = started_run()
    good = run.commit(first, 1)
    lost = run.commit(first, 2)
    reader = run.reader()
    assert reader.refresh().newest().seq == lost
    run.memory.put("job/" + entry_key(lost), b"corrupt")
    run.log = run.reader()
    run.open()
    assert reader.refresh().newest().seq == good


def test_group_pod_may_reopen_after_attempts_it_took_part_in():
    """Rank 0 moves from pod one to pod two and back. The first pod took part in the second's attempt."""
    run = MemoryRun()
    run.open(workload="job", pod="one", world_size=2)
    second = run.open(workload="job", pod="two", world_size=2).attempt
    third = run.open(workload="job", pod="one", world_size=2, participated_attempt=second).attempt
    assert third > second
    with pytest.raises(FencedError, match="another pod"):  # pod two was not in the third attempt
        run.open(workload="job", pod="two", world_size=2, participated_attempt=second)
    run.open(workload="job", pod="two", world_size=2, participated_attempt=third)
