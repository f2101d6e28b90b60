"""Save failures of other systems that deltashard avoids. A test's name contains the project and the issue."""

from __future__ import annotations

import os
import time
from pathlib import Path

import deltashard
import pytest
from deltashard.attach.launcher import runtime_dir
from deltashard_checkpoint.stores.url import open_store
from deltashard_sidecar.main import notify

from tests.incidents.toys import ToyRun, assert_holds, stored
from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import MinioServer


@pytest.mark.minio
def test_dlrover_1585_overlapping_save_keeps_uploading_blocks(own_minio: MinioServer) -> None:
    """A spot notice arrives during a hanging upload: steps stay fast, and the snapshot follows the upload."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        direct = open_store(url.replace(str(proxy.port), str(own_minio.port)))
        with ToyRun(url) as run:
            run.train(3)
            run.save()
            proxy.hang = True
            run.train(2)
            first = run.take_snapshot("first")
            at_first = run.state()
            socket = runtime_dir(url, "run") / "sidecar.sock"
            refused = len(run.kinds("save_failed"))
            assert notify(["--socket", str(socket), "--reason", "eviction"]) == 0
            began = time.monotonic()
            run.train(30)
            # A refused urgent snapshot would cost its step three seconds.
            assert time.monotonic() - began < 60.0
            assert len(run.kinds("save_failed")) == refused
            assert run.ckpt.steps == 35
            second = run.ckpt.save("second")
            at_second = run.state()
            proxy.release()
            for handle, step, state in ((first, 5, at_first), (second, 35, at_second)):
                commit = handle.wait(60)
                assert commit.step == step
                assert_holds(read_checkpoint(direct, "run", f"seq:{commit.seq}"), state)
            run.train(1)
            assert "eviction" in [facts["reason"] for facts in run.kinds("snapshot")]


def test_megatron_1435_sidecar_kill_is_survived_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar is killed during a save: training continues, a new sidecar starts, and the next save covers all rows.

    Differentials are consecutive: rows of the lost save that no later step touches are in no other save.
    """
    monkeypatch.setenv("DELTASHARD_CRASH_AT", "commit.before_log_put:2")
    with ToyRun(tmp_path / "store", differential="consecutive") as run:
        run.train(2)
        run.save()
        first = run.ckpt.sidecar_pid
        run.train(3)
        with pytest.raises(deltashard.SaveFailed):
            run.save()
        run.train(20)
        eventually(
            lambda: (run.train(1), run.kinds("attached"))[1], timeout_s=60, what="the library attached again"
        )
        assert run.ckpt.sidecar_pid != first
        assert run.kinds("sidecar_lost")
        assert run.kinds("save_failed")
        state_before = run.ckpt.steps
        commit = run.save()
        assert commit.step == state_before
        assert not commit.baseline
        assert_holds(stored(tmp_path / "store"), run.state())


@pytest.mark.minio
def test_nvrx_373_stalled_store_never_blocks_training(own_minio: MinioServer) -> None:
    """The store accepts connections and never answers: steps stay fast, and close() ends by its deadline."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        run = ToyRun(url, every_steps=2)
        run.train(3)
        run.save()
        proxy.hang = True
        run.train(60)
        assert run.ckpt.steps == 63
        assert len(run.kinds("snapshot")) >= 1
        began = time.monotonic()
        with pytest.raises(deltashard.SaveFailed):
            run.ckpt.close(deadline_s=3)
        assert time.monotonic() - began < 30
        proxy.release()


@pytest.mark.timeout(900)
def test_xtuner_1859_file_descriptors_are_constant_over_many_saves(tmp_path: Path) -> None:
    """After 60 saves neither the trainer nor its sidecar has more descriptors (the sidecar's tests do 200)."""

    def open_files(pid: int | None) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    with ToyRun(tmp_path / "store", encoding="q8", keep_last=2) as run:
        run.train(1)
        for _ in range(20):
            run.train(1)
            run.save()
        here, there = open_files(os.getpid()), open_files(run.ckpt.sidecar_pid)
        for _ in range(40):
            run.train(1)
            run.save()
        # The streams of the last save may still be ending.
        eventually(lambda: open_files(os.getpid()) <= here + 2, timeout_s=60, what="no more descriptors here")
        eventually(lambda: open_files(run.ckpt.sidecar_pid) <= there + 2, timeout_s=60, what="no more there")
