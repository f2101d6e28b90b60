"""A real MinIO server for tests, on a free port, in a directory of its own.

It listens on loopback, or on another address of this machine that is asked for.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import urllib3
from minio import Minio

from tests.support.eventually import eventually
from tests.support.server.port import free_port
from tests.support.tool import ROOT, built

if TYPE_CHECKING:
    from tests.support.server.apiserver import Authority

__all__ = ["ROOT", "MinioServer", "free_port"]


class MinioServer:
    """One server process; `stop`, `kill` and `start` again keep port and data."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        settings: dict[str, str] | None = None,
        authority: Authority | None = None,
    ) -> None:
        """`settings` are MINIO_* variables besides the usual ones; `authority` signs for it, which then serves TLS."""
        self.scheme = "https" if authority else "http"
        self._authority = authority
        self.host = host
        self.settings = settings or {}
        self.directory = directory
        self.access_key = "deltashard-tests"
        self.secret_key = secrets.token_hex(16)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "minio.log"

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "MinIO is not running"
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """What a client's environment needs."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None) -> str:
        """A store URL; `port` leads through a proxy."""
        return f"s3://{bucket}/{prefix}?endpoint={self.scheme}://{self.host}:{port or self.port}"

    def client(self) -> Minio:
        """minio-py's own client, to look at the server past our code."""
        http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=60, read=60), retries=False, ca_certs=self._trusted()
        )
        return Minio(
            f"{self.host}:{self.port}",
            self.access_key,
            self.secret_key,
            secure=self.scheme == "https",
            region="us-east-1",
            http_client=http,
        )

    def new_bucket(self) -> str:
        """A bucket that only the caller knows."""
        name = f"test-{secrets.token_hex(8)}"
        client = self.client()
        client.make_bucket(name)
        client._http.clear()
        return name

    def start(self) -> None:
        """Start and wait until it serves requests; tries another port when the first was taken meanwhile."""
        for _ in range(5):
            self.port = self.port or free_port()
            if self._started():
                return
            self.port = 0
        pytest.fail(f"MinIO did not start:\n{self._log.read_text()[-4000:]}", pytrace=False)

    def _started(self) -> bool:
        environment = {
            "HOME": str(self.directory), "PATH": os.environ.get("PATH", ""), "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key, "MINIO_UPDATE": "off", "MINIO_BROWSER": "off", **self.settings,
            "CI": "true",  # MinIO: a root disk is fine
        }  # fmt: skip
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [built("minio"), "server", "--quiet", "--address", f"{self.host}:{self.port}", *self._certificates(),
                 self.directory / "data"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip
        self._process = process
        http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=1, read=2), retries=False, ca_certs=self._trusted()
        )

        def settled() -> bool:
            if process.poll() is not None:
                return True
            try:
                return http.request("GET", f"{self.endpoint}/minio/health/cluster").status == 200
            except urllib3.exceptions.HTTPError:
                return False

        try:
            eventually(settled, what="MinIO ready")
        finally:
            http.clear()
        return process.poll() is None

    def _trusted(self) -> str | None:
        if self._authority is None:
            return None
        path = self.directory / "ca.crt"
        path.write_bytes(self._authority.pem)
        return str(path)

    def _certificates(self) -> list[str | Path]:
        if self._authority is None:
            return []
        issued, folder = self._authority.issue(), self.directory / "certs"
        folder.mkdir(exist_ok=True)
        (folder / "public.crt").write_bytes(issued.certificate)
        (folder / "private.key").write_bytes(issued.key)
        return ["--certs-dir", folder]

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # no test's business
            process.kill()
            process.wait(60)
