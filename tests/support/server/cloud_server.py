"""Servers of Google's and Azure's storage for tests, on loopback: fake-gcs-server and Azurite; what they hold is in memory.

They check conditions of a write under one lock, as the services promise. What they cannot show: the services' limits (Google
takes one write a second of one name), their latency, and tokens, which Azurite checks and fake-gcs-server does not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from types import MappingProxyType

import pytest
import urllib3

from tests.support.eventually import eventually
from tests.support.server.port import free_port
from tests.support.tool import built


class CloudServer(ABC):
    """One server process; its data ends with it."""

    scheme: str
    environment: Mapping[str, str]
    """A client's credentials."""

    def __init__(self, directory: Path) -> None:
        self.port = 0
        self._directory = directory
        self._log = directory / f"{self.scheme}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = urllib3.PoolManager(timeout=urllib3.Timeout(connect=5, read=30), retries=False)

    @abstractmethod
    def command(self) -> list[str]:
        """With the port to listen on."""

    def settings(self) -> dict[str, str]:
        """Its environment."""
        return {}

    @abstractmethod
    def new_bucket(self) -> str:
        """A bucket that only the caller knows."""

    def endpoint(self, port: int | None = None) -> str:
        """For clients; `port` leads through a proxy."""
        return f"http://127.0.0.1:{port or self.port}"

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None) -> str:
        return f"{self.scheme}://{bucket}/{prefix}?endpoint={self.endpoint(port)}"

    def start(self) -> None:
        """Start and wait until it answers; tries another port when the first was taken meanwhile."""
        for _ in range(5):
            self.port = free_port()
            if self._started():
                return
        pytest.fail(f"it did not start:\n{self._log.read_text()[-4000:]}", pytrace=False)

    def _started(self) -> bool:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._directory,
                env={"HOME": str(self._directory), "PATH": os.environ.get("PATH", ""), **self.settings()},
                start_new_session=True,
            )
        self._process = process

        def settled() -> bool:
            if process.poll() is not None:
                return True
            try:
                return self._http.request("GET", f"http://127.0.0.1:{self.port}/").status > 0
            except urllib3.exceptions.HTTPError:
                return False

        eventually(settled, what=f"{self.scheme} server ready")
        return process.poll() is None

    def stop(self) -> None:
        self._http.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(60)


class FakeGcs(CloudServer):
    """fake-gcs-server, by tools/fake-gcs-server."""

    scheme = "gs"
    environment = MappingProxyType({"GOOGLE_BEARER_TOKEN": "unchecked"})

    def command(self) -> list[str]:
        return [str(built("fake-gcs-server")), f"127.0.0.1:{self.port}"]

    def new_bucket(self) -> str:
        name = f"test-{secrets.token_hex(8)}"
        answer = self._http.request(
            "POST",
            f"{self.endpoint()}/storage/v1/b?project=tests",
            body=json.dumps({"name": name}),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status == 200, answer.data
        return name


class Azurite(CloudServer):
    """Azurite's blob service, with an account of its own."""

    scheme = "az"
    account = "deltashardtests"
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    environment = MappingProxyType({"AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": key})

    def endpoint(self, port: int | None = None) -> str:
        return f"{super().endpoint(port)}/{self.account}"

    def command(self) -> list[str]:
        return [
            *(str(built("azurite")), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        ]

    def settings(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}

    def new_bucket(self) -> str:
        name = f"test-{secrets.token_hex(8)}"
        date, version = formatdate(usegmt=True), "2021-08-06"
        said = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{self.account}/{self.account}/{name}\nrestype:container"
        signature = hmac.new(base64.b64decode(self.key), said.encode(), hashlib.sha256).digest()
        answer = self._http.request(
            "PUT",
            f"{self.endpoint()}/{name}?restype=container",
            headers={
                "x-ms-date": date,
                "x-ms-version": version,
                "Authorization": f"SharedKey {self.account}:{base64.b64encode(signature).decode()}",
                "Content-Length": "0",
            },
        )
        assert answer.status == 201, answer.data
        return name
