"""Copies of the golden runs, whole and one checkpoint each, have the same bits."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.log.chain import closure
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Genesis, entry_key
from deltashard_checkpoint.log.entry_codec import seal
from deltashard_checkpoint.log.listing import REMOVAL, Hint
from deltashard_checkpoint.log.log_error import LogStopped
from deltashard_checkpoint.maintenance import garbage_collection, retention, user_entry
from deltashard_checkpoint.maintenance.holder import holder
from deltashard_checkpoint.maintenance.row_mover import CompactionUnsupported
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.whole_run.incomplete_state import incomplete_state
from deltashard_checkpoint.whole_run.run_copy import TargetTaken, copy_run, start_run
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_cli.target import Target
from deltashard_cli.verification import verify

from tests.support.checkpoint.snapshot import arrays_of, read_checkpoint

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
LIVE_SEQS = {"run": (2, 4, 5, 6, 11, 14, 17, 19, 20), "run-3": (4, 5, 7, 9, 10, 13), "run-4": (2, 3, 6, 13)}  # fmt: skip
TOMBSTONES = {("run", seq) for seq in (4, 5, 6, 11)}
"""Checkpoints that read tombstones of their chains."""


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    for run in (*LIVE_SEQS, "run-2"):
        shutil.copytree(GOLDEN / run, tmp_path / "store" / run)
    return FileStore(tmp_path / "store")


@pytest.fixture
def target_store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "target_store")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PackCache]:
    with PackCache(tmp_path / "cache", budget_bytes=64 << 20) as cache:
        yield cache


def assert_restores(store: Store, run: str, pairs: dict[int, int], golden: str) -> None:
    state = RunLog(store, run).refresh()
    assert state.stopped is None
    blobs = json.loads((GOLDEN / f"{golden}-expected" / "blobs.json").read_text())
    for target_store, here in pairs.items():
        found = read_checkpoint(store, run, f"seq:{target_store}", state=state)
        got = arrays_of(found)
        want = {p.stem: np.load(p) for p in (GOLDEN / f"{golden}-expected/{here}").glob("*.npy")}
        assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in want.items()}
        assert {n: sha256(data).hexdigest() for n, data in found.blobs.items()} == blobs[str(here)]


@pytest.mark.parametrize("golden", LIVE_SEQS)
def test_run_copy_is_byte_identical(store, target_store, tmp_path, golden):
    source, target = RunLog(store, golden), RunLog(target_store, golden)
    done = copy_run(source, target)
    assert (done.seq, done.checkpoints, done.through) == (
        LIVE_SEQS[golden][-1], len(LIVE_SEQS[golden]), source.state.tip,
    )  # fmt: skip
    assert target.refresh() == source.state
    copied = {info.key for info in target_store.list("")}
    assert all(target_store.get(key) == store.get(key) for key in copied)
    assert {info.key for info in store.list(f"{golden}/log/")} <= copied
    assert_restores(target_store, golden, {seq: seq for seq in LIVE_SEQS[golden]}, golden)
    again = copy_run(source, target)
    assert (again.entries, again.objects) == (0, 0)


def test_log_behind_a_fold_is_copied_and_a_stopped_log_is_not(store, target_store, tmp_path):
    with pytest.raises(LogStopped):  # the run ends in an entry of a newer version
        copy_run(RunLog(store, "run-2"), RunLog(target_store, "run-2"))
    assert list(target_store.list("run-2/")) == []
    store.delete([f"run-3/{entry_key(seq)}" for seq in (0, 1)])
    source = RunLog(store, "run-3")
    copy_run(source, RunLog(target_store, "run-3"))
    assert RunLog(target_store, "run-3").refresh() == source.state
    assert_restores(target_store, "run-3", {seq: seq for seq in LIVE_SEQS["run-3"]}, "run-3")


@pytest.mark.parametrize(("golden", "seq"), [(run, seq) for run, live in LIVE_SEQS.items() for seq in live])
def test_new_run_starts_from_one_checkpoint(store, target_store, tmp_path, cache, golden, seq):
    """All rows are in one part, for any number of ranks. Other column shards or tombstones in the chain are refused."""
    source, target = RunLog(store, golden), RunLog(target_store, "one")
    state = source.refresh()
    sizes = {state.checkpoints[each].world_size for each in closure(state, [seq])}
    tombstones = (golden, seq) in TOMBSTONES
    if tombstones or (golden == "run" and len(sizes) > 1):
        with pytest.raises(CompactionUnsupported, match="tombstones" if tombstones else "column ranges"):
            start_run(source, target, f"{seq}", cache)
        assert list(target_store.list("one/log/")) == []
        return
    done = start_run(source, target, f"{seq}", cache)
    state = target.refresh()
    assert (done.source_seq, done.seq, [*state.checkpoints], done.step) == (
        seq, 2, [2], source.state.checkpoints[seq].step,
    )  # fmt: skip
    assert (state.checkpoints[2].baseline, state.owner, holder(target, state)) == (
        True,
        source.state.owner,
        None,
    )
    assert state.pinned == dict.fromkeys(source.state.pins_of(seq), 2)
    assert_restores(target_store, "one", {2: seq}, golden)
    # The golden runs' blobs are bytes and not a trainer's trees. Everything else is in order.
    found = verify(Target(store=target_store, run="one"), deep=True)
    assert [each.what for each in found.problems if "blob empty" not in each.what] == []
    with pytest.raises(TargetTaken):
        start_run(source, target, f"{seq}", cache)


class InterruptedStore(FileStore):
    """A store that acts once, just before a key with the given suffix is put or partly read."""

    def __init__(self, directory: Path, before: str, act: Callable[[], object]) -> None:
        super().__init__(directory)
        self.before, self.act, self.lock = before, act, threading.Lock()

    def _interrupt(self, key: str) -> None:
        with self.lock:
            if self.before and key.endswith(self.before):
                self.before = ""
                self.act()

    def put(self, key: str, data) -> None:
        self._interrupt(key)
        super().put(key, data)

    def put_if_absent(self, key: str, data) -> None:
        self._interrupt(key)
        super().put_if_absent(key, data)

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        self._interrupt(key)
        super().get_into(key, offset, out)


def test_copy_restarts_when_the_source_deletes_objects(store, target_store, tmp_path):
    def delete_checkpoints() -> None:
        tool = RunLog(store, "run-4")
        user_entry.pin(tool, "paper", None)
        user_entry.rewind(tool, "2", ended=True)
        retention.retire_selected(tool, lambda _state: [3, 6, 13])
        garbage_collection.collect(tool, grace_s=0.0)

    source = RunLog(InterruptedStore(tmp_path / "store", ".pack", delete_checkpoints), "run-4")
    done = copy_run(source, RunLog(target_store, "run-4"))
    assert (done.checkpoints, done.seq, done.through) == (1, 2, 17)
    assert_restores(target_store, "run-4", {2: 2}, "run-4")
    # An absent object that was not retired is reported as damage.
    deleted = next(info.key for info in store.list("run-3/data/") if info.key.endswith(".pack"))
    store.delete([deleted])
    with pytest.raises(InvalidCheckpoint, match=r"\.pack does not exist"):
        copy_run(RunLog(store, "run-3"), RunLog(target_store, "run-3"))
    assert RunLog(target_store, "run-3").refresh().tip == -1


@pytest.mark.parametrize("before", ["00.pack", f"{entry_key(0)}"])
@pytest.mark.parametrize("one", [False, True])
def test_run_created_concurrently_at_the_target_is_not_closed(
    store, target_store, tmp_path, cache, monkeypatch, before, one
):
    """The other process takes the first slot while data is put, or after HINT was written."""
    late = RunLog(target_store, "run-4")

    def begin() -> None:
        open_attempt(late, owner="another", closing_wait_s=0.0)

    def take_first_slot() -> None:
        entry = seal(Genesis(seq=0, run="run-4", owner="another", previous="", writer="0" * 16, at_s=1.0))
        target_store.put(f"run-4/{entry_key(0)}", entry.data)

    target = RunLog(
        InterruptedStore(
            tmp_path / "target_store", before, begin if before == "00.pack" else take_first_slot
        ),
        "run-4",
    )
    source = RunLog(store, "run-4")
    copy = (lambda: start_run(source, target, "13", cache)) if one else (lambda: copy_run(source, target))
    hints: list[Hint] = []
    put_hint = RunLog.put_hint
    monkeypatch.setattr(RunLog, "put_hint", lambda log, hint: (hints.append(hint), put_hint(log, hint)))
    with pytest.raises(TargetTaken, match="not a copy of this run"):
        copy()
    if before == "00.pack":
        assert all(hint.whole for hint in hints), "the existing run was never marked incomplete"
    assert incomplete_state(target_store, "run-4/") is None
    assert RunLog(target_store, "run-4").refresh(deadline_s=0.0).owner == "another"


def test_copy_into_a_run_being_removed_is_refused(store, target_store, cache):
    log = RunLog(target_store, "one")
    log.put_hint(REMOVAL)
    RunLog(target_store, "run-4").put_hint(REMOVAL)
    for call in (
        lambda: copy_run(RunLog(store, "run-4"), RunLog(target_store, "run-4")),
        lambda: start_run(RunLog(store, "run-4"), log, "latest", cache),
    ):
        with pytest.raises(TargetTaken, match="being removed"):
            call()
    assert sorted(info.key for info in target_store.list("")) == ["one/log/HINT", "run-4/log/HINT"]


def test_partial_new_run_names_its_source_checkpoint(store, target_store, cache):
    source, target = RunLog(store, "run-4"), RunLog(target_store, "one")
    start_run(source, target, "seq:6", cache)
    target_store.delete([f"one/{entry_key(2)}"])
    target.put_hint(Hint(seq=2, whole=False))
    with pytest.raises(TargetTaken, match="checkpoint 6") as refused:
        start_run(source, RunLog(target_store, "one"), "latest", cache)
    assert "-c seq:6" in (refused.value.remedy or "")
    assert start_run(source, RunLog(target_store, "one"), "seq:6", cache).entries == 1
