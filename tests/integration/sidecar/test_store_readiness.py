"""Stores that are not ready: late credentials and buckets, a full store, an outage, a stall."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.fleet_server import FleetServer
from tests.support.server.minio_server import MinioServer
from tests.support.server.minio_user import admin_of
from tests.support.server.shared_mount import SharedMount, mount_error
from tests.support.sidecar.training import pod, runtime_dir, training
from tests.support.sidecar_process import SidecarProcess, sidecar

DEADLINE_S = 90.0


def credentials(path: Path, key: str, secret: str) -> None:
    new = path.with_name("new")
    new.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
    new.rename(path)


def from_file(path: Path) -> dict[str, str | None]:
    """Return the environment of a sidecar whose store credentials are in a file."""
    return {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "AWS_SHARED_CREDENTIALS_FILE": str(path),
    }


def commit_in_time(trainer: Trainer) -> pb.Commit | None:
    try:
        return trainer.save_and_commit()
    except SaveStreamFailed as refused:
        if refused.cause not in {"unavailable", "deadline"}:
            raise
        return None


@contextmanager
def delayed_open(
    process: SidecarProcess, server: FleetServer, kind: fleet.IncidentKind, condition: str
) -> Iterator[fleet.Incident]:
    """Yield the incident of a waiting Open. The block repairs the cause, and then the trainer saves."""
    trainer = Trainer(process.socket, FakeModel())
    request = pb.OpenRequest(session=trainer.reply.session, which="latest")
    opening = trainer.stub.Open.future(request, timeout=120)
    eventually(lambda: server.incidents(kind))
    eventually(lambda: not getattr(server.last.pod, condition), what="the condition")
    assert not opening.done()
    yield server.incidents(kind)[-1]
    trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
    trainer.save_and_commit()
    eventually(lambda: getattr(server.last.pod, condition), what="the condition ends")
    trainer.close()


@pytest.mark.minio
def test_late_secret_is_used_without_restart(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """The absent Secret causes one condition, one incident with the path, and an Open that waits until its deadline."""
    path = tmp_path / "credentials"
    url = own_minio.url(own_minio.new_bucket())
    flags = pod(**server.flags(tmp_path))
    root = runtime_dir(tmp_path, "impatient")
    with sidecar(root, url, environment=from_file(path), open_deadline_s=1, **flags) as process:
        trainer = Trainer(process.socket, FakeModel())
        with pytest.raises(grpc.RpcError, match=f"{path}.*create the Secret") as failed:
            trainer.open()
        assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED
        trainer.close()
    root, kind = runtime_dir(tmp_path, "patient"), fleet.INCIDENT_KIND_CREDENTIALS_MISSING
    with sidecar(root, url, environment=from_file(path), **flags) as process:
        with delayed_open(process, server, kind, "credentials_ok") as incident:
            assert str(path) in incident.message
            eventually(lambda: server.last.pod.store_ok, what="store_ok remains")
            credentials(path, own_minio.access_key, own_minio.secret_key)


@pytest.mark.minio
def test_rotated_credentials_are_picked_up(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """The old key expires and a save fails with a message. With the new key mounted, the next save holds all rows."""
    manage = admin_of(own_minio)
    for user in ("first", "second"):
        manage.user_add(user, f"{user}-secret")
        manage.attach_policy(["readwrite"], user=user)
    path = tmp_path / "credentials"
    credentials(path, "first", "first-secret")
    url = own_minio.url(own_minio.new_bucket())
    flags = pod(**server.flags(tmp_path))
    with training(tmp_path, url, environment=from_file(path), save_deadline_s=30, **flags) as (_, trainer):
        trainer.save_and_commit()
        manage.user_remove("first")
        trainer.model.train()
        with pytest.raises(SaveStreamFailed, match="check key, secret and the policy of the bucket"):
            trainer.save_and_commit()
        eventually(lambda: not server.last.pod.store_ok, what="the condition")
        assert server.last.pod.credentials_ok
        credentials(path, "second", "second-secret")
        trainer.model.train()
        state = trainer.model.state()
        commit = trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, what="store_ok is true")
        assert "denied" in {i.cause for i in server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)}
        trainer.assert_restores(commit.seq, state)


@pytest.mark.parametrize("store", [pytest.param("bucket", marks=pytest.mark.minio), "directory"])
def test_open_waits_for_late_store(
    tmp_path: Path, store: str, server: FleetServer, request: pytest.FixtureRequest
) -> None:
    """The bucket is missing, or the mounted claim belongs to another user. Open waits and reports the reason."""
    repair: Callable[[], object]
    if store == "bucket":
        minio = request.getfixturevalue("own_minio")
        url, cause, message = minio.url("made-later"), "bucket_missing", "create the bucket"
        repair = lambda: minio.client().make_bucket("made-later")  # noqa: E731
    else:
        mount = tmp_path / "mount"
        mount.symlink_to("/sys/kernel")  # where even root cannot create a directory
        (tmp_path / "volume").mkdir()
        (tmp_path / "next").symlink_to("volume")
        url, cause = f"file://{mount}/training", "denied"
        message = f"let user {os.geteuid()} read and write in the store's directory"
        repair = lambda: (tmp_path / "next").rename(mount)  # noqa: E731
    with sidecar(tmp_path, url, **pod(**server.flags(tmp_path))) as process:
        with delayed_open(process, server, fleet.INCIDENT_KIND_STORE_UNAVAILABLE, "store_ok") as incident:
            assert incident.cause == cause
            assert message in incident.message
            repair()


@pytest.mark.skipif(bool(mount_error()), reason=mount_error())
def test_unreachable_mount_fails_saves_only(tmp_path: Path) -> None:
    """Calls block in the kernel.

    Training continues, the save ends at its deadline, and the next one holds every row.
    """
    mount = SharedMount(tmp_path / "exported", tmp_path / "client", "-cache", "3")
    try:
        with training(tmp_path, f"file://{mount.path}/store", encoding="fp32", save_deadline_s=5) as (
            _,
            trainer,
        ):
            trainer.save_and_commit()
            mount.signal(signal.SIGSTOP)
            trainer.model.train()
            with pytest.raises(SaveStreamFailed, match="packs were not uploaded in time"):
                trainer.save_and_commit()
            mount.signal(signal.SIGCONT)
            trainer.model.train()
            state = trainer.model.state()
            commit = eventually(lambda: commit_in_time(trainer), what="a save within its deadline")
            trainer.assert_restores(commit.seq, state)
    finally:
        mount.signal(signal.SIGCONT)
        mount.stop()


@pytest.mark.minio
def test_save_survives_full_and_unavailable_store(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """The error is reported. Blocks are released, frames wait on disk, and the save commits later."""
    bucket, kind = own_minio.new_bucket(), fleet.INCIDENT_KIND_STORE_UNAVAILABLE
    flags = pod(**server.flags(tmp_path), save_deadline_s=600, metrics_port=0)
    with training(tmp_path, own_minio.url(bucket, "prefix"), **flags) as (process, trainer):
        trainer.save_and_commit()
        manage = admin_of(own_minio)
        manage.bucket_quota_set(bucket, 1024)
        trainer.model.train()
        with pytest.raises(SaveStreamFailed, match="raise the quota"):
            trainer.save_and_commit()
        full = lambda: [i for i in server.incidents(kind) if i.cause == "full"]  # noqa: E731
        eventually(full, what="full")
        (one,) = full()
        assert "free space in the store, or raise the quota" in one.message
        manage.bucket_quota_clear(bucket)
        trainer.model.train()
        trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, what="store_ok is true")
        own_minio.stop()
        trainer.model.train()
        state = trainer.model.state()
        number = trainer.save()
        eventually(lambda: process.blocks("free") == 8, what="every block is free although nothing uploads")
        with pytest.raises(SaveStreamFailed, match="busy"):
            trainer.begin()
        eventually(lambda: not server.last.pod.store_ok, what="store_ok is false")
        down = lambda: server.incidents(kind)[-1].cause == "unavailable"  # noqa: E731
        eventually(down, what="the incident is reported")
        own_minio.start()
        commit = trainer.committed(number)
        eventually(lambda: server.last.pod.store_ok, what="store_ok is true")
        trainer.assert_restores(commit.seq, state)


@pytest.mark.minio
def test_stalled_store_does_not_block_shutdown(tmp_path: Path, own_minio: MinioServer) -> None:
    """SIGTERM aborts a hung save at its own deadline."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        with training(tmp_path, url, encoding="fp32", term_deadline_s=1) as (process, trainer):
            proxy.hang = True
            trainer.save()
            assert process.terminate() == 0
            proxy.release()


@pytest.mark.minio
def test_restore_without_store_is_unavailable(tmp_path: Path, own_minio: MinioServer) -> None:
    """The checkpoint is not classified as invalid, because nothing was verified."""
    url = own_minio.url(own_minio.new_bucket())
    with training(tmp_path, url, encoding="fp32", restore_deadline_s=10, cache_bytes="64MiB") as (_, trainer):
        commit = trainer.save_and_commit()
        for path in (tmp_path / "cache").glob("*.pack"):
            path.unlink()
        own_minio.stop()
        with pytest.raises(SaveStreamFailed, match="unavailable"):
            trainer.restore(commit.seq)
        own_minio.start()
        trainer.restore(commit.seq)
