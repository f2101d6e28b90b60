"""Copies of the golden runs, whole and one checkpoint each, as the second reader finds them: the same bits."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.log.chain import closure
from deltashard_checkpoint.log.commit_log import LogStopped, RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.maintenance import garbage_collection, retention, word
from deltashard_checkpoint.maintenance.holder import holder
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.whole_run import copy_draft, removal, run_copy
from deltashard_checkpoint.whole_run.transcript import NotCopyable

from tests.unit.checkpoint.format.second_reader import read_run, restore

GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
LIVE = {"run": (2, 4, 5, 6, 11, 14, 17, 19, 20), "run-3": (4, 5, 7, 9, 10, 13), "run-4": (2, 3, 6, 13)}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    for run in (*LIVE, "run-2"):
        shutil.copytree(GOLDEN / run, tmp_path / "store" / run)
    return FileStore(tmp_path / "store")


def assert_restores(directory: Path, run: str, pairs: dict[int, int], golden: str) -> None:
    """What the copy calls `there` has what the golden run's `here` has, by a reader that shares no code."""
    found = read_run(directory / run)
    assert found.stopped is None
    for there, here in pairs.items():
        got, _blobs = restore(found, there)
        want = {p.stem: np.load(p) for p in (GOLDEN / f"{golden}-expected/{here}").glob("*.npy")}
        assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in want.items()}


@pytest.mark.parametrize("golden", LIVE)
def test_a_whole_run_keeps_its_slots_and_its_bits(store, tmp_path, golden):
    source, target = RunLog(store, golden), RunLog(store, "copy")
    done = run_copy.copied(source, target, None, run_copy.copy)
    assert (done.seq, done.checkpoints) == (LIVE[golden][-1], len(LIVE[golden]))
    copy, state = target.refresh(), source.state
    assert (copy.tip, copy.attempt, copy.pinned, copy.aside) == (
        state.tip, state.attempt, state.pinned, state.aside,
    )  # fmt: skip
    assert (copy.retired, copy.superseded, copy.committed) == (
        state.retired,
        state.superseded,
        state.committed,
    )
    assert holder(target, copy) is None
    assert_restores(tmp_path / "store", "copy", {seq: seq for seq in LIVE[golden]}, golden)
    # Under its own name in another store: the data is the very same.
    there = FileStore(tmp_path / "there")
    run_copy.copied(source, RunLog(there, golden), None, run_copy.copy)
    live = {info.key for prefix in ("data/", "layout/") for info in there.list(f"{golden}/{prefix}")}
    assert all(there.get(key) == store.get(key) for key in live)
    assert len(live) == done.objects
    assert run_copy.copied(source, RunLog(there, golden), None, run_copy.copy).entries == 0


@pytest.mark.parametrize(("golden", "seq"), [(run, seq) for run, live in LIVE.items() for seq in live])
def test_one_checkpoint_begins_a_run_with_what_it_builds_on(store, tmp_path, golden, seq):
    source, target = RunLog(store, golden), RunLog(store, "one")
    done = run_copy.copied(source, target, f"{seq}", run_copy.copy)
    chain = sorted(closure(source.state, [seq]))
    copied = sorted(target.refresh().checkpoints)
    assert (done.source_seq, done.seq, len(copied)) == (seq, copied[-1], len(chain))
    assert_restores(tmp_path / "store", "one", dict(zip(copied, chain, strict=True)), golden)
    steps = [source.state.checkpoints[each].step for each in chain]
    assert [target.state.checkpoints[each].step for each in copied] == steps
    assert target.state.pinned == dict.fromkeys(source.state.pins_of(seq), done.seq)
    data = {info.key for info in store.list("one/data/")}
    again = run_copy.copied(source, target, f"{seq}", run_copy.copy)
    assert (again.entries, again.objects) == (0, 0)
    assert {info.key for info in store.list("one/data/")} == data


def test_a_log_that_lacks_entries_is_copied_by_checkpoint_only(store, tmp_path):
    with pytest.raises(LogStopped):  # it ends in an entry of a newer version
        copy_draft.draft(RunLog(store, "run-2"), RunLog(store, "copy"))
    store.delete([f"run-3/{entry_key(seq)}" for seq in (0, 1)])
    source = RunLog(store, "run-3")
    with pytest.raises(NotCopyable, match="log entry 0"):
        copy_draft.draft(source, RunLog(store, "copy"))
    run_copy.copied(source, RunLog(store, "copy"), "10", run_copy.copy)
    assert_restores(tmp_path / "store", "copy", {3: 10}, "run-3")
    assert RunLog(store, "copy").refresh().owner == "golden"


class Retiring(FileStore):
    """Lets go of a checkpoint's objects before a copy reads its first pack, as the source's own housekeeping may."""

    def __init__(self, directory: Path, retire: Callable[[], None]) -> None:
        super().__init__(directory)
        self.retire: Callable[[], None] | None = retire
        self.lock = threading.Lock()

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        with self.lock:
            if self.retire is not None:
                self.retire()
                self.retire = None
        super().get_into(key, offset, out)


def test_a_copy_begins_anew_when_the_source_lets_something_go(store, tmp_path):
    def let_go() -> None:
        tool = RunLog(store, "run-4")
        word.pin(tool, "paper", None)
        word.rewind(tool, "2", ended=True)
        retention.retire_these(tool, lambda _state: [3, 6, 13])
        garbage_collection.collect(tool, grace_s=0.0)

    source = RunLog(Retiring(tmp_path / "store", let_go), "run-4")
    done = run_copy.copied(source, RunLog(store, "copy"), None, run_copy.copy)
    assert (done.checkpoints, done.seq, done.through) == (1, 2, 17)
    assert_restores(tmp_path / "store", "copy", {2: 2}, "run-4")
    # A copy whose log was under way is promised a moment; what it needs of that must be there.
    tool = RunLog(store, "run-3")
    half = RunLog(store, "half")
    half.leave_hint(Hint(seq=tool.refresh().tip, whole=False))
    retention.append_retirement(tool, retention.Retention(keep_last=1, keep_pins=False))
    garbage_collection.collect(tool, grace_s=0.0)
    with pytest.raises(copy_draft.SourceLetGo, match="let go since"):
        run_copy.copied(RunLog(store, "run-3"), half, None, run_copy.copy)
    removal.remove(half)
    assert run_copy.copied(RunLog(store, "run-3"), half, None, run_copy.copy).seq == 13
    # What is gone and was not retired is damage, and said.
    gone = next(info.key for info in store.list("run-3/data/") if info.key.endswith(".pack"))
    store.delete([gone])
    with pytest.raises(InvalidCheckpoint, match=r"\.pack does not exist"):
        run_copy.copied(RunLog(store, "run-3"), RunLog(store, "broken"), None, run_copy.copy)
    assert RunLog(store, "broken").refresh().tip == -1
