"""Opening attempts: who is fenced, what is resumed, who may own a run."""

import pytest
from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.format.object_key import cut_prefix
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.listing import REMOVAL, Hint
from deltashard_checkpoint.log.log_error import LogGap, LogStopped, LogWentBack
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.selection import NothingRestorable, select
from deltashard_checkpoint.maintenance import retention
from deltashard_checkpoint.maintenance.garbage_collection import collect, data_objects, debris
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.stores.abc import ConditionalPutUnsupported
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write import attempt as attempts
from deltashard_checkpoint.write.attempt import OwnerMismatch
from deltashard_checkpoint.write.closing import mark_closing, unmark_closing
from deltashard_checkpoint.write.fencing import FencedError, TakenOver

from tests.support.checkpoint.run_builder import Run, begun


def test_a_store_is_tried_before_anybody_waits_for_it():
    """What was tried once is not tried again when an attempt is opened, and what overwrites is refused at once."""
    run = Run()
    run.log.probe()
    tried = []
    put = run.memory.put_if_absent
    run.memory.put_if_absent = lambda key, data: (tried.append(key), put(key, data))[1]
    run.open()
    assert not [key for key in tried if "probe" in key]
    careless = MemoryStore()
    careless.put_if_absent = careless.put
    with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
        Run(careless).log.probe()


def test_which_chooses_by_seq_step_pin_or_nothing():
    run, attempt = begun()
    a, b, c = (
        run.commit(attempt, 1, step=10, pins=("best",)),
        run.commit(attempt, 2, step=20),
        run.commit(attempt, 3, step=20),
    )
    state = run.log.state
    assert select(state, "none") is None
    assert select(state, "latest").seq == c
    assert select(state, f"seq:{a}").seq == a
    assert select(state, "step:20").seq == c
    assert select(state, "step:20", [c]).seq == b
    assert select(state, "pin:best").seq == a
    for which in ("step:11", "seq:99", "pin:worst"):
        with pytest.raises(CheckpointNotFound, match="no live, valid checkpoint"):
            select(state, which)
    for which in ("newest", "seq:", "seq:x", "step:-1", "seq:²"):
        with pytest.raises(UserError, match="means nothing"):
            select(state, which)


def test_falling_back_excludes_every_chain_that_reads_the_bad_checkpoint():
    run, attempt = begun()
    old = run.commit(attempt, 1)
    base = run.commit(attempt, 2)
    run.commit(attempt, 3, base)
    opened = run.open(exclude=[base])
    assert opened.resume.seq == old
    assert opened.fell_back
    with pytest.raises(NothingRestorable):
        run.open(exclude=[base, old])


def test_a_fallbacks_lineage_does_not_claim_what_it_did_not_load():
    run, first = begun()
    old, bad = run.commit(first, 1), run.commit(first, 2)
    second = run.open(exclude=[bad]).attempt
    from deltashard_checkpoint.write.cut_reports import Abandoned

    with pytest.raises(Abandoned, match=f"covers {bad}"):
        run.commit(second, 1, bad)
    assert run.commit(second, 2, old)


def test_another_owner_must_say_takeover():
    run = Run()
    run.open()
    with pytest.raises(OwnerMismatch, match="belongs to 'me'"):
        run.open(owner="you")
    assert run.open(owner="you", takeover=True).state.owner == "you"
    with pytest.raises(OwnerMismatch):
        run.open(owner="me")


def test_opening_waits_for_a_closing_save_and_resumes_from_it(monkeypatch):
    run, first = begun()
    mark_closing(run.log, first, "00000-a")
    monkeypatch.setattr(run.time, "sleep", run.time.sleep)
    closer, done = run.reader(), []

    def sleep(seconds: float) -> None:
        run.time.now_s += seconds
        if not done and run.time.now_s > 1e9 + 3:
            done.append(run.commit(first, 1))
            unmark_closing(closer, first, "00000-a")

    from deltashard_checkpoint.backoff import Clocks

    opener = run.reader()
    opener.clocks = Clocks(wall_s=lambda: run.time.now_s, monotonic_s=lambda: run.time.now_s, sleep=sleep)
    opened = attempts.open_attempt(opener, owner="me", closing_wait_s=60.0)
    assert opened.resume.seq == done[0]
    assert 3 <= opened.waited_s < 60


def test_a_marker_nobody_removes_costs_one_bound_and_an_old_one_nothing():
    run, first = begun()
    mark_closing(run.log, first, "00000-a")
    assert run.open(closing_wait_s=20.0).waited_s == pytest.approx(20.0, abs=0.1)
    assert run.open(closing_wait_s=20.0).waited_s == 0.0


def test_an_unreadable_entry_is_left_behind_by_the_next_attempt_loudly():
    run, first = begun()
    good = run.commit(first, 1)
    run.commit(first, 2)
    run.memory.put("job/" + entry_key(3), b"rotten")
    run.log = run.reader()
    opened = run.open()
    assert opened.resume.seq == good
    assert (opened.voided, opened.fell_back) == ((3, 4), True)
    assert opened.damage.startswith("the log cannot be followed past entry 3: ")
    assert "entry 3 counts for nothing" in opened.damage
    for log in (run.log, run.reader()):
        state = log.refresh()
        assert state.stopped is None
        assert sorted(state.checkpoints) == [good]
    after = run.commit(opened.attempt, 1, good)
    assert run.reader().refresh().newest().seq == after
    again = run.open()
    assert (again.resume.seq, again.voided, again.fell_back, again.damage) == (after, None, False, "")


def test_a_run_whose_only_checkpoints_are_unreadable_is_not_begun_anew_unasked():
    """Not at the second try either: nothing is written, so the damage stays to be seen."""
    run = Run()
    run.commit(run.open().attempt, 1)
    run.memory.put("job/" + entry_key(2), b"")
    for _ in range(2):
        run.log = run.reader()
        with pytest.raises(NothingRestorable, match="cannot be followed past entry 2"):
            run.open()
    opened = run.open(which="none")
    assert (opened.resume, opened.voided, opened.fell_back) == (None, (2, 3), False)
    assert opened.damage


def test_an_unreadable_first_entry_is_refused_by_name():
    run = Run()
    run.open()
    run.memory.put("job/" + entry_key(0), b"rotten")
    assert run.open().attempt == 2, "the next entry names a folded state"
    run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])
    run.log = run.reader()
    with pytest.raises(LogStopped, match="first entry"):
        run.open()


def without_folds(run: Run) -> None:
    run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])


@pytest.mark.parametrize("damage", ["rot", "loss"])
@pytest.mark.parametrize("kind", ["checkpoint", "retire", "compact", "attempt"])
def test_an_attempt_takes_what_a_repair_keeps_before_it_gives_slots_up(kind, damage):
    """Two faults at once: an entry, and the folded states that would make it harmless."""
    run, first = begun()
    base = run.commit(first, 1)
    bad = {
        "checkpoint": lambda: run.commit(first, 2), "retire": lambda: run.retire((), [cut_prefix(first, 0)]),
        "compact": lambda: run.compacted(base) or run.log.state.tip, "attempt": lambda: run.open().attempt,
    }[kind]()  # fmt: skip
    attempt = run.log.state.attempt
    last = [run.commit(attempt, cut) for cut in (3, 4)][-1]
    without_folds(run)
    key = "job/" + entry_key(bad)
    run.memory.delete([key]) if damage == "loss" else run.memory.put(key, b"rotten")
    run.log = run.reader()
    opened = run.open()
    assert (opened.resume.seq, opened.voided, opened.fell_back) == (last, (bad, last + 1), True)
    assert f"log entry {last + 1} continues without {bad}" in opened.damage
    after = run.commit(opened.attempt, 1, last)
    assert run.reader().refresh().newest().seq == after
    assert run.open().damage == ""


def test_a_lost_tip_costs_itself():
    run, first = begun()
    good, lost = run.commit(first, 1), run.commit(first, 2)
    run.memory.delete(["job/" + entry_key(lost)])
    living, run.log = run.log, run.reader()
    opened = run.open()
    assert (opened.resume.seq, opened.voided, opened.fell_back) == (good, (lost, lost), True)
    assert "newest entries are gone" in opened.damage
    run.log = living
    with pytest.raises(LogWentBack):
        run.commit(first, 3)
    assert run.reader().refresh().newest().seq == good


@pytest.mark.parametrize("hint", [REMOVAL, Hint(seq=9, whole=False)])
def test_what_a_copy_or_a_removal_leaves_is_never_repaired(hint):
    run = Run()
    run.commit(run.open().attempt, 1)
    run.log.leave_hint(hint)
    before = {info.key: run.memory.get(info.key) for info in run.memory.list("")}
    run.log = run.reader()
    with pytest.raises(LogGap):
        run.open()
    assert {info.key: run.memory.get(info.key) for info in run.memory.list("")} == before


def test_a_repair_by_an_attempt_asks_who_it_is_first():
    run = Run()
    run.commit(run.open().attempt, 1)
    run.memory.delete(["job/" + entry_key(2)])
    before = {info.key for info in run.memory.list("")}
    run.log = run.reader()
    with pytest.raises(DeltashardError):  # nothing is left, and another's run is not begun anew
        run.open(owner="you")
    assert {info.key for info in run.memory.list("")} == before


@pytest.mark.parametrize("how", ["void", "repair"])
def test_what_was_given_up_keeps_its_data_while_the_attempt_lives(how):
    """A person may find the entry in a copy. Attempts that never commit do not count; the next that did lets it go."""
    run, first = begun()
    base, lost = run.commit(first, 1), run.commit(first, 2)
    key = "job/" + entry_key(lost)
    run.memory.put(key, b"rotten") if how == "void" else run.memory.delete([key])
    run.log = run.reader()
    again = [run.open().attempt for _ in range(2)][-1]

    def dead() -> set[str]:
        state = run.log.refresh()
        append_retirement(run.log, Retention(keep_last=1), debris=debris(run.log, state))
        collect(run.log, grace_s=0.0)
        return {cut_prefix(first, 2)} - {prefix for prefix, _ in data_objects(run.log)}

    for cut in (1, 2, 3):
        run.commit(again, cut)
        assert not dead()
    assert base not in run.log.state.checkpoints, "retention goes on"
    with pytest.raises(EntryRefused, match="given up"):
        run.retire((), [cut_prefix(first, 2)])
    assert run.reader().refresh() == run.log.state
    run.open()
    assert dead()


def test_a_reader_that_had_folded_a_voided_entry_folds_again():
    run, first = begun()
    good = run.commit(first, 1)
    lost = run.commit(first, 2)
    reader = run.reader()
    assert reader.refresh().newest().seq == lost
    run.memory.put("job/" + entry_key(lost), b"rotten")
    run.log = run.reader()
    run.open()
    assert reader.refresh().newest().seq == good


def test_a_workload_that_was_displaced_does_not_come_back_by_itself():
    """A run handed from one workload to the next is handed once: no loop in which each restart fences the other."""
    run, first = begun(workload="job-a")
    seq = run.commit(first, 1)
    second = run.open(workload="job-b")
    assert second.resume.seq == seq
    with pytest.raises(TakenOver, match="another workload \\(job-b\\)") as raised:
        run.commit(first, 2)
    assert isinstance(raised.value, FencedError)
    tip = run.log.refresh().tip
    with pytest.raises(TakenOver, match="takeover=True") as raised:
        run.open(workload="job-a")
    assert (raised.value.attempt, raised.value.by) == (first, second.attempt)
    assert run.log.refresh().tip == tip, "a refusal fences nobody"
    third = run.open(workload="job-b").attempt
    run.commit(third, 1)
    assert run.open(workload="job-a", takeover=True).attempt > third
    with pytest.raises(TakenOver):
        run.open(workload="job-b")


def test_a_pod_that_was_displaced_does_not_come_back_either():
    """A zombie's restarts fence nobody; its own container restarts before that were welcome."""
    run = Run()
    run.open(workload="job", pod="one")
    first = run.open(workload="job", pod="one").attempt
    second = run.open(workload="job", pod="two").attempt
    with pytest.raises(FencedError, match="another pod \\(two\\)") as raised:
        run.open(workload="job", pod="one")
    assert type(raised.value) is FencedError
    assert (raised.value.attempt, raised.value.by) == (first, second)
    run.open(workload="job", pod="two")
    run.open(workload="job", pod="three")
    run.open(workload="job", pod="one", takeover=True)


def test_a_pod_of_a_group_may_open_again_after_others_in_which_it_took_part():
    """Rank 0 goes from pod one to pod two and back: the first was in the second's attempt, whatever the log says."""
    run = Run()
    run.open(workload="job", pod="one", world_size=2)
    second = run.open(workload="job", pod="two", world_size=2).attempt
    third = run.open(workload="job", pod="one", world_size=2, took_part=second).attempt
    assert third > second
    with pytest.raises(FencedError, match="another pod"):  # it was not in the third
        run.open(workload="job", pod="two", world_size=2, took_part=second)
    run.open(workload="job", pod="two", world_size=2, took_part=third)


def test_fencing_within_a_workload_and_outside_of_clusters_is_plain():
    """A replaced pod, or a laptop: the older one ends, restarts are welcome."""
    for workload in ("job-a", ""):
        run, first = begun(workload=workload)
        run.open(workload=workload)
        with pytest.raises(FencedError) as raised:
            run.commit(first, 1)
        assert type(raised.value) is FencedError
        run.open(workload=workload)


def test_workloads_are_remembered_by_entries_and_cached_folds():
    run = Run()
    run.open(workload="job-a", pod="one")
    run.open()
    assert run.reader().refresh() == run.log.state
    assert b"workload" in run.memory.get(f"job/{entry_key(1)}")
    assert b"workload" not in run.memory.get(f"job/{entry_key(2)}")
    state = run.log.state
    data = folded_state.dump(state)
    assert folded_state.load(data, "job", folded_state.name_of(state, data)) == state


def reading(run: Run, **options: object) -> attempts.ResumeBasis:
    """What a trainer reads of a store that takes no entry."""
    return attempts.read_unopened(run.reader(), owner="me", **options)[2]


def opening(run: Run, basis: attempts.ResumeBasis, **options: object) -> attempts.Opened:
    return attempts.open_attempt(run.reader(), owner="me", closing_wait_s=0.0, basis=basis, **options)


def test_an_attempt_that_is_opened_late_has_the_entry_that_it_would_have_had():
    """What only frees or names may have come between; nothing that a trainer did."""
    run, first = begun()
    run.commit(first, 1)
    newest = run.commit(first, 2)
    entries = run.log.state.tip
    state, chosen, basis = attempts.read_unopened(run.reader(), owner="me")
    assert (chosen.seq, state.tip, run.reader().refresh().tip) == (newest, entries, entries)
    retention.append_retirement(run.reader(), retention.Retention(keep_last=1))
    opened = opening(run, basis)
    assert (opened.resume.seq, opened.attempt) == (newest, run.reader().refresh().attempt)
    run.log.refresh()
    run.commit(opened.attempt, 1, newest)
