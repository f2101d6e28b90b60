"""Sidecars as pods have them: which run is whose, who may go on, users that differ."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.eventually import eventually
from tests.support.fake_model import Model, same
from tests.support.fake_trainer import SaveRefused, Trainer
from tests.support.machine import limit_s
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.fleet_server import Authority, FleetServer
from tests.support.server.minio_server import MinioServer
from tests.support.sidecar.pod_flags import place, pod
from tests.support.sidecar_process import sidecar

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def server() -> Iterator[FleetServer]:
    with FleetServer(Authority()) as one:
        yield one


def state_of(url: str, run: str = "ns/job") -> RunState:
    return RunLog(open_store(url), run).refresh()


# Identity.


def test_numbered_pods_train_runs_of_their_own_where_they_are_told_to(tmp_path: Path, url: str) -> None:
    """Two pods of an Indexed Job, each alone: no key is shared, and each finds its own again, prefetched at Attach."""
    for index in ("0", "1"):
        with sidecar(place(tmp_path, index), url, **pod(index=index, runs="per-pod")) as process:
            trainer = Trainer(process.socket, Model(seed=int(index)))
            assert trainer.reply.run == f"ns/job-{index}"
            trainer.open()
            trainer.model.step = 10 + int(index)
            trainer.save_and_commit()
            trainer.close()
    keys = [info.key for info in open_store(url).list("")]
    assert {key.split("/")[1] for key in keys} == {"job-0", "job-1"}
    assert state_of(url, "ns/job-1").owner == "ns/job-1"
    again = place(tmp_path, "again")
    with sidecar(again, url, **pod(index="1", runs="per-pod", prefetch="yes")) as process:
        trainer = Trainer(process.socket, Model())
        eventually(lambda: list((again / "cache").glob("*.pack")), timeout_s=DEADLINE_S, what="prefetched")
        assert trainer.open().step == 11
        trainer.close()


def test_a_changed_world_size_renames_no_run(tmp_path: Path, url: str) -> None:
    """Two ranks in two pods, then one alone in one of them: it goes on with their run, where the workload lets it."""
    with sidecar(place(tmp_path, "a"), url, **pod(index="0", pods=2)) as process:
        with pytest.raises(
            grpc.RpcError, match="AloneAmongPods: .*number 0.*2 numbered pods.*runs: per-pod"
        ) as failed:
            Trainer(process.socket, Model())
        assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    with sidecar(place(tmp_path, "b"), url, **pod(index="1", pods=2, runs="one")) as process:
        trainer = Trainer(process.socket, Model())
        assert trainer.reply.run == "ns/job"
        trainer.open()
        trainer.model.step = 7
        trainer.save_and_commit()
        trainer.close()
    assert state_of(url).newest() is not None


# Owners.


def test_two_live_workloads_of_one_run_end_in_one(tmp_path: Path, url: str) -> None:
    """The later one has it; the earlier one is told for good, and a restart of it fences nobody."""
    with (
        sidecar(place(tmp_path, "a"), url, **pod("job-a")) as first,
        sidecar(place(tmp_path, "b"), url, **pod("job-b")) as second,
    ):
        earlier = Trainer(first.socket, Model())
        earlier.open()
        earlier.save_and_commit()
        later = Trainer(second.socket, Model())
        opened = later.open()
        assert opened.HasField("resume_seq")
        with pytest.raises(SaveRefused, match="taken_over: .*job-b") as refused:
            earlier.save_and_commit()
        assert refused.value.cause == "taken_over"
        eventually(lambda: earlier.fenced, what="the notice")
        with pytest.raises(SaveRefused, match="taken_over"):
            earlier.begin()
        for _ in range(3):
            earlier.attach()
            with pytest.raises(grpc.RpcError, match="TakenOver: .*takeover=True") as failed:
                earlier.open()
            assert failed.value.code() == grpc.StatusCode.ABORTED
        later.save_and_commit()
        assert state_of(url).attempt == opened.attempt
        assert earlier.open(takeover=True).attempt > opened.attempt
        earlier.save_and_commit()
        earlier.close()
        later.close()


def test_a_pod_that_comes_back_after_its_replacement_stays_fenced(tmp_path: Path, url: str) -> None:
    """A lost node's zombie: fenced at its save, and its container's restarts open nothing."""
    with (
        sidecar(place(tmp_path, "a"), url, **pod(**{"pod-uid": "one"})) as zombie,
        sidecar(place(tmp_path, "b"), url, **pod(**{"pod-uid": "two"})) as replacement,
    ):
        old = Trainer(zombie.socket, Model())
        old.open()
        old.save_and_commit()
        new = Trainer(replacement.socket, Model())
        attempt = new.open().attempt
        with pytest.raises(SaveRefused) as refused:
            old.save_and_commit()
        assert refused.value.cause == "fenced"
        for _ in range(2):
            old.attempt = None
            old.attach()
            with pytest.raises(grpc.RpcError, match="FencedError: .*another pod"):
                old.open()
        new.save_and_commit()
        assert state_of(url).attempt == attempt
        old.close()
        new.close()


# A pod that goes, and the one that takes its place.


@pytest.mark.minio
def test_the_next_pod_waits_for_the_last_save_of_the_one_that_goes(
    tmp_path: Path, own_minio: MinioServer
) -> None:
    """Told to stop, cut urgently, upload slowly: the next pod's Open waits, and resumes from that very cut."""
    bucket = own_minio.new_bucket()
    direct = own_minio.url(bucket)
    with (
        FaultyProxy(own_minio.port) as slow,
        sidecar(
            place(tmp_path, "old"), own_minio.url(bucket, port=slow.port), **pod(term_deadline_s=60)
        ) as old,
        sidecar(place(tmp_path, "new"), direct, **pod()) as new,
    ):
        trainer = Trainer(old.socket, Model())
        trainer.open()
        trainer.model.step = 5
        trainer.save_and_commit()
        trainer.model.train()
        trainer.stub.Notify(pb.NotifyRequest(reason="stopping", deadline_s=60), timeout=60)
        store = open_store(direct)
        eventually(lambda: list(store.list("ns/job/closing/")), timeout_s=DEADLINE_S, what="the marker")
        slow.hang = True
        number = trainer.save(reason="urgent", urgent=True)
        state = trainer.model.state()
        trainer.close()
        old.signal(signal.SIGTERM)
        fresh = Trainer(new.socket, Model())
        opening = fresh.stub.Open.future(
            pb.OpenRequest(session=fresh.reply.session, which="latest"), timeout=120
        )
        with pytest.raises(AssertionError, match="not within"):
            eventually(opening.done, within_s=2.0)
        assert old.poll() is None
        slow.hang = False
        slow.release()
        reply = opening.result(timeout=DEADLINE_S)
        assert old.died() == 0
        assert (reply.step, reply.resume_attempt) == (6, 1)
        assert reply.cut == number
        assert reply.waited_s > 0.0
        assert not list(store.list("ns/job/closing/"))
        fresh.attempt = reply.attempt
        fresh.model.wipe()
        fresh.restore(reply.resume_seq)
        assert same(fresh.model.state(), state)
        fresh.close()


def test_a_marker_goes_with_the_trainer_that_never_cut(tmp_path: Path, url: str) -> None:
    """Told to stop and gone before the urgent cut: the next pod does not wait for nothing."""
    with sidecar(tmp_path, url, **pod(every_s=0.2)) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        store = open_store(url)
        for gone in ("detached", "killed"):
            trainer.save_and_commit()
            # The timer has come by, so the sidecar has seen this trainer alive.
            eventually(lambda: trainer.arena.line(0)[SAVE_AT_STEP] != NEVER, timeout_s=DEADLINE_S)
            trainer.stub.Notify(pb.NotifyRequest(reason="stopping", deadline_s=60), timeout=60)
            eventually(lambda: list(store.list("ns/job/closing/")), timeout_s=DEADLINE_S, what="the marker")
            if gone == "detached":
                trainer.detach()
                trainer.attach()
                trainer.open()
            else:
                trainer.close()
            eventually(lambda: not list(store.list("ns/job/closing/")), timeout_s=DEADLINE_S, what=gone)


def test_how_often_a_workload_opened_its_run_is_told(tmp_path: Path, url: str, server: FleetServer) -> None:
    """Not the attempt's number, which is its slot in the log: commits lie between; nor another workload's attempts."""
    with sidecar(place(tmp_path, "a"), url, **pod("w-0", **server.flags(tmp_path))) as process:
        other = Trainer(process.socket, Model())
        other.open()
        other.save_and_commit()
        other.close()
    with sidecar(place(tmp_path, "b"), url, **pod("w-1", **server.flags(tmp_path))) as process:
        for openings in (1, 2, 3):
            trainer = Trainer(process.socket, Model())
            attempt = trainer.open(takeover=True).attempt
            trainer.save_and_commit()
            eventually(
                lambda attempt=attempt, openings=openings: (
                    (server.last.pod.attempt, server.last.run.openings) == (attempt, openings)
                ),
                timeout_s=DEADLINE_S,
                what=lambda openings=openings: f"{openings} openings: {server.last}",
            )
            trainer.close()
        assert attempt > 3


# Users that differ.

SIDECAR_USER, TRAINER_USER, SHARED_GROUP = 65532, 1234, 65531
LOCKED = """
set -eu
python=$1 hidden=$2 spare=$3; shift 3
if [ -n "$hidden" ]; then  # an interpreter in a home directory: nothing but it is seen of that
    mount --bind "$python" "$spare"
    mount -t tmpfs -o mode=755 tmpfs "$hidden"
    mkdir -p "$python"
    mount --move "$spare" "$python"
fi
mount -o remount,bind,ro /
exec "$@"
"""
"""Runs in a mount namespace of its own: a root that cannot be written, an interpreter that others may run."""
TRAINER = """
import sys, os, signal
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.fake_model import Model
from tests.support.fake_trainer import Trainer
from tests.support.eventually import eventually
t = Trainer(Path(sys.argv[1]), Model())
opened = t.open()
if opened.HasField("resume_seq"):
    t.model.wipe()
    t.restore(opened.resume_seq)
print(os.getuid(), t.model.step, flush=True)
t.model.train(); t.stepped()
eventually(lambda: t.urgent, timeout_s=90)
commit = t.save_and_commit(reason="urgent", urgent=True)
print("committed", commit.step, flush=True)
eventually(lambda: False, within_s=90)
"""


def _may_mount() -> bool:
    probe = ["unshare", "--mount", "true"]
    return (
        os.getuid() == 0
        and bool(shutil.which("unshare"))
        and subprocess.run(probe, check=False).returncode == 0
    )


@pytest.mark.skipif(not _may_mount(), reason="only root, with mounts of its own, can make such a pod")
def test_a_trainer_of_another_user_with_the_shared_group(tmp_path: Path) -> None:
    """A pod's volume, a read-only root, two users and one group: hook, urgent cut, restart of the trainer, SIGTERM."""
    base = Path("/dev/shm") / f"deltashard-test-{os.getpid()}"
    volume, cache, store, spare = base / "run", base / "cache", base / "store", base / "spare"
    for path in (base, volume, cache, store, spare):
        path.mkdir()
    hidden = next((d for d in reversed(Path(sys.base_prefix).parents) if not d.stat().st_mode & 0o001), "")
    locked = ["unshare", "--mount", "--propagation", "private", "sh", "-c", LOCKED, "locked",
              sys.base_prefix, str(hidden), str(spare)]  # fmt: skip
    volume.chmod(0o1777)
    for path in (cache, store):
        os.chown(path, SIDECAR_USER, SHARED_GROUP)
    environment = {
        "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(cache), "TMPDIR": str(cache),
        "DELTASHARD_URL": f"file://{store}", "DELTASHARD_RUN": "ns/job",
        "DELTASHARD_OWNER": "ns/job", "DELTASHARD_WORKLOAD_UID": "w-1", "DELTASHARD_DIR": str(volume),
        "DELTASHARD_SOCKET": f"{volume}/sidecar.sock", "DELTASHARD_CACHE_DIR": f"{cache}/packs",
        "DELTASHARD_ARENA_BYTES": "64MiB", "DELTASHARD_CACHE_BYTES": "512MiB", "DELTASHARD_TERM_DEADLINE_S": "10",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip

    def user(number: int, group: int, *more: int) -> list[str]:
        groups = ["--groups", ",".join(map(str, more))] if more else ["--clear-groups"]
        who = ["setpriv", "--reuid", str(number), "--regid", str(group), *groups]
        return [*locked, *who, "--inh-caps", "-all", "--no-new-privs", sys.executable]

    main = [*user(SIDECAR_USER, SHARED_GROUP), "-m", "deltashard_sidecar.main"]
    training = ["-c", TRAINER, str(volume / "sidecar.sock"), str(ROOT)]
    settings: dict[str, Any] = {"env": environment, "cwd": "/", "text": True}
    started: list[subprocess.Popen[str]] = []

    log = base / "log"

    def start(argv: list[str], *, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        one = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, **settings)
        started.append(one)
        return one

    def health() -> bool:
        return subprocess.run([*main, "health"], check=False, **settings).returncode == 0

    def notified() -> int:
        return log.read_text().count('"notified"')

    def notify() -> bool:
        """Run the hook, which gives up, and says nothing, where the sidecar is too busy to answer; whether it heard."""
        before, began_s = notified(), time.monotonic()
        hook = [*main, "notify", "--reason", "stopping", "--deadline-s", "20"]
        assert subprocess.run(hook, check=False, **settings).returncode == 0
        assert time.monotonic() - began_s < limit_s(30.0)
        return notified() > before

    try:
        written = subprocess.run([*locked, "touch", str(ROOT / "written")], check=False, capture_output=True)
        assert b"Read-only" in written.stderr
        with log.open("w") as stderr:
            process = start([*main, "serve"], stderr=stderr)
        ready = volume / "ready.json"

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            return ready.exists() and json.loads(ready.read_text())["pid"] == process.pid

        eventually(serves, timeout_s=DEADLINE_S, what="the sidecar serves")
        eventually(health, what="healthy")
        for path in (volume / "arena", volume / "sidecar.sock"):
            found = path.stat()
            assert (found.st_uid, found.st_gid) == (SIDECAR_USER, SHARED_GROUP)
            assert found.st_mode & 0o007 == 0, f"{path} is open to everybody"
            assert found.st_mode & 0o060 == 0o060, f"{path} is closed to the group"
        outsider = subprocess.run(
            [*user(TRAINER_USER, TRAINER_USER), *training], capture_output=True, check=False, **settings
        )
        assert outsider.returncode != 0, "without the group there is no way in"
        for step in (0, 1):
            trainer = start([*user(TRAINER_USER, TRAINER_USER, SHARED_GROUP), *training])
            assert trainer.stdout is not None
            said = trainer.stdout.readline()
            assert said == f"{TRAINER_USER} {step}\n", said + (
                trainer.stderr.read() if trainer.stderr else ""
            )
            eventually(notify, what="the sidecar hears of the hook")
            assert trainer.stdout.readline() == f"committed {step + 1}\n"
            trainer.kill()
            trainer.communicate()
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, log.read_text()
        assert state_of(f"file://{store}").newest().step == 2  # type: ignore[union-attr]
    finally:
        for one in started:
            one.kill()
            one.communicate()
        shutil.rmtree(base)
