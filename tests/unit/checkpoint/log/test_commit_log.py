"""The shell around the fold: where the tip is, who won a slot, and what happens when the store misbehaves."""

import hashlib
import itertools
import json
import threading
from dataclasses import replace

import pytest
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, FormatError, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import canonical
from deltashard_checkpoint.format.object_key import cut_prefix
from deltashard_checkpoint.log import commit_log, folded_state
from deltashard_checkpoint.log.chain import chain, lineage
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, FoldName, Genesis, Sealed, entry_key, named_fold
from deltashard_checkpoint.log.entry_codec import seal
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.log_error import AppendUnknown, LogGap, LogStopped
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance import word
from deltashard_checkpoint.maintenance.retention import Retention, retire
from deltashard_checkpoint.stores import probe
from deltashard_checkpoint.stores.abc import AccessDenied, ConditionalPutUnsupported, StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import open_attempt
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.run_builder import Run, Time, resealed


def genesis(state: RunState, seq: int, writer: str) -> Genesis | None:
    if state.tip >= 0:
        return None
    return Genesis(seq=seq, previous="", writer=writer, at_s=0.0, run="job", owner="me")


def faulty_run() -> tuple[Run, FaultyStore]:
    run = Run()
    run.store = FaultyStore(run.memory)
    probe._probed.add(run.store)
    run.log = run.reader()
    return run, run.store


def test_an_empty_run_has_no_tip():
    state = Run().log.refresh()
    assert (state.tip, state.newest(), state.attempt) == (-1, None, None)


def test_a_reader_sees_what_another_wrote():
    run = Run()
    attempt = run.open().attempt
    reader = run.reader()
    assert reader.refresh() == run.log.state
    seq = run.commit(attempt, 1)
    assert reader.refresh().newest().seq == seq
    assert reader.state == run.log.state


def test_many_new_entries_are_read_in_parallel_and_in_order():
    run = Run()
    attempt = run.open().attempt
    for cut in range(40):
        run.commit(attempt, cut)
    assert run.reader(readers=8).refresh() == run.reader(readers=1).refresh() == run.log.state


def test_a_lost_acknowledgement_is_recognised_as_our_own_entry():
    run, store = faulty_run()
    store.fail_next(Fault.LOST_ACK, operation="put_if_absent")
    sealed = run.log.append(genesis, before="", after="")
    assert isinstance(sealed, Sealed)
    assert run.memory.get("job/" + entry_key(0)) == sealed.data


def test_a_put_that_lands_late_is_not_taken_for_absent():
    run, store = faulty_run()
    store.fail_next(Fault.LANDS_LATE, operation="put_if_absent")
    sealed = run.log.append(genesis, before="", after="")
    store.settle()
    assert run.memory.get("job/" + entry_key(0)) == sealed.data
    assert run.reader().refresh().tip == 0


def test_losing_a_slot_builds_the_entry_anew_on_top_of_the_winner():
    run = Run()
    attempt = run.open().attempt
    slow = run.reader()
    slow.refresh()
    run.commit(attempt, 1)
    seen = []

    def build(state, seq, writer):
        seen.append(seq)
        return None if len(seen) == 2 else run_checkpoint(run, attempt, 2, seq, writer)

    assert slow.append(build, before="", after="") is None
    assert seen == [2, 3]


def run_checkpoint(run, attempt, cut, seq, writer):
    said = run.report(attempt, cut)
    return Checkpoint(
        seq=seq, previous="", writer=writer, at_s=0.0, attempt=attempt, cut=cut, step=cut, parts=(said.part,),
        tables=said.tables, encodings=said.encodings, rows=8, raw_bytes=64, stored_bytes=100, stall_s=0.5, cut_at_s=0.0,
    )  # fmt: skip


def test_an_unavailable_store_is_waited_for_and_then_named():
    run, store = faulty_run()
    store.fail_next(Fault.UNAVAILABLE, times=4)
    run.log.refresh(deadline_s=60)
    assert len(run.time.slept) == 4
    run.open()

    def append() -> None:
        run.log.append(
            lambda state, seq, writer: run_checkpoint(run, 1, 1, seq, writer), before="", after="", deadline_s=60
        )  # fmt: skip

    store.fail_next(Fault.UNAVAILABLE, operation="put_if_absent", times=1000)
    with pytest.raises(AppendUnknown, match="may or may not"):
        append()
    store.down = True
    with pytest.raises(StoreUnavailable):
        run.log.refresh(deadline_s=60)
    with pytest.raises(StoreUnavailable) as raised:
        append()
    assert not isinstance(raised.value, AppendUnknown), "nothing was put"
    assert sum(run.time.slept) < 300


def test_a_gap_is_an_error_for_every_reader_and_nobody_writes_into_it():
    run = Run()
    attempt = run.open().attempt
    run.commit(attempt, 1)
    run.memory.delete(["job/" + entry_key(1), *folds_of(run)])
    for reader in (run.reader(), run.log):
        if reader is run.log:
            run.memory.delete(["job/" + entry_key(2)])
        with pytest.raises(LogGap, match="missing|ends before"):
            reader.refresh()
    run.memory.put("job/" + entry_key(2), b"the tip, and 1 is missing")
    with pytest.raises(LogGap):
        run.reader().append(lambda *_: pytest.fail("built on a gap"), before="", after="")


def test_a_writer_that_knows_nothing_yet_looks_before_it_builds():
    run = Run()
    attempt = run.open().attempt
    old = run.reader()
    old.refresh()
    base = run.commit(attempt, 1)
    for log in (run.reader(), old):
        run.log = log
        base = run.commit(attempt, base + 9, base)
    assert run.reader().refresh().newest().seq == base == 4


def test_a_hint_that_is_old_or_rotten_costs_nothing_but_time():
    run = Run()
    attempt = run.open().attempt
    run.commit(attempt, 1)
    truth = run.log.state
    for hint in (
        b"",
        b"junk",
        Hint(fold=-1, seq=1).data,
        Hint(fold=7, seq=2).data,
        Hint(fold=2, seq=0).data,
        b"\xff" * 9999,
    ):
        run.memory.put("job/log/HINT", hint)
        assert run.reader().refresh() == truth


def test_a_listing_that_is_older_than_the_hint_is_not_believed():
    run = Run()
    attempt = run.open().attempt
    run.commit(attempt, 1)
    run.memory.put("job/log/HINT", Hint(fold=-1, seq=2).data)

    class Stale(MemoryStore):
        def list(self, prefix, *, start_after=""):
            return iter(
                [
                    info
                    for info in run.memory.list(prefix, start_after=start_after)
                    if entry_key(2) not in info.key
                ]
            )

    stale = Stale()
    stale.get, stale.head = run.memory.get, run.memory.head
    with pytest.raises(StoreUnavailable, match="stale listing"):
        RunLog(stale, "job", clocks=run.time.clocks).refresh(deadline_s=1)


def folds_of(run: Run) -> list[str]:
    return [info.key for info in run.memory.list("job/log/fold-")]


def test_a_fold_is_the_same_state_and_counts_for_nothing_when_it_does_not_fit(monkeypatch):
    run = Run()
    attempt = run.open().attempt
    for cut in range(1, 20):
        run.commit(attempt, cut, None if cut % 3 == 1 else run.log.state.newest().seq, pins=("a",))
    truth = run.log.state
    key = folds_of(run)[-1]
    whole = run.memory.get(key)
    reads = []
    reader = run.reader()
    monkeypatch.setattr(reader, "read_slot", lambda seq: reads.append(seq) or RunLog.read_slot(reader, seq))
    assert reader.refresh() == truth
    assert reads == [truth.tip]
    other = canonical({**json.loads(whole), "owner": "us"})
    for bad in (
        b"",
        whole[:-9],
        whole.replace(b'"owner":"me"', b'"owner":"us"'),
        resealed(json.loads(other)),
    ):
        run.memory.put(key, bad)
        assert run.reader().refresh() == truth


def test_a_fold_that_nothing_names_counts_for_nothing():
    """However well it is made: only an entry of the log makes it more than a file."""
    run = Run()
    attempt = run.open().attempt
    for cut in range(1, 5):
        run.commit(attempt, cut)
    truth = run.log.state
    for seq in range(1, truth.tip):
        lie = replace(truth, tip=seq, tip_hash=run.log.read_slot(seq).hash, owner="them", checkpoints={})
        data = folded_state.dump(lie)
        run.memory.put("job/" + folded_state.fold_key(folded_state.name_of(lie, data)), data)
        run.memory.put("job/log/HINT", Hint(fold=seq, seq=truth.tip).data)
        assert run.reader().refresh() == truth


def test_old_folds_do_not_add_up():
    """Each is as large as the run is long: only the last two are kept, and the one HINT names is among them."""
    run = Run()
    attempt = run.open().attempt
    for cut in range(1, 40):
        run.commit(attempt, cut)
    folds = folds_of(run)
    assert len(folds) == 2
    named = json.loads(run.memory.get("job/log/HINT"))["fold"]
    assert f"/fold-{named:020d}-" in folds[-1]


@pytest.mark.parametrize("damage", ["rot", "loss"])
def test_what_became_of_old_entries_does_not_matter_once_a_fold_is_behind_them(damage):
    """Any of them, and all: the newest checkpoint restores, and nothing is left behind as void."""
    run = Run()
    attempt = run.open().attempt
    seqs = [run.commit(attempt, cut) for cut in range(1, 12)]
    folded = int(folds_of(run)[-1].split("-")[1])
    assert seqs[0] < folded < seqs[-1]
    truth = run.log.state
    for seq in range(folded + 1):
        key = "job/" + entry_key(seq)
        if damage == "rot":
            run.memory.put(key, b"rotten")
        else:
            run.memory.delete([key])
        for hint in (True, False):
            if not hint:
                run.memory.delete(["job/log/HINT"])
            assert run.reader().refresh() == truth
    run.log = run.reader()
    opened = run.open()
    assert (opened.resume.seq, opened.voided) == (seqs[-1], None)
    for cut in range(20):
        run.commit(opened.attempt, cut)
    assert run.reader().refresh() == run.log.state


@pytest.mark.parametrize("lost", [b"rotten", None])
def test_a_reader_needs_no_entry_but_the_newest(lost):
    """Each names the folded state before it, from the second entry on."""
    run = Run()
    attempt = run.open().attempt
    for cut in range(1, 30):
        newest = run.commit(attempt, cut)
        before = {f"job/{entry_key(seq)}": run.memory.get("job/" + entry_key(seq)) for seq in range(newest)}
        for key in before:
            run.memory.delete([key]) if lost is None else run.memory.put(key, lost)
        assert run.reader().refresh() == run.log.state
        for key, data in before.items():
            run.memory.put(key, data)
    assert len(folds_of(run)) <= commit_log._DROP_EVERY + 1


def test_a_large_folded_state_is_named_as_seldom_as_it_is_large(monkeypatch):
    """So that an entry's share of it stays what a small one costs."""
    monkeypatch.setattr(folded_state, "_BYTES", 1000)
    run = Run()
    attempt = run.open().attempt
    named = [run.log.read_slot(run.commit(attempt, cut)).entry for cut in range(1, 60)]
    slots = [name.seq for entry in named if (name := named_fold(entry)) is not None]
    gaps = [after - before for before, after in itertools.pairwise(slots)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1] > 8) == (1, True)
    assert run.reader().refresh() == run.log.state


def test_what_follows_a_fold_is_still_judged():
    """Rot of the entry that names the newest fold: an older fold, then, or none."""
    run = Run()
    attempt = run.open().attempt
    seqs = [run.commit(attempt, cut) for cut in range(1, 12)]
    tip = seqs[-1]
    run.memory.put("job/" + entry_key(tip), b"rotten")
    for _ in range(2):
        state = run.reader().refresh()
        assert (state.stopped.seq, state.newest().seq, state.tip) == (tip, tip - 1, tip)
        run.memory.delete(["job/" + entry_key(tip - 2)])
    run.memory.delete(folds_of(run))
    with pytest.raises(LogGap, match=f"entry {tip - 2} is missing"):
        run.reader().refresh()


def test_a_fold_is_no_condition_of_an_entry():
    run = Run()

    class NoFolds(MemoryStore):
        def put(self, key, data):
            if "/fold-" in key:
                raise AccessDenied("no")
            super().put(key, data)

    run = Run(NoFolds())
    attempt = run.open().attempt
    for cut in range(1, 20):
        run.commit(attempt, cut)
    assert run.reader().refresh() == run.log.state


def test_folds_are_read_strictly():
    run = Run()
    run.commit(run.open().attempt, 1)
    data = folded_state.dump(run.log.state)
    name = folded_state.name_of(run.log.state, data)
    assert folded_state.load(data, "job", name) == run.log.state
    document = json.loads(data)

    def load(data: bytes, seq: int = 2) -> None:
        digest = hashlib.sha256(data).hexdigest()[:32]
        folded_state.load(data, "job", FoldName(seq, digest))

    with pytest.raises(ForeignObject):
        folded_state.load(data, "other", name)
    with pytest.raises(ForeignObject):
        load(data, 3)
    with pytest.raises(CorruptObject, match="hash in its name"):
        folded_state.load(resealed({**document, "owner": "us"}), "job", name)
    with pytest.raises(UnsupportedVersion):
        load(resealed({**document, "format": 2}))
    for key in document:
        for bad in (None, -1, [[]], "x", {}, [1], [["a"]]):
            if key != "hash" and document[key] != bad and not (key == "attempt" and bad is None):
                try:
                    load(resealed({**document, key: bad}))
                except (CorruptObject, ForeignObject, UnsupportedVersion):
                    continue
                assert key in {"owner", "tip_hash"} or (key, bad) == ("keeps", None)


def places_in(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places_in(each, (*path, key)))]


def replaced(value: object, path: tuple, by: object) -> object:
    if not path:
        return by
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


@pytest.fixture(scope="module")
def rich_state():
    """Of a run in which everything happened that a folded state speaks of."""
    run = Run()
    first = run.open(workload="a", pod="b").attempt
    base, delta = run.commit(first, 1, pins=("p",)), None
    delta = run.commit(first, 2, base)
    run.compacted(delta)
    word.pin(run.log, "kept", f"{delta}")
    run.commit(first, 3)
    word.rewind(run.log, f"{delta}", ended=True)
    second = run.open(workload="c").attempt
    run.commit(second, 1, delta)
    run.retire((), [cut_prefix(first, 0)])
    return run.log.state


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.floats(0, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(data=st.data())
def test_a_hostile_fold_is_rejected_by_name_or_can_be_worked_with(rich_state, data):
    """Any value of it replaced, under hashes that fit: no raw error, and no walk that does not end."""
    document = json.loads(folded_state.dump(rich_state))
    place = data.draw(st.sampled_from([path for path in places_in(document) if path and path[0] != "hash"]))
    changed = resealed(replaced(document, place, data.draw(JSON_VALUES)))
    name = FoldName(rich_state.tip, hashlib.sha256(changed).hexdigest()[:32])
    try:
        state = folded_state.load(changed, "job", name)
    except FormatError:
        return
    retire(state, Retention(keep_last=1))
    assert state.pinned.keys() <= {"p", "kept", *(n for n in state.words)}
    for seq in state.checkpoints:
        chain(state, seq)
    for attempt in state.attempts:
        list(lineage(state, attempt))


@pytest.mark.parametrize("member", ["attempts", "superseded", "retired", "pins", "aside"])
@pytest.mark.parametrize("bad", [{"a": {}}, [[{}, "", ""]], [{}], [[[], 1, 1]], [[{}] * 10]])
def test_a_fold_with_objects_in_place_of_numbers_is_corrupt(rich_state, member, bad):
    document = json.loads(folded_state.dump(rich_state))
    changed = resealed({**document, member: bad})
    name = FoldName(rich_state.tip, hashlib.sha256(changed).hexdigest()[:32])
    with pytest.raises(CorruptObject):
        folded_state.load(changed, "job", name)


def test_bad_bytes_stop_the_fold_there_and_nothing_builds_on_them():
    run = Run()
    attempt = run.open().attempt
    first = run.commit(attempt, 1)
    run.commit(attempt, 2)
    run.memory.put("job/" + entry_key(3), b"rotten")
    state = run.reader().refresh()
    assert (state.stopped.seq, state.tip, state.newest().seq) == (3, 3, first)
    run.log = run.reader()
    run.log.refresh()
    with pytest.raises(LogStopped, match="past entry 3"):
        run.commit(attempt, 3)


def test_a_bit_flipped_on_the_way_is_read_again():
    run, store = faulty_run()
    run.commit(run.open().attempt, 1)
    store.fail_next(Fault.FLIPPED, operation="get", key_contains=entry_key(1))
    assert run.reader().refresh().stopped is None


def test_an_entry_of_a_newer_version_stops_the_fold_and_asks_for_an_upgrade():
    run = Run()
    run.commit(run.open().attempt, 1)
    document = json.loads(run.memory.get("job/" + entry_key(2)))
    run.memory.put("job/" + entry_key(2), resealed({**document, "kind": "future"}))
    state = run.reader().refresh()
    assert state.stopped is not None
    assert not state.stopped.voidable
    assert "upgrade" in str(state.stopped.error)


def test_an_entry_that_breaks_a_rule_stops_the_fold():
    """A well-formed entry of a fenced attempt, written past our own judgement."""
    run = Run()
    first = run.open().attempt
    run.open()
    with pytest.raises(EntryRefused, match="fenced"):
        run.log.append(
            lambda state, seq, writer: run_checkpoint(run, first, 1, seq, writer), before="", after=""
        )
    entry = run_checkpoint(run, first, 1, 3, "w")
    run.memory.put("job/" + entry_key(3), seal(replace(entry, previous=run.log.state.tip_hash)).data)
    assert "fenced" in str(run.reader().refresh().stopped.error)


def test_two_writers_of_one_slot_have_one_winner():
    """Threads over one store: every append takes its own slot, and the log is dense."""
    run = Run()
    run.open()
    failures = []

    def work() -> None:
        try:
            log = RunLog(run.memory, "job")
            for _ in range(10):
                open_attempt(log, owner="me", closing_wait_s=0.0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    state = run.reader().refresh()
    assert state.tip == 41
    assert len(state.attempts) == 41


class Overwriting(MemoryStore):
    """A store that ignores If-None-Match."""

    def put_if_absent(self, key, data):
        self.put(key, data)


def test_a_store_that_overwrites_is_refused():
    store = Overwriting()
    with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
        RunLog(store, "job", clocks=Time().clocks).append(genesis, before="", after="")
    assert not list(store.list("job/probe/"))


def test_the_probe_survives_a_store_that_loses_acknowledgements():
    memory = MemoryStore()
    store = FaultyStore(memory)
    store.fail_next(Fault.LOST_ACK, operation="put_if_absent", times=2)
    store.fail_next(Fault.UNAVAILABLE, operation="get", times=2)
    log = RunLog(store, "job", clocks=Time().clocks)
    assert log.append(genesis, before="", after="") is not None
    assert not list(memory.list("job/probe/"))


def test_canonical_json_is_ascii():
    assert canonical({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'
