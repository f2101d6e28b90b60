"""Stores that are not ready: credentials and buckets that come later, a full store, one that is down or stalls."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.support.eventually import eventually
from tests.support.fake_model import Model, same
from tests.support.fake_trainer import SaveRefused, Trainer
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.fleet_server import Authority, FleetServer
from tests.support.server.minio_server import MinioServer
from tests.support.server.shared_mount import SharedMount, cannot_mount
from tests.support.sidecar.metric_page import blocks
from tests.support.sidecar.pod_flags import place, pod
from tests.support.sidecar_process import sidecar

DEADLINE_S = 90.0


@pytest.fixture
def server() -> Iterator[FleetServer]:
    with FleetServer(Authority()) as one:
        yield one


def credentials(path: Path, key: str, secret: str) -> None:
    """As the kubelet changes a mounted Secret: a whole new file, swapped in."""
    new = path.with_name("new")
    new.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
    new.rename(path)


def from_file(path: Path) -> dict[str, str | None]:
    """The environment of a sidecar whose store credentials are in a file."""
    return {
        "AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_SHARED_CREDENTIALS_FILE": str(path)
    }  # fmt: skip


def admin(minio: MinioServer) -> MinioAdmin:
    return MinioAdmin(
        endpoint=f"{minio.host}:{minio.port}",
        credentials=StaticProvider(minio.access_key, minio.secret_key),
        secure=False,
    )


@pytest.mark.minio
def test_a_secret_that_comes_later_is_used_without_a_restart(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """Absent: a condition, one incident that names the path, and an Open that waits; by its deadline it says the same."""
    path = tmp_path / "credentials"
    url = own_minio.url(own_minio.new_bucket())
    flags = pod(**server.flags(tmp_path))
    root = place(tmp_path, "impatient")
    with sidecar(root, url, environment=from_file(path), open_deadline_s=1, **flags) as process:
        trainer = Trainer(process.socket, Model())
        with pytest.raises(grpc.RpcError) as failed:
            trainer.open()
        assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert str(path) in failed.value.details()
        assert "create the Secret" in failed.value.details()
        trainer.close()
    root = place(tmp_path, "patient")
    with sidecar(root, url, environment=from_file(path), **flags) as process:
        trainer = Trainer(process.socket, Model())
        opening = trainer.stub.Open.future(
            pb.OpenRequest(session=trainer.reply.session, which="latest"), timeout=120
        )
        eventually(lambda: server.incidents(fleet.INCIDENT_KIND_CREDENTIALS_MISSING), timeout_s=DEADLINE_S)
        eventually(lambda: not server.last.pod.credentials_ok, timeout_s=DEADLINE_S, what="the condition")
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="it is not the store's fault")
        assert str(path) in server.incidents(fleet.INCIDENT_KIND_CREDENTIALS_MISSING)[-1].message
        assert not opening.done()
        credentials(path, own_minio.access_key, own_minio.secret_key)
        trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
        trainer.save_and_commit()
        eventually(lambda: server.last.pod.credentials_ok, timeout_s=DEADLINE_S, what="the condition ends")
        trainer.close()


class Identities:
    """An OpenID provider, as a cluster's API server is one for the tokens it projects: keys to read, tokens to sign."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        numbers = self._key.public_key().public_numbers()
        key = {
            "kty": "RSA",
            "kid": "1",
            "alg": "RS256",
            "use": "sig",
            "n": _b64(numbers.n),
            "e": _b64(numbers.e),
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = {"/.well-known/openid-configuration": outer.document(), "/keys": {"keys": [key]}}
                body = json.dumps(known.get(self.path, {})).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def document(self) -> dict[str, Any]:
        return {
            "issuer": self.url, "jwks_uri": f"{self.url}/keys", "authorization_endpoint": f"{self.url}/auth",
            "token_endpoint": f"{self.url}/token", "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"], "id_token_signing_alg_values_supported": ["RS256"],
        }  # fmt: skip

    def token(self) -> str:
        now = int(time.time())
        claims = {
            "iss": self.url, "sub": "system:serviceaccount:ns:train", "aud": "store", "iat": now,
            "exp": now + 3600, "policy": "readwrite",
        }  # fmt: skip
        head = {"alg": "RS256", "typ": "JWT", "kid": "1"}
        signed = ".".join(_b64(json.dumps(part).encode()) for part in (head, claims))
        return f"{signed}.{_b64(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _b64(data: bytes | int) -> str:
    raw = data.to_bytes((data.bit_length() + 7) // 8) if isinstance(data, int) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.mark.minio
def test_a_web_identity_token_that_comes_later(tmp_path: Path, server: FleetServer) -> None:
    """MinIO's own token service, real signed tokens: an absent and an empty file are waited for, then it saves."""
    with Identities() as identities:
        settings = {
            "MINIO_IDENTITY_OPENID_CONFIG_URL": f"{identities.url}/.well-known/openid-configuration",
            "MINIO_IDENTITY_OPENID_CLIENT_ID": "store",
        }
        minio = MinioServer(place(tmp_path, "minio"), settings=settings)
        minio.start()
        try:
            token = tmp_path / "web-token"
            environment: dict[str, str | None] = {
                "AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ENDPOINT_URL_STS": minio.endpoint, "AWS_ROLE_ARN": "arn:minio:iam:::role/unused",
            }  # fmt: skip
            root, url = place(tmp_path, "pod"), minio.url(minio.new_bucket())
            with sidecar(root, url, environment=environment, **pod(**server.flags(tmp_path))) as process:
                trainer = Trainer(process.socket, Model())
                opening = trainer.stub.Open.future(
                    pb.OpenRequest(session=trainer.reply.session, which="latest"), timeout=120
                )
                eventually(
                    lambda: server.reports and not server.last.pod.credentials_ok, timeout_s=DEADLINE_S
                )
                eventually(
                    lambda: server.incidents(fleet.INCIDENT_KIND_CREDENTIALS_MISSING), timeout_s=DEADLINE_S
                )
                assert str(token) in server.incidents(fleet.INCIDENT_KIND_CREDENTIALS_MISSING)[0].message
                token.touch()
                assert not opening.done()
                new = tmp_path / "web-token.new"
                new.write_text(identities.token())
                new.rename(token)
                trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
                trainer.save_and_commit()
                eventually(
                    lambda: server.last.pod.credentials_ok, timeout_s=DEADLINE_S, what="the condition ends"
                )
                trainer.close()
        finally:
            minio.stop()


@pytest.mark.minio
def test_rotated_credentials_are_picked_up(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """The old key stops to work, a save fails and says so, the new key is mounted: the next save holds everything."""
    manage = admin(own_minio)
    for user in ("first", "second"):
        manage.user_add(user, f"{user}-secret")
        manage.attach_policy(["readwrite"], user=user)
    path = tmp_path / "credentials"
    credentials(path, "first", "first-secret")
    url = own_minio.url(own_minio.new_bucket())
    flags = pod(**server.flags(tmp_path))
    with sidecar(tmp_path, url, environment=from_file(path), save_deadline_s=30, **flags) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.save_and_commit()
        manage.user_remove("first")
        trainer.model.train()
        with pytest.raises(SaveRefused, match="check key, secret and the policy of the bucket"):
            trainer.save_and_commit()
        eventually(
            lambda: [
                i for i in server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE) if i.cause == "denied"
            ],
            timeout_s=DEADLINE_S,
            what="denied",
        )
        eventually(lambda: not server.last.pod.store_ok, timeout_s=DEADLINE_S, what="the condition")
        assert server.last.pod.credentials_ok
        credentials(path, "second", "second-secret")
        trainer.model.train()
        state = trainer.model.state()
        commit = trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="well again")
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()


@pytest.mark.minio
def test_a_bucket_that_comes_later(tmp_path: Path, own_minio: MinioServer, server: FleetServer) -> None:
    """Open waits for it and says why meanwhile."""
    url = own_minio.url("made-later")
    with sidecar(tmp_path, url, **pod(**server.flags(tmp_path))) as process:
        trainer = Trainer(process.socket, Model())
        opening = trainer.stub.Open.future(
            pb.OpenRequest(session=trainer.reply.session, which="latest"), timeout=120
        )
        eventually(lambda: server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE), timeout_s=DEADLINE_S)
        eventually(lambda: not server.last.pod.store_ok, timeout_s=DEADLINE_S, what="the condition")
        one = server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)[0]
        assert one.cause == "bucket_missing"
        assert "create the bucket" in one.message
        assert not opening.done()
        own_minio.client().make_bucket("made-later")
        trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
        trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="the condition ends")
        trainer.close()


def test_a_directory_that_lets_it_in_later(tmp_path: Path, server: FleetServer) -> None:
    """A claim that is mounted and not the sidecar's user's: told with the user, waited for, and no restart is needed."""
    mount = tmp_path / "mount"
    mount.symlink_to("/sys/kernel")  # where not even root makes a directory
    url = f"file://{mount}/training"
    with sidecar(tmp_path, url, **pod(**server.flags(tmp_path))) as process:
        trainer = Trainer(process.socket, Model())
        opening = trainer.stub.Open.future(
            pb.OpenRequest(session=trainer.reply.session, which="latest"), timeout=120
        )
        eventually(lambda: server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE), timeout_s=DEADLINE_S)
        eventually(lambda: not server.last.pod.store_ok, timeout_s=DEADLINE_S, what="the condition")
        one = server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)[0]
        assert one.cause == "denied"
        assert url in one.message
        assert f"let user {os.geteuid()} read and write in the store's directory" in one.message
        assert not opening.done()
        (tmp_path / "volume").mkdir()
        (tmp_path / "next").symlink_to("volume")
        (tmp_path / "next").rename(mount)
        trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
        trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="the condition ends")
        trainer.close()


@pytest.mark.skipif(bool(cannot_mount()), reason=cannot_mount())
def test_a_mount_whose_server_is_away_costs_saves(tmp_path: Path) -> None:
    """Calls wait in the kernel: training goes on, the save ends by its deadline, the next one holds every row."""
    mount = SharedMount(tmp_path / "exported", tmp_path / "client", "-cache", "3")
    try:
        with sidecar(tmp_path, f"file://{mount.path}/store", encoding="fp32", save_deadline_s=5) as process:
            trainer = Trainer(process.socket, Model())
            trainer.open()
            trainer.save_and_commit()
            mount.signal(signal.SIGSTOP)
            trainer.model.train()
            with pytest.raises(SaveRefused, match="packs were not uploaded in time"):
                trainer.save_and_commit()
            mount.signal(signal.SIGCONT)
            trainer.model.train()
            state = trainer.model.state()
            commit = eventually(lambda: in_time(trainer), what="a save within its deadline")
            trainer.model.wipe()
            trainer.restore(commit.seq)
            assert same(trainer.model.state(), state)
            trainer.close()
    finally:
        mount.signal(signal.SIGCONT)
        mount.stop()


@pytest.mark.minio
def test_a_full_store_and_one_that_is_down(
    tmp_path: Path, own_minio: MinioServer, server: FleetServer
) -> None:
    """Clear words, nothing lost, and the next save after the cause is gone holds every row."""
    bucket = own_minio.new_bucket()
    url = own_minio.url(bucket)
    flags = pod(**server.flags(tmp_path))
    with sidecar(tmp_path, url, save_deadline_s=600, **flags) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.save_and_commit()
        manage = admin(own_minio)
        manage.bucket_quota_set(bucket, 1024)
        trainer.model.train()
        with pytest.raises(SaveRefused, match="raise the quota"):
            trainer.save_and_commit()
        eventually(
            lambda: [i for i in server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE) if i.cause == "full"],
            timeout_s=DEADLINE_S,
            what="full",
        )
        (one,) = (i for i in server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE) if i.cause == "full")
        assert "free space in the store, or raise the quota" in one.message
        manage.bucket_quota_clear(bucket)
        trainer.model.train()
        trainer.save_and_commit()
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="room again")
        own_minio.stop()
        trainer.model.train()
        state = trainer.model.state()
        number = trainer.save()
        eventually(lambda: not server.last.pod.store_ok, timeout_s=DEADLINE_S, what="down")
        eventually(
            lambda: server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)[-1].cause == "unavailable",
            timeout_s=DEADLINE_S,
            what="the incident is reported",
        )
        own_minio.start()
        eventually(lambda: number in trainer.commits, timeout_s=DEADLINE_S, what="committed by itself")
        eventually(lambda: server.last.pod.store_ok, timeout_s=DEADLINE_S, what="up again")
        seq = trainer.commits[number].seq
        trainer.model.wipe()
        trainer.restore(seq)
        assert same(trainer.model.state(), state)
        trainer.close()


@pytest.mark.minio
def test_store_down_training_goes_on(tmp_path: Path, own_minio: MinioServer) -> None:
    """Blocks keep moving, frames wait on disk, the save commits when the store is back."""
    url = own_minio.url(own_minio.new_bucket(), "prefix")
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.save_and_commit()
        own_minio.stop()
        trainer.model.train()
        state = trainer.model.state()
        number = trainer.save()
        eventually(lambda: blocks(process, "free") == 8, what="every block is free although nothing uploads")
        with pytest.raises(SaveRefused, match="busy"):
            trainer.begin()
        own_minio.start()
        commit = trainer.committed(number)
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()


def in_time(trainer: Trainer) -> pb.Commit | None:
    """The commit of a save; None where its deadline came first."""
    try:
        return trainer.save_and_commit()
    except SaveRefused as refused:
        if refused.cause not in {"unavailable", "deadline"}:
            raise
        return None


@pytest.mark.minio
def test_a_stalled_store_costs_one_save(tmp_path: Path, own_minio: MinioServer) -> None:
    """It fails by its deadline, the trainer hears of it, the next save covers; SIGTERM aborts by its own deadline."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        with sidecar(tmp_path, url, encoding="fp32", save_deadline_s=10, term_deadline_s=1) as process:
            trainer = Trainer(process.socket, Model())
            trainer.open()
            eventually(lambda: in_time(trainer), what="a save within its deadline")
            proxy.hang = True
            trainer.model.train()
            assert in_time(trainer) is None
            proxy.hang = False
            proxy.release()
            trainer.model.train()
            state = trainer.model.state()
            commit = eventually(lambda: in_time(trainer), what="a save within its deadline")
            trainer.model.wipe()
            trainer.restore(commit.seq)
            assert same(trainer.model.state(), state)
            proxy.hang = True
            trainer.save()
            assert process.terminate() == 0
            trainer.close()
            proxy.hang = False
            proxy.release()


@pytest.mark.minio
def test_a_restore_without_the_store_is_unavailable(tmp_path: Path, own_minio: MinioServer) -> None:
    """Never invalid: nothing was proven."""
    url = own_minio.url(own_minio.new_bucket())
    with sidecar(tmp_path, url, encoding="fp32", restore_deadline_s=10, cache_bytes="64MiB") as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        commit = trainer.save_and_commit()
        for path in (tmp_path / "cache").glob("*.pack"):
            path.unlink()
        own_minio.stop()
        with pytest.raises(SaveRefused, match="unavailable"):
            trainer.restore(commit.seq)
        own_minio.start()
        trainer.restore(commit.seq)
        trainer.close()
