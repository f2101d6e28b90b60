"""Servers of Google's and Azure's storage for tests, on loopback: fake-gcs-server and Azurite, with their data in memory.

They check conditions of a write under one lock, as the services guarantee. They do not show the services' limits
(Google accepts one write a second of one name), their latency, and tokens, which Azurite checks and fake-gcs-server
does not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from email.utils import formatdate
from types import MappingProxyType

from tests.support.server.store_server import StoreServer
from tests.support.tool import require_tool


class CloudServer(StoreServer):
    """One server process; its data is lost when it ends."""

    scheme: str
    environment: Mapping[str, str]
    """A client's credentials."""

    def endpoint(self, port: int | None = None) -> str:
        """Return the clients' endpoint; `port` leads through a proxy."""
        return f"http://127.0.0.1:{port or self.port}"

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None) -> str:
        return f"{self.scheme}://{bucket}/{prefix}?endpoint={self.endpoint(port)}"


class FakeGcs(CloudServer):
    """fake-gcs-server, by tools/fake-gcs-server."""

    scheme = "gs"
    environment = MappingProxyType({"GOOGLE_BEARER_TOKEN": "unchecked"})

    def command(self) -> list[str]:
        return [str(require_tool("fake-gcs-server")), f"127.0.0.1:{self.port}"]

    def settings(self) -> dict[str, str]:
        return {}

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
    """Azurite's blob service, with its own account."""

    scheme = "az"
    account = "deltashardtests"
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    environment = MappingProxyType({"AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": key})

    def endpoint(self, port: int | None = None) -> str:
        return f"{super().endpoint(port)}/{self.account}"

    def command(self) -> list[str]:
        return [
            *(str(require_tool("azurite")), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        ]

    def settings(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}

    def new_bucket(self) -> str:
        name = f"test-{secrets.token_hex(8)}"
        date, version = formatdate(usegmt=True), "2021-08-06"
        to_sign = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{self.account}/{self.account}/{name}\nrestype:container"
        signature = hmac.new(base64.b64decode(self.key), to_sign.encode(), hashlib.sha256).digest()
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
