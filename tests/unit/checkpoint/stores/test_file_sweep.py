"""Unfinished files of writers: gc and rm remove files of ended writers and keep files of running writers."""

import os
import threading
from pathlib import Path

from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import TEMPORARY
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.whole_run import removal

from tests.support.checkpoint.run_builder import MemoryRun


def unfinished(directory: Path, *, old: bool = True, name: str = "stale") -> Path:
    path = directory / f"{TEMPORARY}{name}"
    path.write_bytes(b"half")
    if old:
        os.utime(path, (1, 1))
    return path


def run_in(directory: Path) -> RunLog:
    run = MemoryRun(FileStore(directory))
    run.memory = run.store
    run.commit(run.open().attempt, 1)
    return RunLog(open_store(f"file://{directory}"), "job")


def test_gc_removes_stale_temporary_files_and_no_recent_ones(tmp_path: Path) -> None:
    log = run_in(tmp_path)
    (data,) = (tmp_path / "job/data/00000000000000000001").iterdir()
    stale, recent = unfinished(data), unfinished(data, old=False, name="recent")
    others = unfinished(data.parent), unfinished(tmp_path / "job/log")
    kept = {info.key for info in log.store.list("")}
    assert garbage_collection.collect(log, dry_run=True).unfinished == 0
    assert stale.exists()
    assert garbage_collection.collect(log).unfinished == 3
    assert not stale.exists()
    assert not any(path.exists() for path in others)
    assert recent.exists()
    assert {info.key for info in log.store.list("")} == kept
    removal.remove(log)
    assert not [path for path in (tmp_path / "job").rglob("*") if path.is_file()]


def test_file_of_a_running_writer_is_kept_at_any_age(tmp_path, monkeypatch):
    """A process that was stopped for an hour in the middle of a put can continue."""
    log = run_in(tmp_path)
    paused, resume = threading.Event(), threading.Event()
    fsync = os.fsync

    def wait(descriptor: int) -> None:
        fsync(descriptor)
        if threading.current_thread() is writer:
            paused.set()
            assert resume.wait(60)

    monkeypatch.setattr(os, "fsync", wait)
    for put in ("put", "put_if_absent"):
        paused.clear()
        resume.clear()
        key = f"job/data/{put}"
        writer = threading.Thread(target=getattr(FileStore(tmp_path), put), args=(key, b"whole"))
        writer.start()
        assert paused.wait(60)
        (mine,) = (tmp_path / "job/data").glob(f"{TEMPORARY}*")
        os.utime(mine, (1, 1))
        assert garbage_collection.collect(log).unfinished == 0
        assert mine.exists()
        resume.set()
        writer.join()
        assert log.store.get(key) == b"whole"
