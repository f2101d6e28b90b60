"""Former silent failures: voided newer entries, a lost tip, a failed durable append, name clashes."""

import pytest
from click.testing import CliRunner
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.object_key import (
    RESERVED,
    compaction_pack_key,
    compaction_token,
    validate_new_run,
)
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogGap, LogRolledBack
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.stores.abc import AccessDenied
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.closing import CLOSING_WAIT_S, mark_closing
from deltashard_cli.main import cli

from tests.crash import log_victim
from tests.support.checkpoint.run_builder import MemoryRun, started_run


def test_repaired_entry_is_read_again():
    run, attempt = started_run()
    seqs = [run.commit(attempt, snapshot_id) for snapshot_id in (1, 2)]
    key = "job/" + entry_key(seqs[-1])
    whole = run.memory.get(key)
    run.memory.put(key, b"corrupt")
    run.log = run.reader()
    assert run.log.refresh().stopped is not None
    run.memory.put(key, whole)
    opened = run.open()
    assert (opened.voided, opened.resume.seq) == (None, seqs[-1])


class CacheRejectingStore(MemoryStore):
    """A store that accepts the log and rejects its caches."""

    error: Exception = AccessDenied("no")

    def put(self, key, data):
        if "/log/fold-" in key or key.endswith("/HINT"):
            raise self.error
        super().put(key, data)


@pytest.mark.parametrize("error", [AccessDenied("no"), ValueError("unexpected")])
def test_durable_entry_is_not_reported_as_failed(error):
    store = CacheRejectingStore()
    store.error = error
    run = MemoryRun(store)
    attempt = run.open().attempt
    run.commit(attempt, 1)
    seq = run.commit(attempt, 2)
    assert run.reader().refresh().newest().seq == seq


def test_an_emptied_log_is_a_gap_and_not_a_new_run():
    run = MemoryRun()
    run.commit(run.open().attempt, 1)
    run.memory.delete(["job/" + entry_key(seq) for seq in range(3)])
    run.log = run.reader()
    with pytest.raises(LogGap, match="the newest entries are gone"):
        run.open()
    assert not list(run.memory.list("job/log/0"))


@pytest.mark.parametrize("name", [*sorted(RESERVED), "exp/cache", "team/exp/log", "exp/data/x"])
def test_run_cannot_be_named_like_a_run_folder(name):
    store = MemoryStore()
    with pytest.raises(UserError, match="cannot name a new run"):
        open_attempt(RunLog(store, name), owner="me", closing_wait_s=0.0)
    assert not list(store.list(""))


def test_similar_run_names_are_allowed_and_existing_runs_are_readable(monkeypatch):
    for name in ("logs", "data-1", "data/exp", "exp/caches", "a.log"):
        assert validate_new_run(name) == name
    store = MemoryStore()
    with monkeypatch.context() as patch:
        patch.setattr("deltashard_checkpoint.write.attempt.validate_new_run", lambda run: run)
        open_attempt(RunLog(store, "exp/cache"), owner="me", closing_wait_s=0.0)
    assert open_attempt(RunLog(store, "exp/cache"), owner="me", closing_wait_s=0.0).attempt == 2


def test_run_does_not_delete_objects_of_a_nested_run():
    run = MemoryRun()
    others = [f"job/{key}" for key in ("log/fold-1/x", "log/log/00000000000000000000.json", "cache/data/x")]
    for key in others:
        run.memory.put(key, b"another's")
    attempt = run.open().attempt
    for snapshot_id in range(40):
        run.commit(attempt, snapshot_id)
    assert all(run.memory.get(key) == b"another's" for key in others)


def test_gc_deletes_markers_of_finished_saves():
    run, first = started_run()
    run.commit(first, 1)
    mark_closing(run.log, first, "00000-fenced")
    second = run.open().attempt
    mark_closing(run.log, second, "00000-old")
    run.time.now_s += CLOSING_WAIT_S
    mark_closing(run.log, second, "00000-recent")
    run.memory.put("job/closing/another-tools", b"")
    assert len(list(run.memory.list("job/closing/"))) == 4
    garbage_collection.collect(run.log, dry_run=True)
    assert len(list(run.memory.list("job/closing/"))) == 4
    garbage_collection.collect(run.log)
    left = [info.key.rpartition("/")[2] for info in run.memory.list("job/closing/")]
    assert left == ["00000-recent", "another-tools"]


@pytest.mark.parametrize(
    "command", [["verify"], ["verify", "--deep"], ["gc", "--dry-run", "--keep-last", "1"]]
)
def test_read_only_commands_write_nothing(tmp_path, monkeypatch, command):
    log_victim.prepare(tmp_path)
    store = FileStore(tmp_path / "store")
    store.put("job/" + compaction_pack_key(token=compaction_token(1), n=0), b"of an abandoned compaction")
    writes = []
    for name in ("put", "put_if_absent", "delete", "now_s"):
        monkeypatch.setattr(FileStore, name, lambda self, *_, name=name: writes.append(name))
    done = CliRunner().invoke(cli, [*command, str(tmp_path / "store" / "job")])
    assert (done.exit_code, writes) == (0, []), done.output


@pytest.mark.parametrize("what", ["emptied", "older", "another", "tip"])
def test_saves_fail_when_the_store_is_rolled_back_under_a_writer(what):
    """These saves were once reported as durable, but could not be restored."""
    run, attempt = started_run()
    seqs = [run.commit(attempt, snapshot_id) for snapshot_id in (1, 2)]
    older = {info.key: run.memory.get(info.key) for info in run.memory.list("")}
    seqs += [run.commit(attempt, snapshot_id) for snapshot_id in (3, 4)]
    if what == "emptied":
        run.memory.delete([info.key for info in run.memory.list("")])
    elif what == "tip":
        run.memory.put("job/" + entry_key(seqs[-1]), b"corrupt")
    else:
        run.memory.delete([info.key for info in run.memory.list("")])
        for key, data in older.items():
            run.memory.put(key, data)
        if what == "another":  # another process continued from the older state
            writer_log, run.log = run.log, run.reader()
            attempt_2 = run.open().attempt
            for snapshot_id in (1, 2, 3):
                run.commit(attempt_2, snapshot_id)
            run.log = writer_log
    before = {info.key for info in run.memory.list("job/log/")}
    with pytest.raises(LogRolledBack, match="while this writer was running"):
        run.commit(attempt, 9)
    assert {info.key for info in run.memory.list("job/log/")} == before


def test_stale_handle_of_a_rolled_back_log_voids_nothing():
    """The store is restored from an older copy and another pod continues. The old handle has read another log."""
    run, attempt = started_run()
    run.commit(attempt, 1)
    copy = {info.key: run.memory.get(info.key) for info in run.memory.list("")}
    later = run.open().attempt
    run.commit(later, 1)
    old = run.log.fork()
    run.memory.delete([info.key for info in run.memory.list("")])
    for key, data in copy.items():
        run.memory.put(key, data)
    run.log = run.reader()
    other = run.open().attempt
    seqs = [run.commit(other, snapshot_id) for snapshot_id in range(1, 6)]
    opened = open_attempt(old, owner=run.log.state.owner, closing_wait_s=0.0)
    assert opened.voided is None
    assert opened.resume is not None
    assert opened.resume.seq == seqs[-1]
    assert set(seqs) <= set(run.reader().refresh().checkpoints)
