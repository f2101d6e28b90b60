"""Lifecycle commands on file:// and a real MinIO: log, gc and its reasons, pin, unpin, retire, rewind, cp, rm."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogRolledBack
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.fencing import FencedError

from tests.support.checkpoint.snapshot import assert_same, read_checkpoint
from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli, json_output, run_url

RUN = "team/run-1"


def expect_failure(cli: Cli, *arguments: object, code: int = 2) -> str:
    found, text = cli(*arguments)
    assert found == code, text
    assert "Traceback" not in text
    return text


def chain(url: str, directory: Path, run: str = RUN) -> WrittenRun:
    """Write slots 2, 3, 4: all rows (pinned best), and two deltas. The attempt remains open."""
    directory.mkdir(parents=True, exist_ok=True)
    written = WrittenRun(open_store(url), run, directory)
    first = written.save(step=100, pins=("best",), directive="steps")
    second = written.save(written.train(), step=200, covers=first, directive="steps")
    written.save(written.train(), step=300, covers=second, encoding="q8", directive="timer")
    return written


def keys(store: Store, run: str = RUN) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list(f"{run}/")}


# -- log --------------------------------------------------------------------------------------------------------


def test_log_shows_each_entry(cli: Cli, url: str, tmp_path: Path) -> None:
    chain(url, tmp_path)
    assert cli("pin", run_url(url), "paper", "-c", "3")[0] == 0
    assert cli("retire", run_url(url), "-c", "4")[0] == 2
    found = json_output(cli, "log", run_url(url))
    assert found["entries"] == 6
    lines = found["lines"]
    assert [line["kind"] for line in lines] == ["genesis", "attempt", *["checkpoint"] * 3, "pin"]
    newest = lines[4]
    assert (newest["step"], newest["attempt"], newest["snapshot_id"], newest["covers"]) == (300, 1, 3, [3])
    assert newest["bytes"] > 0
    assert newest["ranks"] == 1
    assert lines[2]["pins"] == ["best"]
    assert (lines[5]["description"], lines[5]["pins"]) == ("paper is checkpoint 3", ["paper"])
    assert [line["seq"] for line in json_output(cli, "log", run_url(url), "-n", "2")["lines"]] == [4, 5]
    assert [line["seq"] for line in json_output(cli, "log", run_url(url), "--since", "3")["lines"]] == [
        3,
        4,
        5,
    ]
    _code, text = cli("log", run_url(url), "-n", "1")
    assert "paper is checkpoint 3" in text
    assert "1 of 6 entries: -n 0 shows all" in text


def test_log_shows_readable_part_of_damaged_log(cli: Cli, file_url: str, tmp_path: Path) -> None:
    store = chain(file_url, tmp_path).store
    store.put(f"{RUN}/{entry_key(4)}", b"rotten")
    code, text = cli("log", run_url(file_url), "--json")
    assert code == 1
    found = json.JSONDecoder().raw_decode(text)[0]
    assert [(line["kind"], line["valid"]) for line in found["lines"]] == [
        ("genesis", True), ("attempt", True), ("checkpoint", True), ("checkpoint", True), ("unreadable", False),
    ]  # fmt: skip
    assert "cannot be followed past entry 4" in found["warning"]
    before = keys(store)
    there = f"file://{tmp_path}/there"
    for command in (
        ("pin", run_url(file_url), "a", "-c", "2"), ("unpin", run_url(file_url), "best"), ("retire", run_url(file_url), "-c", "2"),
        ("rewind", run_url(file_url), "-c", "2", "--ended"), ("cp", run_url(file_url), there), ("cp", run_url(file_url), there, "-c", "2", "--as", "n"),
    ):  # fmt: skip
        assert "cannot be followed past entry 4" in expect_failure(cli, *command, code=1)
    assert keys(store) == before
    # A new attempt voids the damaged entry, and the log is healthy again.
    open_attempt(RunLog(store, RUN), owner="tests")
    lines = json_output(cli, "log", run_url(file_url))["lines"]
    assert [line["valid"] for line in lines] == [True, True, True, True, False, True]
    assert "voids 4 to 4" in lines[5]["description"]


# -- gc --dry-run -----------------------------------------------------------------------------------------------


def reasons(cli: Cli, *arguments: object) -> dict[str, str]:
    return {
        one["reason"]: one["status"] for one in json_output(cli, "gc", *arguments, "--dry-run")["reasons"]
    }


def test_gc_explains_why_objects_are_kept(cli: Cli, url: str, tmp_path: Path) -> None:
    written = chain(url, tmp_path)
    full = written.save(step=400, directive="baseline")
    written.save(written.train(), step=500, covers=full, directive="steps")
    store = written.store
    written.snapshot_id += 1
    store.put(
        f"{RUN}/{snapshot_prefix(written.attempt, written.snapshot_id)}00000-{'0' * 16}-00000.pack",
        b"in flight",
    )
    store.put(f"{RUN}/notes.txt", b"of a user")
    before = keys(store)
    found = json_output(cli, "gc", run_url(url), "--dry-run", "-v", "--keep-last", "1")
    assert keys(store) == before
    assert {f"{RUN}/{item['key']}" for item in found["objects"]} == set(before), "every object has a reason"
    assert sum(one["objects"] for one in found["reasons"]) == len(before)
    assert sum(one["bytes"] for one in found["reasons"]) == sum(map(len, before.values()))
    why = {item["key"]: (item["status"], item["reason"]) for item in found["objects"]}
    by_snapshot = {
        snapshot_id: reason
        for key, reason in why.items()
        for snapshot_id in range(1, 8)
        if snapshot_prefix(1, snapshot_id) in key
    }
    assert by_snapshot[5] == ("kept", "checkpoint 6: the newest, one of the newest 1")
    assert by_snapshot[4] == ("kept", "checkpoint 5: covered by the newest, 6, chain base of 6")
    assert by_snapshot[1] == ("kept", "checkpoint 2: pinned best, chain base of 4")
    assert by_snapshot[3] == (
        "kept",
        "checkpoint 4: second chain, independent of the newest one's",
    )
    assert by_snapshot[6] == ("kept", "attempt 1 may still commit snapshot 6")
    assert why["notes.txt"] == ("kept", "unknown object: not created by deltashard")
    assert why["log/HINT"][0] == why[entry_key(2)][0] == "kept"

    # A new attempt without commits keeps its resume point. The old attempt can no longer commit its snapshot.
    open_attempt(RunLog(store, RUN), owner="tests", closing_wait_s=0.0)
    kept = reasons(cli, run_url(url), "--keep-last", "1")
    assert any("resume point of attempt 7, which has not committed yet" in reason for reason in kept)
    assert kept["of a failed or aborted save"] == "in grace"
    assert cli("gc", run_url(url), "--keep-last", "1")[0] == 0
    kept = reasons(cli, run_url(url), "--keep-last", "1")
    (grace,) = [reason for reason, status in kept.items() if status == "in grace"]
    assert grace.startswith("retired by log entry 8, ")
    assert "of its grace period are left" in grace
    listing = json_output(cli, "gc", run_url(url), "--dry-run", "-v", "--grace", "0")
    unused = {f"{RUN}/{item['key']}" for item in listing["objects"] if item["status"] == "deletable"}
    before = keys(store)
    assert json_output(cli, "gc", run_url(url), "--grace", "0")["collected"]["objects"] == len(unused) > 0
    assert before.keys() - keys(store).keys() == unused
    assert "--dry-run" in expect_failure(cli, "gc", run_url(url), "-v")


# -- pin, unpin, retire -----------------------------------------------------------------------------------------


def test_pin_survives_live_trainer_and_moves(cli: Cli, url: str, tmp_path: Path) -> None:
    """The trainer's log handle is older than each pin.

    Its next commit succeeds, and retention keeps pinned checkpoints.
    """
    written = chain(url, tmp_path)
    assert json_output(cli, "pin", run_url(url), "paper", "-c", "step:200")["checkpoint"] == 3
    base = written.save(step=400, directive="steps")
    assert json_output(cli, "pin", run_url(url), "paper", "-c", "3")["entry"] is None, (
        "the checkpoint already has this pin"
    )
    moved = json_output(cli, "pin", run_url(url), "best", "-c", f"{base}")
    assert (moved["before"], moved["checkpoint"]) == (2, base)
    written.save(written.train(), step=500, covers=base, directive="steps")
    for step in (600, 700, 800):
        written.save(step=step, directive="steps")
    assert cli("gc", run_url(url), "--keep-last", "1")[0] == 0
    live = {one["seq"]: one["pins"] for one in json_output(cli, "ls", run_url(url))["checkpoints"]}
    assert {seq: pins for seq, pins in live.items() if pins} == {3: ["paper"], base: ["best"]}
    assert 2 in live, "checkpoint 3 builds on checkpoint 2"
    newest = written.save(step=900, pins=("best",), directive="steps")
    assert json_output(cli, "inspect", run_url(url), "-c", "pin:best")["summary"]["seq"] == newest
    assert json_output(cli, "inspect", run_url(url), "-c", "pin:paper")["summary"]["seq"] == 3
    assert cli("unpin", run_url(url), "paper")[0] == 0
    assert "nothing is pinned 'paper'" in expect_failure(cli, "unpin", run_url(url), "paper")
    assert cli("gc", run_url(url), "--keep-last", "1")[0] == 0
    assert not {2, 3, base} & {one["seq"] for one in json_output(cli, "ls", run_url(url))["checkpoints"]}
    written.save(step=1000, directive="steps")
    assert json_output(cli, "verify", "--deep", run_url(url))["ok"] is True
    for wrong in ("", " x", "a\nb", "x" * 300):
        assert "is not a valid pinned name" in expect_failure(cli, "pin", run_url(url), wrong)


def test_retire_lists_dependents(cli: Cli, url: str, tmp_path: Path) -> None:
    written = chain(url, tmp_path)
    full = written.save(step=400, directive="steps")
    delta = written.save(written.train(), step=500, covers=full, directive="steps")
    assert f"checkpoint {delta} is kept: it is the newest" in expect_failure(
        cli, "retire", run_url(url), "-c", "latest"
    )
    assert f"covered by the newest, {delta}" in expect_failure(cli, "retire", run_url(url), "-c", f"{full}")
    assert "checkpoint 3 is kept: checkpoint 4 builds on it" in expect_failure(
        cli, "retire", run_url(url), "-c", "3"
    )
    text = expect_failure(cli, "retire", run_url(url), "-c", "2", "-c", "3", "-c", "4")
    assert "checkpoint 2 is kept: it is pinned best" in text
    assert cli("unpin", run_url(url), "best")[0] == 0
    done = json_output(cli, "retire", run_url(url), "-c", "2", "-c", "3", "-c", "4")
    assert done["retired"] == [2, 3, 4]
    assert len(done["prefixes"]) == 3
    assert "live: seq " in expect_failure(cli, "inspect", run_url(url), "-c", "4")
    assert json_output(cli, "gc", run_url(url), "--grace", "0")["collected"]["objects"] > 0
    written.save(written.train(), step=600, covers=delta, directive="steps")
    assert json_output(cli, "verify", "--deep", run_url(url))["ok"] is True
    assert "No such option" in expect_failure(cli, "retire", run_url(url), "--keep", "4")
    assert "confirm the run by --run" in expect_failure(cli, "retire", url, "-c", f"{full}")


# -- rewind -----------------------------------------------------------------------------------------------------


def test_rewind_to_older_checkpoint_and_back(cli: Cli, url: str, tmp_path: Path) -> None:
    written = chain(url, tmp_path)
    wanted = {seq: read_checkpoint(written.store, RUN, f"seq:{seq}") for seq in (3, 4)}
    text = expect_failure(cli, "rewind", run_url(url), "-c", "3")
    assert "attempt 1 has not recorded its end" in text
    assert "--ended" in text
    written.save(written.train(), step=400, covers=4, directive="close")
    done = json_output(cli, "rewind", run_url(url), "-c", "3")
    assert (done["checkpoint"], done["step"], done["detached"]) == (3, 200, [4, 5])
    # A live trainer is fenced. Its committed checkpoints remain.
    with pytest.raises(FencedError):
        written.save(step=600)
    assert json_output(cli, "ls", run_url(url))["run"]["newest_seq"] == 3
    _code, text = cli("ls", run_url(url))
    assert "detached" in text
    assert_same(read_checkpoint(written.store, RUN), wanted[3])
    assert_same(read_checkpoint(written.store, RUN, "seq:4"), wanted[4])
    # The rewind is reverted and repeated. A new trainer continues from the target.
    assert json_output(cli, "rewind", run_url(url), "-c", "4")["detached"] == [5]
    assert json_output(cli, "rewind", run_url(url), "-c", "4")["entry"] is None
    assert json_output(cli, "rewind", run_url(url), "-c", "3")["detached"] == [4, 5]
    opened = open_attempt(RunLog(written.store, RUN), owner="tests", closing_wait_s=0.0)
    assert (opened.resume.seq, opened.fell_back) == (3, False)
    assert "may hold the run" in expect_failure(cli, "rewind", run_url(url), "-c", "4")
    assert [line["description"] for line in json_output(cli, "log", run_url(url))["lines"] if line["kind"] == "rewind"] == [
        "the run continues from checkpoint 3", "the run continues from checkpoint 4", "the run continues from checkpoint 3",
    ]  # fmt: skip
    # Only retention by age removes detached checkpoints.
    assert cli("gc", run_url(url))[0] == 0
    assert json_output(cli, "ls", run_url(url))["run"]["checkpoints"] == 4
    assert json_output(cli, "gc", run_url(url), "--keep-last", "3")["retired"] == [4, 5]
    assert json_output(cli, "verify", "--deep", run_url(url))["ok"] is True


def test_rewind_refuses_incomplete_checkpoint(cli: Cli, file_url: str, tmp_path: Path) -> None:
    written = chain(file_url, tmp_path)
    state = written.log.refresh()
    written.store.delete([f"{RUN}/{state.checkpoints[2].parts[0].index_key}"])
    assert "an index of the checkpoint does not exist" in expect_failure(
        cli, "rewind", run_url(file_url), "-c", "3", "--ended", code=1
    )
    assert written.log.refresh().tip == 4


# -- cp ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> str:
    if url.startswith("file"):
        found = request.getfixturevalue("minio_url")
        assert isinstance(found, str)
        return found
    return f"file://{tmp_path}/other"


def test_cp_to_another_store_is_bit_exact(cli: Cli, url: str, other: str, tmp_path: Path) -> None:
    written = chain(url, tmp_path)
    assert cli("compact", run_url(url), "-c", "3")[0] == 0
    assert cli("pin", run_url(url), "paper", "-c", "3")[0] == 0
    full = written.save(step=400, directive="steps")
    assert cli("retire", run_url(url), "-c", f"{full}")[0] == 2
    done = json_output(cli, "cp", run_url(url), other)["copied"]
    tip = written.log.refresh().tip
    assert (done["run"], done["seq"], done["through"], done["checkpoints"]) == (RUN, full, tip, 4)
    assert json_output(cli, "verify", "--deep", run_url(other))["restored"] == [2, 3, 4, full]
    copy = open_store(other)
    for seq in (2, 3, 4, full):
        assert_same(
            read_checkpoint(copy, RUN, f"seq:{seq}"), read_checkpoint(written.store, RUN, f"seq:{seq}")
        )
    # The source continues, and cp updates the copy. Then a trainer continues with the copy.
    newest = written.save(written.train(), step=500, covers=full, directive="steps")
    again = json_output(cli, "cp", run_url(url), other)["copied"]
    assert (again["entries"], again["seq"], again["checkpoints"]) == (1, newest, 5)
    assert_same(read_checkpoint(copy, RUN), read_checkpoint(written.store, RUN))
    assert "is up to date" in cli("cp", run_url(url), other)[1]
    opened = open_attempt(RunLog(copy, RUN), owner="tests", closing_wait_s=0.0)
    assert opened.resume.step == 500
    assert RunLog(copy, RUN).refresh().pinned == {"best": 2, "paper": 3}
    assert "exists in the target, and is not a copy of this run" in expect_failure(
        cli, "cp", run_url(url), other
    )
    written.close()


def test_cp_verifies_and_repairs_existing_objects(cli: Cli, file_url: str, tmp_path: Path) -> None:
    written = chain(file_url, tmp_path)
    there = f"file://{tmp_path}/there"
    assert cli("cp", run_url(file_url), there)[0] == 0
    copy = open_store(there)
    packs = [info.key for info in copy.list(RUN) if info.key.endswith(".pack")]
    # The copy has no log and one corrupt pack: cp writes this pack again and skips the others.
    folds = [info.key for info in copy.list(f"{RUN}/log/fold-")]
    copy.delete([info.key for info in copy.list(f"{RUN}/log/") if info.key not in folds])
    data = bytearray(copy.get(packs[0]))
    data[len(data) // 2] ^= 1
    copy.put(packs[0], data)
    done = json_output(cli, "cp", run_url(file_url), there)["copied"]
    assert (done["objects"], done["skipped"]) == (1, len(packs) + 3 + len(folds) - 1)
    assert json_output(cli, "verify", "--deep", run_url(there))["ok"] is True
    # cp writes missing objects again.
    copy.delete([packs[0]])
    assert json_output(cli, "cp", run_url(file_url), there)["copied"]["objects"] == 1
    assert json_output(cli, "verify", "--deep", run_url(there))["ok"] is True
    # With a corrupt source no run is created.
    written.store.put(packs[0], data)
    elsewhere = f"file://{tmp_path}/elsewhere"
    text = expect_failure(cli, "cp", run_url(file_url), elsewhere, code=1)
    assert "a frame does not match its hash" in text
    assert RunLog(open_store(elsewhere), RUN).refresh().tip == -1


def test_cp_of_run_with_operator_entries_and_void_slots(cli: Cli, file_url: str, tmp_path: Path) -> None:
    written = chain(file_url, tmp_path)
    written.store.put(f"{RUN}/{entry_key(4)}", b"rotten")
    open_attempt(RunLog(written.store, RUN), owner="tests")
    assert cli("pin", run_url(file_url), "paper", "-c", "2")[0] == 0
    assert cli("rewind", run_url(file_url), "-c", "2", "--ended")[0] == 0
    there = f"file://{tmp_path}/there"
    assert cli("cp", run_url(file_url), there)[0] == 0
    assert RunLog(open_store(there), RUN).refresh() == RunLog(written.store, RUN).refresh()
    assert json_output(cli, "log", run_url(there))["lines"][4]["valid"] is False
    assert_same(read_checkpoint(open_store(there), RUN), read_checkpoint(written.store, RUN))


def test_cp_refuses_target_that_is_not_a_copy(cli: Cli, file_url: str, tmp_path: Path) -> None:
    chain(file_url, tmp_path / "a")
    there = f"file://{tmp_path}/there"
    chain(there, tmp_path / "b").close()
    before = keys(open_store(there), RUN)
    assert "is not a copy of this run" in expect_failure(cli, "cp", run_url(file_url), there)
    assert "is not a copy of this run" in expect_failure(
        cli, "cp", run_url(file_url), there, "-c", "2", "--as", RUN
    )
    assert keys(open_store(there), RUN) == before
    assert "onto itself" in expect_failure(cli, "cp", run_url(file_url), file_url)
    for alone in (("-c", "2"), ("--as", "n")):
        assert "must be given together" in expect_failure(cli, "cp", run_url(file_url), file_url, *alone)
    assert "cannot name a new run" in expect_failure(
        cli, "cp", run_url(file_url), file_url, "-c", "2", "--as", "x/log"
    )
    assert "this URL is a run, not a store" in expect_failure(cli, "cp", run_url(file_url), run_url(file_url))
    assert "no live, valid checkpoint" in expect_failure(
        cli, "cp", run_url(file_url), file_url, "-c", "9", "--as", "n"
    )
    empty = WrittenRun(open_store(file_url), "empty", tmp_path / "c")
    empty.close()
    assert "nothing has been committed" in expect_failure(
        cli, "cp", run_url(file_url, "empty"), file_url, "-c", "latest", "--as", "n"
    )


# -- rm ---------------------------------------------------------------------------------------------------------


def test_rm_removes_only_that_run(cli: Cli, url: str, tmp_path: Path) -> None:
    written = chain(url, tmp_path / "a")
    inner = chain(url, tmp_path / "b", f"{RUN}/inner")
    kept = keys(written.store, f"{RUN}/inner")
    assert "use --yes" in expect_failure(cli, "rm", run_url(url), "--ended")
    assert "may hold the run" in expect_failure(cli, "rm", run_url(url), "--yes")
    assert "this URL is a store, not a run" in expect_failure(cli, "rm", url, "--yes", "--ended")
    assert "no run 'team'" in expect_failure(cli, "rm", url, "--run", "team", "--yes")
    count = len(keys(written.store)) - len(kept)
    assert json_output(cli, "rm", url, "--run", RUN, "--yes", "--ended")["objects"] == count
    assert keys(written.store) == kept
    # A live trainer gets an error and writes no objects that form a run.
    with pytest.raises(LogRolledBack):
        written.save(step=400)
    assert RunLog(written.store, RUN).refresh().tip == -1
    inner.save(step=400)
    assert cli("verify", "--deep", run_url(url, f"{RUN}/inner"))[0] == 0


def test_rm_reports_objects_written_meanwhile(
    cli: Cli, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer continues to put objects.

    rm reports the remaining objects, the run stays closed, and a second rm succeeds.
    """
    chain(file_url, tmp_path).close()
    delete, late = FileStore.delete, iter(range(10**6))

    def beside(self: FileStore, keys: Iterable[str]) -> None:
        delete(self, keys)
        self.put(f"{RUN}/{snapshot_prefix(1, next(late))}00000-{'0' * 16}-00000.pack", b"late")

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete", beside)
        text = expect_failure(cli, "rm", run_url(file_url), "--yes", "--ended", code=1)
    assert "appeared during the removal and are left: a trainer of this run is still writing" in text
    assert json_output(cli, "rm", run_url(file_url), "--yes")["left"] == 0
    assert keys(open_store(file_url)) == {}
