"""A real MinIO server for the demo and the bench: built once by tools/build, on loopback, in its own directory."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Minio:
    """A running server and the one bucket in it."""

    endpoint: str
    """http://127.0.0.1:port"""
    bucket: str
    access_key: str
    secret_key: str
    pid: int

    def environment(self) -> dict[str, str]:
        """The variables by which S3 clients find this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/minio/health/ready", timeout=1):  # noqa: S310 - our own loopback URL
                return
        except (urllib.error.URLError, OSError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"MinIO did not become ready at {endpoint}: {log.read_text()[-2000:]}"
                ) from error
            time.sleep(0.02)


@contextmanager
def minio_server(bucket: str = "deltashard") -> Iterator[Minio]:
    """Start MinIO with an empty bucket; stop it and remove its files at the end."""
    from minio import Minio as Client

    binary = subprocess.run(
        [Path(__file__).resolve().parent / "build", "minio"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="deltashard-minio-") as folder:
        port = _free_port()
        log = Path(folder) / "server.log"
        access_key, secret_key = "demo", secrets.token_urlsafe(24)
        environment = os.environ | {
            "MINIO_ROOT_USER": access_key,
            "MINIO_ROOT_PASSWORD": secret_key,
            "MINIO_UPDATE": "off",
            "MINIO_BROWSER": "off",
        }
        with log.open("wb") as out:
            server = subprocess.Popen(
                [binary, "server", "--quiet", "--address", f"127.0.0.1:{port}", f"{folder}/data"],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            endpoint = f"http://127.0.0.1:{port}"
            _wait_ready(endpoint, server, log)
            Client(f"127.0.0.1:{port}", access_key, secret_key, secure=False).make_bucket(bucket)
            yield Minio(
                endpoint=endpoint, bucket=bucket, access_key=access_key, secret_key=secret_key, pid=server.pid
            )
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
