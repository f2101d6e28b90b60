"""Restore failures of other systems that deltashard avoids."""

from __future__ import annotations

import json
import traceback
import urllib.request
from pathlib import Path

import deltashard
import numpy as np
import pytest
from deltashard.attach.launcher import runtime_dir
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.maintenance.garbage_collection import collect
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt

from tests.incidents.toys import ToyRun, newest_step


def test_recsys_examples_477_fenced_trainer_never_commits(tmp_path: Path) -> None:
    """The first trainer of a run continues after a second one took over: its save is refused and its step raises."""
    first = ToyRun(tmp_path / "store")
    first.train(3)
    first.save()
    newest = RunLog(open_store(f"file://{tmp_path}/store"), "run")
    opened = open_attempt(newest, owner=newest.refresh().owner, world_size=1)
    assert opened.resume is not None
    first.train(1)
    with pytest.raises(deltashard.FencedError):
        first.save()
    with pytest.raises(deltashard.FencedError):
        first.train(2)
    assert newest_step(tmp_path / "store") == 3
    first.__exit__()


def test_source_run_advancing_during_read_is_reread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen checkpoint is deleted before its first byte is read. The newest checkpoint is read instead."""
    with (
        ToyRun(tmp_path / "store", "source", differential="full", keep_last=9) as source,
        ToyRun(tmp_path / "store", "target", restore=False) as target,
    ):
        source.train(3)
        source.save()
        opener = target.ckpt._restorer._opener
        opened = opener.open
        seen = []

        def open_and_lose(*args: object, **named: object) -> object:
            link, reply = opened(*args, **named)
            seen.append(reply.step)
            if len(seen) == 1:
                for _ in range(2):
                    source.train(1)
                    source.save()
                log = RunLog(open_store(f"file://{tmp_path}/store"), "source")
                append_retirement(log, Retention(keep_last=1))
                assert collect(log, grace_s=0).objects
            return link, reply

        monkeypatch.setattr(opener, "open", open_and_lose)
        resumed = target.ckpt.restore(from_run="source")
        assert (resumed.step, resumed.fell_back, seen) == (5, False, [3, 5])
        assert target.kinds("fell_back") == []
        for name, values in source.state().items():
            assert np.array_equal(target.state()[name], values)


def test_warm_run_never_trains_without_restore(tmp_path: Path) -> None:
    """A script that ignores the source run or skips `restore()`, or a missing source run, gets an error."""
    with ToyRun(tmp_path / "store", "source", encoding="fp32") as source:
        source.train(3)
        source.save()
        at_three = source.state()
    options = {"encoding": "fp32", "sidecar": {"restore_from": "source"}}
    with (
        ToyRun(tmp_path / "store", "warm", restore=False, **options) as unrestored,
        pytest.raises(deltashard.DeltashardError, match="the newest is of step 3"),
    ):
        unrestored.train(1)
    with ToyRun(tmp_path / "store", "warm", **options) as warm:
        assert (warm.resumed.step, warm.resumed.exact) == (3, True)
        assert all(np.array_equal(warm.state()[name], values) for name, values in at_three.items())
    with pytest.raises(deltashard.DeltashardError, match="there is no such run in the store"):
        ToyRun(tmp_path / "store", "third", sidecar={"restore_from": "missing"})


def test_misplaced_frame_falls_back_with_warning(tmp_path: Path) -> None:
    """The older pack overwrites the newest one: its frames are not loaded, and the fallback is reported."""
    with ToyRun(tmp_path / "store", differential="full", keep_last=5) as run:
        run.train(3)
        run.save()
        old = run.state()
        run.train(3)
        run.save()
    store = open_store(f"file://{tmp_path}/store")
    packs = sorted(info.key for info in store.list("run/data/") if info.key.endswith(".pack"))
    store.put(packs[-1], store.get(packs[0]))
    for cached in (tmp_path / "caches").rglob("*"):
        if cached.is_file():
            cached.unlink()
    with ToyRun(tmp_path / "store") as again:
        assert again.resumed.fell_back
        assert again.resumed.step == 3
        assert again.kinds("fell_back")
        now = again.state()
        assert np.array_equal(now["weights"], old["weights"])
        assert np.array_equal(now["sum"], old["sum"])
        again.train(1)
        again.save()
    assert newest_step(tmp_path / "store") == 4


def test_damaged_newest_log_entry_falls_back_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest commit cannot be read: the older checkpoint is restored, and every channel reports the fallback."""
    with ToyRun(tmp_path / "store", keep_last=5) as run:
        run.train(3)
        run.save()
        old = run.state()
        run.train(3)
        newest = run.save().seq
    store = open_store(f"file://{tmp_path}/store")
    key = f"run/{entry_key(newest)}"
    store.put(key, store.get(key)[:-9])
    with ToyRun(tmp_path / "store") as again:
        assert (again.resumed.step, again.resumed.fell_back) == (3, True)
        message = f"the log cannot be followed past entry {newest}: "
        assert again.resumed.notes[0].startswith(message)
        assert [
            record for record in caplog.records if record.levelname == "WARNING" and message in record.message
        ]
        assert again.kinds("fell_back")[0]["why"].startswith(message)
        assert np.array_equal(again.state()["weights"], old["weights"])
        again.train(1)
        again.save()
    with ToyRun(tmp_path / "store") as healthy:
        assert (healthy.resumed.step, healthy.resumed.fell_back, healthy.resumed.notes) == (4, False, ())


def test_warm_start_from_damaged_run_is_reported(tmp_path: Path) -> None:
    """`from_run` reads the other run's log: the notes and the sidecar's metrics report its damage."""
    with ToyRun(tmp_path / "store", "other", keep_last=5) as other:
        other.train(3)
        other.save()
        other.train(1)
        newest = other.save().seq
    open_store(f"file://{tmp_path}/store").put(f"other/{entry_key(newest)}", b"")
    with ToyRun(tmp_path / "store", restore=False, metrics_port=0) as warm:
        restored = warm.ckpt.restore(from_run="other")
        assert (restored.step, restored.fell_back) == (3, True)
        assert f"past entry {newest}: " in restored.notes[0]
        ready = runtime_dir(warm.ckpt.url, "run") / "ready.json"
        port = json.loads(ready.read_text())["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b"\ndeltashard_log_damaged_total 1.0\n" in answer.read()


def test_run_with_unreadable_only_commit_is_not_restarted(tmp_path: Path) -> None:
    """`restore()` must not report that nothing was committed. The refusal is one error without a gRPC trace."""
    with ToyRun(tmp_path / "store") as run:
        run.train(3)
        newest = run.save().seq
    open_store(f"file://{tmp_path}/store").put(f"run/{entry_key(newest)}", b"")
    refused = ToyRun(tmp_path / "store", restore=False)
    with pytest.raises(deltashard.errors.RestoreFailed, match="cannot be followed past entry") as raised:
        refused.ckpt.restore()
    trace = "".join(traceback.format_exception(raised.value))
    assert "grpc" not in trace.lower().replace(str(Path(deltashard.__file__).parent).lower(), "")
    refused.__exit__()
    with ToyRun(tmp_path / "store", restore=False, fresh=True) as restarted:
        restarted.train(1)
        assert restarted.save().baseline


def test_run_with_checkpoints_requires_restore(tmp_path: Path) -> None:
    with ToyRun(tmp_path / "store") as run:
        run.train(2)
        run.save()
    with ToyRun(tmp_path / "store", restore=False) as fresh, pytest.raises(deltashard.errors.NotRestored):
        fresh.train(1)


def test_partially_restored_model_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start fails after its rows were loaded, and the program catches the error."""
    with ToyRun(tmp_path / "store", "source") as source:
        source.train(3)
        source.save()

    def lost(*_: object) -> None:
        raise deltashard.errors.RestoreFailed("the store is unavailable", where="test", remedy="")

    with ToyRun(tmp_path / "store", "target", restore=False) as target:
        with monkeypatch.context() as patched:
            patched.setattr(target.ckpt._restorer, "_apply", lost)
            with pytest.raises(deltashard.errors.RestoreFailed):
                target.ckpt.restore(from_run="source")
        with pytest.raises(deltashard.errors.NotRestored, match="matches no step"):
            target.train(1)
        assert newest_step(tmp_path / "store", "target") is None
        assert target.ckpt.restore(from_run="source") is not None
        target.train(1)
        target.save()
