"""The commit log around the fold: the tip, contested slots, and a misbehaving store."""

import hashlib
import itertools
import json

import pytest
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, FormatError, UnsupportedVersion
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log import commit_log, folded_state
from deltashard_checkpoint.log.chain import chain, lineage
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, FoldName, entry_key, named_fold
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.log_error import AppendUnknown
from deltashard_checkpoint.maintenance import user_entry
from deltashard_checkpoint.maintenance.retention import Retention, retire
from deltashard_checkpoint.stores import probe
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.run_builder import MemoryRun, rehashed, started_run


def faulty_run() -> tuple[MemoryRun, FaultyStore]:
    run = MemoryRun()
    run.store = FaultyStore(run.memory)
    probe._probed.add(run.store)
    run.log = run.reader()
    return run, run.store


def test_many_new_entries_are_read_in_parallel_and_in_order():
    run, attempt = started_run()
    for snapshot_id in range(40):
        run.commit(attempt, snapshot_id)
    assert run.reader(readers=8).refresh() == run.reader(readers=1).refresh() == run.log.state


def run_checkpoint(run, attempt, snapshot_id, seq, writer):
    reported = run.report(attempt, snapshot_id)
    return Checkpoint(
        seq=seq, previous="", writer=writer, at_s=0.0, attempt=attempt, snapshot_id=snapshot_id, step=snapshot_id, parts=(reported.part,),
        tables=reported.tables, encodings=reported.encodings, rows=8, raw_bytes=64, stored_bytes=100, stall_s=0.5, snapshot_at_s=0.0,
    )  # fmt: skip


def test_unavailable_store_is_retried_then_reported():
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
    assert not isinstance(raised.value, AppendUnknown), "nothing was written"
    assert sum(run.time.slept) < 300


def test_listing_older_than_the_hint_is_ignored():
    run, attempt = started_run()
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


def folds_of(run: MemoryRun) -> list[str]:
    return [info.key for info in run.memory.list("job/log/fold-")]


def test_only_the_last_two_folds_are_kept():
    """A fold grows with the run. HINT names the newer of the two."""
    run, attempt = started_run()
    for snapshot_id in range(1, 40):
        run.commit(attempt, snapshot_id)
    folds = folds_of(run)
    assert len(folds) == 2
    named = json.loads(run.memory.get("job/log/HINT"))["fold"]
    assert f"/fold-{named:020d}-" in folds[-1]


@pytest.mark.parametrize("lost", [b"corrupt", None])
def test_reader_needs_only_the_newest_entry(lost):
    run, attempt = started_run()
    for snapshot_id in range(1, 30):
        newest = run.commit(attempt, snapshot_id)
        before = {f"job/{entry_key(seq)}": run.memory.get("job/" + entry_key(seq)) for seq in range(newest)}
        for key in before:
            run.memory.delete([key]) if lost is None else run.memory.put(key, lost)
        assert run.reader().refresh() == run.log.state
        for key, data in before.items():
            run.memory.put(key, data)
    assert len(folds_of(run)) <= commit_log._DROP_EVERY + 1


def test_fold_interval_grows_with_fold_size(monkeypatch):
    monkeypatch.setattr(folded_state, "_BYTES", 1000)
    run, attempt = started_run()
    named = [run.log.read_slot(run.commit(attempt, snapshot_id)).entry for snapshot_id in range(1, 60)]
    slots = [name.seq for entry in named if (name := named_fold(entry)) is not None]
    gaps = [after - before for before, after in itertools.pairwise(slots)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1] > 8) == (1, True)
    assert run.reader().refresh() == run.log.state


def test_folds_are_parsed_strictly():
    run = MemoryRun()
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
        folded_state.load(rehashed({**document, "owner": "us"}), "job", name)
    with pytest.raises(UnsupportedVersion):
        load(rehashed({**document, "format": 2}))


def places_in(value: object, path: tuple = ()) -> list[tuple]:
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
    """Return the state of a run with every kind of entry that a folded state records."""
    run, first = started_run(workload="a", pod="b")
    base, delta = run.commit(first, 1, pins=("p",)), None
    delta = run.commit(first, 2, base)
    run.compacted(delta)
    user_entry.pin(run.log, "kept", f"{delta}")
    run.commit(first, 3)
    user_entry.rewind(run.log, f"{delta}", ended=True)
    second = run.open(workload="c").attempt
    run.commit(second, 1, delta)
    run.retire((), [snapshot_prefix(first, 0)])
    return run.log.state


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.floats(0, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(data=st.data())
def test_hostile_fold_is_rejected_or_usable(rich_state, data):
    """Each value of the fold is replaced under matching hashes. No raw error occurs, and every walk ends."""
    document = json.loads(folded_state.dump(rich_state))
    place = data.draw(st.sampled_from([path for path in places_in(document) if path and path[0] != "hash"]))
    changed = rehashed(replaced(document, place, data.draw(JSON_VALUES)))
    name = FoldName(rich_state.tip, hashlib.sha256(changed).hexdigest()[:32])
    try:
        state = folded_state.load(changed, "job", name)
    except FormatError:
        return
    retire(state, Retention(keep_last=1))
    assert state.pinned.keys() <= {"p", "kept", *(n for n in state.user_entries)}
    for seq in state.checkpoints:
        chain(state, seq)
    for attempt in state.attempts:
        list(lineage(state, attempt))
