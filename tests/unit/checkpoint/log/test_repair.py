"""Damaged logs: what `verify` finds, what `repair` keeps and refuses, and what `scan` finds without a log."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log import repair as repairs
from deltashard_checkpoint.log.entry import Repaired, entry_key
from deltashard_checkpoint.log.log_error import LogGap, LogStopped
from deltashard_checkpoint.log.manifest import manifest_key
from deltashard_checkpoint.log.repair import NothingToRepair, repair, salvage
from deltashard_checkpoint.maintenance import user_entry
from deltashard_checkpoint.write import attempt as attempts
from deltashard_cli.main import cli, exit_code

from tests.crash import log_victim
from tests.crash.log_victim import ROWS, log_of, save, values
from tests.support.checkpoint.run_builder import layout_of, rehashed, started_run
from tests.support.checkpoint.snapshot import read_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare checkpoints on two chains, with enough saves that folded states cover them."""
    directory = tmp_path_factory.mktemp("run")
    log_victim.prepare(directory)
    log = log_of(directory)
    attempt, rows = log.refresh().attempt, np.arange(ROWS)
    base = save(directory, log, attempt, 5, 5, rows, None)
    for snapshot_id in range(6, 14):
        save(directory, log, attempt, snapshot_id, snapshot_id, rows[:4], base)
    return directory


@pytest.fixture
def stored(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "run")
    return tmp_path / "run"


def run_cli(*arguments: object) -> tuple[int, dict]:
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return exit_code(done.exception), {"error": str(done.exception)}
    return done.exit_code, json.loads(done.stdout)


def everything(directory) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted((directory / "store").rglob("*")) if p.is_file()}


def entry_file(directory, seq: int):
    return directory / "store" / "job" / entry_key(seq)


def remove_folds(directory, seq: int):
    """Remove the folded states that would make the loss of a slot harmless, and return the slot's file."""
    for path in (directory / "store" / "job" / "log").glob("fold-*"):
        if int(path.name.split("-")[1]) >= seq:
            path.unlink()
    return entry_file(directory, seq)


def test_verify_checks_fold_content(stored):
    """The fold has a matching slot and hashes, an entry names it, but its content differs."""
    url = stored / "store" / "job"
    code, found = run_cli("verify", url)
    assert (code, found["problems"]) == (0, [])
    log = log_of(stored)
    state = log.refresh()
    newest = max(state.checkpoints)
    wrong = replace(state, checkpoints={seq: c for seq, c in state.checkpoints.items() if seq != newest})
    data = folded_state.dump(wrong)
    name = folded_state.name_of(wrong, data)
    log.store.put(log.key(folded_state.fold_key(name)), data)
    log.folds.put = lambda _: name
    save(stored, log, state.attempt, 14, 14, np.arange(ROWS), None)
    code, found = run_cli("verify", url)
    assert code == 1
    assert [p["object"] for p in found["problems"]] == [folded_state.fold_key(name)]
    assert "differs from the fold of the entries before it" in found["problems"][0]["what"]
    assert newest in found["checkpoints"]


@pytest.mark.parametrize("damage", ["rot", "loss"])
def test_verify_reports_damage_behind_a_fold_and_the_run_continues(stored, damage):
    if damage == "rot":
        entry_file(stored, 3).write_bytes(b"corrupt")
    else:
        entry_file(stored, 3).unlink()
    code, found = run_cli("verify", stored / "store" / "job")
    assert code == 1
    assert [p["object"] for p in found["problems"]] == [entry_key(3)]
    assert "readers start from a later folded state" in found["problems"][0]["what"]
    assert attempts.open_attempt(log_of(stored), owner="me").resume.step == 13


@pytest.mark.parametrize("damage", ["rot", "loss", "end"])
def test_repair_keeps_checkpoints_independent_of_the_loss(stored, damage):
    log = log_of(stored)
    tip = log.refresh().tip
    expected = dict(log.state.checkpoints)
    lost = tip if damage == "end" else tip - 1
    if damage == "rot":
        remove_folds(stored, lost).write_bytes(b"corrupt")
    else:
        remove_folds(stored, lost).unlink()
    url = stored / "store" / "job"
    before = everything(stored)
    code, planned = run_cli("repair", url, "--dry-run")
    assert (code, planned["entry"], everything(stored)) == (0, None, before)
    code, found = run_cli("repair", url)
    assert code == 0
    assert found["kept"] == planned["kept"] == sorted(expected.keys() - {lost})
    after = everything(stored)
    assert {k: v for k, v in after.items() if k in before and "HINT" not in k} == {
        k: v for k, v in before.items() if "HINT" not in k
    }
    assert len(after) == len(before) + (1 if damage == "end" else 2)  # the fold before the end exists already
    opened = attempts.open_attempt(log_of(stored), owner="me")
    assert (opened.resume.seq, opened.voided) == (max(found["kept"]), None)
    weights = read_checkpoint(log_of(stored).store, "job").tables["items"].weights
    expected = values(5, np.arange(ROWS))
    expected[:4] = values(opened.resume.step, np.arange(4))
    np.testing.assert_array_equal(weights, expected)
    log = log_of(stored)
    for snapshot_id in range(20):
        save(stored, log, opened.attempt, snapshot_id, 20 + snapshot_id, np.arange(ROWS), None)
    assert log_of(stored).refresh() == log.state
    code, found = run_cli("verify", url)
    assert (code, found["problems"]) == (0, [])


def test_repair_keeps_pins_and_exclusions_of_kept_checkpoints(stored):
    """A pinned and an excluded checkpoint are lost with an entry. The pins and exclusions of these are dropped."""
    log = log_of(stored)
    live = sorted(log.refresh().checkpoints)
    kept, detached, newest = live[-3:]
    user_entry.pin(log, "kept", f"{kept}")
    user_entry.pin(log, "missing", f"{detached}")
    user_entry.rewind(log, f"{kept}", ended=True)
    lost = log.store
    lost.delete([log.key(log.state.checkpoints[detached].parts[0].index_key)])
    remove_folds(stored, log.state.tip - 1).write_bytes(b"corrupt")
    assert run_cli("repair", stored / "store" / "job")[0] == 0
    state = log_of(stored).refresh()
    assert detached not in state.checkpoints
    assert (state.pinned, state.detached, state.newest().seq) == ({"kept": kept}, {newest}, kept)
    assert run_cli("verify", stored / "store" / "job", "-c", f"{kept}")[0] in {0, 1}
    assert attempts.open_attempt(log_of(stored), owner="me").resume.seq == kept


@pytest.mark.parametrize("where", ["store/job", "store", ".", "store/job/log", "store/job/data"])
def test_unneeded_repair_or_repair_of_no_run_is_refused(stored, where):
    before = everything(stored)
    for damaged in (False, True):
        if damaged and where != "store/job":
            entry_file(stored, log_of(stored).refresh().tip - 1).write_bytes(b"corrupt")
            before = everything(stored)
        code, found = run_cli("repair", stored / where)
        assert (code, everything(stored)) == (2, before), found


def test_repair_of_another_runs_log_is_refused(stored):
    (stored / "store").rename(stored / "outer")
    (stored / "store").mkdir()
    (stored / "outer" / "job").rename(stored / "store" / "other")
    log = repairs.RunLog(log_of(stored).store, "other")
    (stored / "store" / "other" / entry_key(12)).write_bytes(b"corrupt")
    with pytest.raises(UserError, match="log of run 'job', not of 'other'"):
        salvage(log)


def test_an_early_entry_lost_before_any_fold():
    for lost in ((0,), (1,), (0, 1), (1, 2)):
        run, attempt = started_run()
        first = run.commit(attempt, 1)
        run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])
        second = run.commit(attempt, 2)
        run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])
        run.memory.delete(["job/" + entry_key(seq) for seq in lost])
        with pytest.raises(LogGap):
            run.reader().refresh()
        found = salvage(run.reader())
        assert found.lost == lost
        repair(run.reader(), found)
        run.log = run.reader()
        opened = run.open(takeover=lost == (0, 1))  # the owner is unknown
        assert opened.resume.seq == second
        assert (first in opened.state.checkpoints) == (first not in lost)
        assert run.commit(opened.attempt, 1, second)


def test_multi_rank_run_is_repaired_from_entries_and_manifests():
    """A lost attempt gets the layout of its first commit. A checkpoint without its manifest or layout is not kept."""
    layout = layout_of()
    for missing in ("nothing", "manifest", "layout"):
        run, attempt = started_run(world_size=2, layout=layout.data)
        first = run.commit_halves(attempt, 1)
        second = run.commit_halves(attempt, 2)
        third = run.commit_halves(attempt, 3, (first.seq, first.seq))
        run.memory.delete([info.key for info in run.memory.list("job/log/fold-")])
        run.memory.delete(["job/" + entry_key(attempt)])
        if missing == "manifest":
            key = manifest_key(attempt, first.snapshot_id, first.listed.manifest)
            run.memory.delete([f"job/{key}"])
        elif missing == "layout":
            run.memory.delete([f"job/{layout.key}"])
            with pytest.raises(NothingToRepair, match="no checkpoint could be kept"):
                salvage(run.reader())
            continue
        found = salvage(run.reader())
        left = [second] if missing == "manifest" else [first, second, third]
        assert sorted(found.state.checkpoints) == [entry.seq for entry in left]
        assert found.state.attempts[attempt].layout == layout.digest
        assert found.state.attempts[attempt].world_size == 2
        repair(run.reader(), found)
        run.log = run.reader()
        opened = run.open(world_size=2, layout=layout.data)
        assert opened.resume == left[-1]
        newest = left[-1].seq
        assert run.commit_halves(opened.attempt, 1, (newest, newest)).covers == (newest,)


def test_repair_drops_checkpoints_with_missing_objects():
    run, attempt = started_run()
    base = run.commit(attempt, 1)
    delta = run.commit(attempt, 2, base)
    whole = run.commit(attempt, 3)
    last = run.commit(attempt, 4)
    run.memory.put("job/" + entry_key(last), b"corrupt")
    run.memory.delete([f"job/{run.log.state.checkpoints[base].parts[0].index_key}"])
    found = salvage(run.reader())
    assert (sorted(found.state.checkpoints), found.dropped) == ([whole], (base, delta))
    run.memory.delete([info.key for info in run.memory.list("job/data/")])
    with pytest.raises(NothingToRepair, match="no checkpoint could be kept"):
        salvage(run.reader())


def test_repair_skips_newer_entries_only_on_request():
    run, attempt = started_run()
    seqs = [run.commit(attempt, snapshot_id) for snapshot_id in (1, 2, 3)]
    key = "job/" + entry_key(seqs[-1])
    run.memory.put(key, rehashed({**json.loads(run.memory.get(key)), "surprise": 1}))
    with pytest.raises(LogStopped, match="unknown to this version"):
        salvage(run.reader())
    found = salvage(run.reader(), even_newer=True)
    seq = repair(run.reader(), found)
    entry = run.reader().read_slot(seq).entry
    assert (type(entry), entry.lost) == (Repaired, (seqs[-1],))
    assert run.reader().refresh().newest().seq == seqs[-2]


def test_scan_finds_saves_without_a_log(stored):
    url = stored / "store" / "job"
    code, found = run_cli("scan", url)
    assert code == 1, "the orphaned files of an older process are no complete save"
    saves = {(one["attempt"], one["snapshot_id"]): one for one in found["saves"]}
    live = sorted(log_of(stored).refresh().checkpoints)
    assert sorted(one["seq"] for one in saves.values() if one["seq"] is not None) == live
    assert [one["snapshot_id"] for one in saves.values() if not one["whole"]] == [0]
    shutil.rmtree(url / "log")
    pack = next((url / "data").rglob("*00000012/*.pack"))
    pack.write_bytes(pack.read_bytes()[:-1])
    before = everything(stored)
    code, found = run_cli("scan", url)
    assert (code, everything(stored)) == (1, before)
    bad = {one["snapshot_id"]: one["problems"] for one in found["saves"] if not one["whole"]}
    assert sorted(bad) == [0, 12]
    assert "bytes of" in bad[12][0]
    assert {one["step"] for one in found["saves"] if one["whole"]} >= {5, 13}
