"""A real sidecar process and a small trainer: start and end, attachments, fencing, the cache and its maintenance."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.user_entry import pin, rewind
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import main
from deltashard_sidecar.main import EXIT_ALREADY_RUNNING

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, same
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.sidecar.training import training
from tests.support.sidecar_process import SidecarProcess, sidecar

ROOT = Path(__file__).parents[3]


def test_command_line(tmp_path: Path, url: str) -> None:
    """The checks cover empty stdout, ready.json, health, notify, one owner for each directory, and SIGTERM."""
    command = [sys.executable, "-m", "deltashard_sidecar.main"]
    flags = ["--url", url, "--run", "r", "--dir", str(tmp_path / "d"), "--cache-dir", str(tmp_path / "c")]
    flags += ["--arena-bytes", "32MiB", "--metrics-port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        first = subprocess.Popen([*command, "serve", *flags], stdout=subprocess.PIPE, stderr=stderr)
    try:
        ready = tmp_path / "d/ready.json"
        eventually(ready.exists)
        facts = json.loads(ready.read_text())
        assert facts["pid"] == first.pid
        assert set(facts) == {"pid", "epoch", "metrics_port", "protocol"}
        socket = ["--socket", str(tmp_path / "d/sidecar.sock")]
        eventually(
            lambda: subprocess.run([*command, "health", *socket], check=False).returncode == 0, what="healthy"
        )

        def notified() -> bool:
            """Return whether the sidecar got the notification.

            The hook gives up without output when the sidecar is busy.
            """
            hook = [*command, "notify", "--reason", "eviction", *socket]
            assert subprocess.run(hook, check=False).returncode == 0
            return '"trainers.notified"' in log.read_text()

        eventually(notified, what="the sidecar logs the notification")
        second = subprocess.run([*command, "serve", *flags], capture_output=True, check=False)
        assert second.returncode == EXIT_ALREADY_RUNNING
        assert json.loads(ready.read_text())["pid"] == first.pid
        first.terminate()
        out, _ = first.communicate(timeout=60)
        assert (first.returncode, out) == (0, b"")
        assert all(json.loads(line)["run"] == "r" for line in log.read_text().splitlines())
        assert not ready.exists()
        assert not (tmp_path / "d/sidecar.sock").exists()
        assert subprocess.run([*command, "health", *socket], check=False).returncode == 1
    finally:
        first.kill()
        first.communicate()


def test_hung_sidecar_is_unhealthy(process: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket still accepts connections. The health check requires progress of the main loop."""
    monkeypatch.setattr(main, "STALE_S", 1.0)

    def healthy() -> bool:
        return main.health(["--socket", str(process.socket)]) == 0

    eventually(healthy, what="the sidecar is healthy")
    process.signal(signal.SIGSTOP)
    try:
        eventually(lambda: not healthy(), what="the stopped sidecar is unhealthy")
    finally:
        process.signal(signal.SIGCONT)
    eventually(healthy, what="the continued sidecar is healthy")


def test_killed_trainer_is_detached(tmp_path: Path, url: str) -> None:
    """The trainer's lock and stream end with the process. A lingering sidecar exits without attached trainers."""
    code = (
        "import sys,os,signal;from pathlib import Path;from tests.support.fake_trainer import FakeModel,Trainer;"
        "t=Trainer(Path(sys.argv[1]),FakeModel());t.open();os.kill(os.getpid(),signal.SIGKILL)"
    )
    with sidecar(tmp_path, url, encoding="fp32", linger_s=15) as process:
        killed = subprocess.run([sys.executable, "-c", code, process.socket], cwd=ROOT, check=False)
        assert killed.returncode == -signal.SIGKILL
        trainer = Trainer(process.socket, FakeModel())
        assert trainer.open().attempt > 1
        trainer.detach()
        trainer.close()
        assert process.wait_exit() == 0


def test_attach_refuses_unsupported_request(process: SidecarProcess, tmp_path: Path) -> None:
    model = FakeModel()
    good = Trainer(process.socket, model)
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, rank=3, world_size=2)
    with pytest.raises(grpc.RpcError, match="rank 3 of world size 2"):
        good.stub.Attach(request)
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, world_size=1, local_rank=1, blob_bytes=1 << 40)
    with pytest.raises(grpc.RpcError, match="arena .* and the cache .* hold"):
        good.stub.Attach(request)
    good.close()
    group = [Trainer(process.socket, model, rank=rank, world_size=3) for rank in range(2)]
    with pytest.raises(grpc.RpcError, match="too few for 3 trainers"):
        Trainer(process.socket, model, rank=2, world_size=3)
    for each in group:
        each.close()


def test_rank_belongs_to_one_process(process: SidecarProcess, trainer: Trainer) -> None:
    """The error for a second live process names the first.

    The same process may attach again, which ends its old session.
    """
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, world_size=1, pid=os.getpid() + 1)
    with pytest.raises(grpc.RpcError, match=f"process {os.getpid()} trains as local rank 0"):
        trainer.stub.Attach(request, timeout=60)
    old = trainer.reply.session
    trainer.attach()
    with pytest.raises(grpc.RpcError, match="UnknownSession"):
        trainer.stub.Detach(pb.DetachRequest(session=old))
    trainer.save_and_commit()


def test_invalid_checkpoint_is_reported_and_excluded(tmp_path: Path, url: str) -> None:
    """Stored bits are flipped. The restore fails as invalid, and the next attempt restores the older checkpoint."""
    with training(tmp_path, url, encoding="fp32", differential="full") as (_, trainer):
        good = trainer.save_and_commit()
        state = trainer.model.state()
        trainer.model.train()
        bad = trainer.save_and_commit()
    shutil.rmtree(tmp_path / "cache")
    for pack in (tmp_path / "store/run/data" / f"{bad.attempt:020d}" / f"{bad.snapshot_id:08d}").glob(
        "*.pack"
    ):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
    with sidecar(tmp_path, url, encoding="fp32") as process:
        trainer = Trainer(process.socket, FakeModel())
        assert trainer.open().resume_seq == bad.seq
        with pytest.raises(SaveStreamFailed, match="invalid"):
            trainer.restore(bad.seq)
        opened = trainer.open(exclude_seqs=[bad.seq])
        assert (opened.resume_seq, opened.fell_back) == (good.seq, True)
        trainer.assert_restores(good.seq, state)
        trainer.save_and_commit()
        trainer.close()


def warm_start_error(root: Path, url: str, source: str, **options: object) -> str:
    """Return the error of opening run `warm` from a checkpoint of `source`, or an empty string."""
    with sidecar(root, url, encoding="fp32", run="warm", restore_from=source) as process:
        trainer = Trainer(process.socket, FakeModel())
        try:
            trainer.open(**options)
        except grpc.RpcError as error:
            return str(error.details())
        finally:
            trainer.close()
    return ""


def test_warm_start_uses_source_checkpoint_or_fails(tmp_path: Path, url: str) -> None:
    """A missing or contradictory source is an error, and no run begins. A run with its own log resumes from it."""
    with training(tmp_path, url, encoding="fp32", run="source") as (_, trainer):
        trainer.model.train()
        commit = trainer.save_and_commit()
        pin(RunLog(open_store(url), "source"), "best", f"seq:{commit.seq}")
        state = trainer.model.state()
        trainer.model.train()
        trainer.save_and_commit()
    error = warm_start_error(tmp_path, url, "missing")
    assert "cannot begin with latest of run 'missing': there is no such run in the store" in error
    error = warm_start_error(tmp_path, url, "source@worst")
    assert "cannot begin with pin:worst of run 'source': no live, valid checkpoint pin:worst" in error
    assert "restore(from_run='source')" in warm_start_error(tmp_path, url, "source@best", from_run="source")
    assert "fresh=True" in warm_start_error(tmp_path, url, "source@best", which="none")
    assert list(open_store(url).list("warm/")) == []

    with sidecar(tmp_path, url, encoding="fp32", run="warm", restore_from="source@best") as process:
        trainer = Trainer(process.socket, FakeModel())
        opened = trainer.open()
        assert (opened.step, opened.resume_attempt) == (commit.step, 1)
        trainer.restore(opened.resume_seq)
        assert same(trainer.model.state(), state)
        own = trainer.save_and_commit()
        trainer.close()
        trainer = Trainer(process.socket, FakeModel())
        assert trainer.open(from_run="source").HasField("resume_seq"), (
            "the run has a log, so the script's from_run does not conflict"
        )
        assert trainer.open().resume_seq == own.seq
        trainer.close()


def test_run_size_is_bounded(tmp_path: Path, url: str) -> None:
    """Retention runs after commits, and gc after its grace period. Retained checkpoints restore."""
    flags = {
        "encoding": "fp32",
        "differential": "full",
        "maintenance-interval-s": 0,
        "gc-grace-s": 0,
        "keep-last": 2,
    }
    with training(tmp_path, url, **flags) as (_, trainer):
        for _ in range(8):
            trainer.model.train()
            commit = trainer.save_and_commit()
        state = trainer.model.state()

        def settled() -> bool:
            live = RunLog(open_store(url), "run").refresh().checkpoints
            snapshots = {info.key.rpartition("/")[0] for info in open_store(url).list("run/data/")}
            return len(live) == 2 and len(snapshots) <= 3

        eventually(settled, what="old checkpoints are deleted")
        trainer.assert_restores(commit.seq, state)


def test_fenced_sidecar_stops_maintenance(tmp_path: Path, url: str) -> None:
    """A user rewinds while a trainer holds the run, whose sidecar must not retire the detached checkpoints.

    The first commit's maintenance round runs immediately, and the next one after the pause: before the rewind, or, on a
    fast machine, after it.
    """
    flags = {
        "encoding": "fp32",
        "differential": "full",
        "maintenance-interval-s": 3,
        "gc-grace-s": 0,
        "metrics-port": 0,
    }
    with training(tmp_path, url, **flags) as (process, trainer):
        first = trainer.save_and_commit()
        for _ in range(2):
            trainer.model.train()
            newest = trainer.save_and_commit()
        log = RunLog(open_store(url), "run")
        assert rewind(log, f"seq:{first.seq}", ended=True) is not None
        counted = re.compile(r'^deltashard_maintenance_total\{.*task="gc"\} (\S+)', re.MULTILINE)
        eventually(
            lambda: sum(map(float, counted.findall(process.metrics_page()))) > 1,
            what="the maintenance round of the last commits",
        )
        state = log.refresh()
        assert state.newest().seq == first.seq
        assert newest.seq in state.detached
        assert newest.seq in state.checkpoints


def test_sigterm_finishes_staged_save(tmp_path: Path, url: str) -> None:
    """The trainer has exited. The staged save is committed before the process ends, and the marker is removed."""
    process = SidecarProcess(tmp_path, url, encoding="fp32", term_deadline_s=60)
    trainer = Trainer(process.socket, FakeModel(rows=100_000))
    trainer.open()
    number = trainer.save()
    assert process.terminate() == 0
    newest = RunLog(open_store(url), "run").refresh().newest()
    assert newest.snapshot_id == number
    assert not list(open_store(url).list("run/closing/"))
    trainer.close()
