"""Sidecars as pods have them: which run is whose, who may go on, stores that are not ready, users that differ."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
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
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.support.eventually import eventually
from tests.support.fake_trainer import Model, SaveRefused, SidecarProcess, Trainer, same, sidecar
from tests.support.machine import limit_s
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.fleet_server import Authority, FleetServer
from tests.support.server.minio_server import MinioServer

DEADLINE_S = 90.0
SCRIPT_S = 400.0
"""For a process that imports torch on a busy machine."""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority) -> Iterator[FleetServer]:
    with FleetServer(authority) as one:
        yield one


def pod(workload: str = "w-1", **more: object) -> dict[str, Any]:
    """Flags of a sidecar in a pod of this workload."""
    return {"run": "ns/job", "owner": "ns/job", "workload-uid": workload, "encoding": "fp32", **more}


def place(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


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


def test_numbered_pods_of_one_group_share_a_run(tmp_path: Path, url: str) -> None:
    """As ranks of one run their trainers have a world size; another size beside them is refused."""
    flags = pod(index="1", runs="one", **{"arena-bytes": "96MiB"})
    with sidecar(tmp_path, url, **flags) as process:
        zero = Trainer(process.socket, Model(), world_size=2)
        assert zero.reply.run == "ns/job"
        beside = pb.AttachRequest(protocol_min=1, protocol_max=1, world_size=1, local_rank=1)
        with pytest.raises(grpc.RpcError, match="not of one group"):
            zero.stub.Attach(beside, timeout=60)
        zero.close()


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


SCRIPT = """
import sys, torch, deltashard
model = torch.nn.EmbeddingBag(50, 4, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = deltashard.Checkpointer(model, optimizer)
resumed = ckpt.restore()
print("restored", resumed is not None, flush=True)
while True:
    optimizer.zero_grad()
    model(torch.randint(0, 50, (4, 3))).sum().backward()
    optimizer.step()
    ckpt.step()
    if ckpt.stats.commits >= 1 and len(sys.argv) > 1:
        print("committed", flush=True)
        sys.argv.pop()
"""


def script(process: SidecarProcess, *arguments: str) -> subprocess.Popen[str]:
    """A training script that runs until something ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DELTASHARD_SOCKET": str(process.socket), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(1200)
def test_a_script_whose_run_was_taken_over_exits_with_the_documented_code(tmp_path: Path, url: str) -> None:
    """79, while training and at every restart, which opens nothing."""
    with (
        sidecar(place(tmp_path, "a"), url, **pod("job-a", every_steps=20)) as first,
        sidecar(place(tmp_path, "b"), url, **pod("job-b")) as second,
    ):
        running = script(first, "say")
        assert running.stdout is not None
        assert "committed\n" in iter(running.stdout.readline, "")
        other = Trainer(second.socket, Model())
        other.open("none")
        _, said = running.communicate(timeout=SCRIPT_S)
        assert running.returncode == 79, said
        assert "Traceback" in said
        attempt = state_of(url).attempt
        restarted = script(first)
        out, said = restarted.communicate(timeout=SCRIPT_S)
        assert (restarted.returncode, out) == (79, ""), said
        assert "takeover=True" in said
        assert state_of(url).attempt == attempt, "the refused restart opened nothing"
        other.close()


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


# Stores that are not ready.


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
        eventually(lambda: not server.last.credentials_ok, timeout_s=DEADLINE_S, what="the condition")
        eventually(lambda: server.last.store_ok, timeout_s=DEADLINE_S, what="it is not the store's fault")
        assert str(path) in server.incidents(fleet.INCIDENT_KIND_CREDENTIALS_MISSING)[-1].message
        assert not opening.done()
        credentials(path, own_minio.access_key, own_minio.secret_key)
        trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
        trainer.save_and_commit()
        eventually(lambda: server.last.credentials_ok, timeout_s=DEADLINE_S, what="the condition ends")
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
                eventually(lambda: server.beats and not server.last.credentials_ok, timeout_s=DEADLINE_S)
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
                    lambda: server.last.credentials_ok, timeout_s=DEADLINE_S, what="the condition ends"
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
        eventually(lambda: not server.last.store_ok, timeout_s=DEADLINE_S, what="the condition")
        assert server.last.credentials_ok
        credentials(path, "second", "second-secret")
        trainer.model.train()
        state = trainer.model.state()
        commit = trainer.save_and_commit()
        eventually(lambda: server.last.store_ok, timeout_s=DEADLINE_S, what="well again")
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()


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
                    (server.last.attempt, server.last.openings) == (attempt, openings)
                ),
                timeout_s=DEADLINE_S,
                what=lambda openings=openings: f"{openings} openings: {server.last}",
            )
            trainer.close()
        assert attempt > 3


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
        eventually(lambda: not server.last.store_ok, timeout_s=DEADLINE_S, what="the condition")
        one = server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)[0]
        assert one.cause == "bucket_missing"
        assert "create the bucket" in one.message
        assert not opening.done()
        own_minio.client().make_bucket("made-later")
        trainer.attempt = opening.result(timeout=DEADLINE_S).attempt
        trainer.save_and_commit()
        eventually(lambda: server.last.store_ok, timeout_s=DEADLINE_S, what="the condition ends")
        trainer.close()


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
        eventually(lambda: server.last.store_ok, timeout_s=DEADLINE_S, what="room again")
        own_minio.stop()
        trainer.model.train()
        state = trainer.model.state()
        number = trainer.save()
        eventually(lambda: not server.last.store_ok, timeout_s=DEADLINE_S, what="down")
        eventually(
            lambda: server.incidents(fleet.INCIDENT_KIND_STORE_UNAVAILABLE)[-1].cause == "unavailable",
            timeout_s=DEADLINE_S,
            what="down is told",
        )
        own_minio.start()
        eventually(lambda: number in trainer.commits, timeout_s=DEADLINE_S, what="committed by itself")
        eventually(lambda: server.last.store_ok, timeout_s=DEADLINE_S, what="up again")
        seq = trainer.commits[number].seq
        trainer.model.wipe()
        trainer.restore(seq)
        assert same(trainer.model.state(), state)
        trainer.close()


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
from tests.support.fake_trainer import Model, Trainer
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
