"""A real MinIO server for tests.

It listens on loopback, or on another requested address of this machine.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from minio import Minio

from tests.support.server.port import free_port
from tests.support.server.store_server import StoreServer
from tests.support.tool import ROOT, require_tool

if TYPE_CHECKING:
    from tests.support.server.apiserver import CertificateAuthority

__all__ = ["ROOT", "MinioServer", "free_port"]


class MinioServer(StoreServer):
    """One server process; `stop`, `kill` and `start` again keep port and data."""

    health = "/minio/health/cluster"

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        settings: dict[str, str] | None = None,
        authority: CertificateAuthority | None = None,
    ) -> None:
        """Create the server; `settings` are more MINIO_* variables; `authority` signs its certificate and enables TLS."""
        super().__init__(directory, host=host, trusted=directory / "ca.crt" if authority else None)
        self.url_scheme = "https" if authority else "http"
        self._authority = authority
        self._settings = settings or {}
        self.access_key = "deltashard-tests"
        self.secret_key = secrets.token_hex(16)

    @property
    def endpoint(self) -> str:
        return f"{self.url_scheme}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "MinIO is not running"
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that a client needs."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None) -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.url_scheme}://{self.host}:{port or self.port}"

    def client(self) -> Minio:
        """Return minio-py's own client, which inspects the server independently of deltashard's code."""
        return Minio(
            f"{self.host}:{self.port}", self.access_key, self.secret_key, secure=self.url_scheme == "https",
            region="us-east-1", http_client=self._http,
        )  # fmt: skip

    def new_bucket(self) -> str:
        name = f"test-{secrets.token_hex(8)}"
        self.client().make_bucket(name)
        return name

    def command(self) -> list[str]:
        data, flags = self.directory / "data", []
        data.mkdir(parents=True, exist_ok=True)
        if self._authority is not None:
            issued, folder = self._authority.issue(), self.directory / "certs"
            folder.mkdir(exist_ok=True)
            (folder / "public.crt").write_bytes(issued.certificate)
            (folder / "private.key").write_bytes(issued.key)
            (self.directory / "ca.crt").write_bytes(self._authority.pem)
            flags = ["--certs-dir", str(folder)]
        return [
            *(str(require_tool("minio")), "server", "--quiet", "--address", f"{self.host}:{self.port}"),
            *(*flags, str(data)),
        ]

    def settings(self) -> dict[str, str]:
        return {
            "MINIO_ROOT_USER": self.access_key, "MINIO_ROOT_PASSWORD": self.secret_key, "MINIO_UPDATE": "off",
            "MINIO_BROWSER": "off", **self._settings,
            "CI": "true",  # makes MinIO accept a root disk
        }  # fmt: skip
