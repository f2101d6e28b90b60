"""Credentials of an S3 store: the first configured source, checked for every request.

In order: `AWS_ACCESS_KEY_ID` + `AWS_SECRET_ACCESS_KEY` (+ `AWS_SESSION_TOKEN`); `MINIO_ACCESS_KEY` +
`MINIO_SECRET_KEY`; a web identity (`AWS_WEB_IDENTITY_TOKEN_FILE`: service accounts on EKS, or MinIO's STS by
`AWS_ENDPOINT_URL_STS`); the profile `AWS_PROFILE` of AWS's two files (`profile`): keys, or through botocore a process,
single sign-on or a role (`botocore_provider`); the container's or instance's role.

An absent or empty file or token raises `CredentialsMissing`: in a pod the Secret may be created later, and the next
request uses it. A file is read again when its inode, size or mtime changes, so a rotated secret takes effect with the
next request; minio-py's chain would keep the first result forever. Temporary credentials are renewed before they
expire. Logs and messages contain only the *name* of the source.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider

from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, StoreUnavailable
from deltashard_checkpoint.stores.s3.botocore_provider import BotocoreProvider
from deltashard_checkpoint.stores.s3.profile import ProfileFiles

_ROLE_SETTINGS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_HOW = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, "
    "or give the pod's service account a role"
)


class _Role(IamAwsProvider):
    """minio-py's provider, with support for a container token file that ends in a newline."""

    def fetch(self, url: str, headers: dict[str, Any] | None = None) -> Credentials:
        return super().fetch(url, headers and {name: str(value).strip() for name, value in headers.items()})


class StandardProvider(Provider):
    """S3 credentials of the process in the standard order; thread-safe."""

    def __init__(
        self,
        *,
        http: urllib3.PoolManager,
        region: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = os.environ if environment is None else environment
        self._lock = threading.Lock()
        self._file_state: tuple[tuple[int, int, int] | None, ...] | None = None
        self._from_file: Credentials | BotocoreProvider | None = None
        self._http = http
        self._region = region
        self._role: _Role | None = None

    def retrieve(self) -> Credentials:
        """Return credentials for the next request; raises `CredentialsMissing` if no source has any."""
        static = self._static()
        if static is not None:
            return static
        with self._lock:
            if token := self._environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
                self._check_token(Path(token))
                return self._assumed("the web identity of AWS_WEB_IDENTITY_TOKEN_FILE")
            files = ProfileFiles.of(self._environment)
            if (found := self._read(files)) is not None:
                return found
            if self._environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
                raise CredentialsMissing("no store credentials are configured", remedy=_HOW)
            return self._assumed("the container's or instance's role")

    def forget(self) -> None:
        """Drop cached credentials that the store reported as expired."""
        with self._lock:
            self._from_file = self._file_state = None
            self._role = None

    def source(self) -> str:
        if self._environment.get("AWS_ACCESS_KEY_ID") and self._environment.get("AWS_SECRET_ACCESS_KEY"):
            return "AWS_ACCESS_KEY_ID"
        if self._environment.get("MINIO_ACCESS_KEY") and self._environment.get("MINIO_SECRET_KEY"):
            return "MINIO_ACCESS_KEY"
        if self._environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
            return "AWS_WEB_IDENTITY_TOKEN_FILE"
        files = ProfileFiles.of(self._environment)
        return (
            f"profile {files.name} of {_where(files)}"
            if files.is_configured
            else "the container's or instance's role"
        )

    def _static(self) -> Credentials | None:
        get = self._environment.get
        if (key := get("AWS_ACCESS_KEY_ID")) and (secret := get("AWS_SECRET_ACCESS_KEY")):
            return Credentials(key, secret, get("AWS_SESSION_TOKEN") or None)
        if (key := get("MINIO_ACCESS_KEY")) and (secret := get("MINIO_SECRET_KEY")):
            return Credentials(key, secret)
        return None

    def _read(self, files: ProfileFiles) -> Credentials | None:
        """Return the profile's credentials; None without a profile. Raises `CredentialsMissing` if it has none."""
        state = files.state
        if self._from_file is None or state != self._file_state:
            self._from_file = self._file_state = None
            if not files.is_configured:
                return None
            source = files.read()
            if source is None and (files.named or files.name != "default" or files.credentials.is_file()):
                raise CredentialsMissing(
                    f"no store credentials in profile {files.name}",
                    where=_where(files),
                    remedy="the file needs aws_access_key_id and aws_secret_access_key under that profile; in a pod: "
                    "create the Secret that the CheckpointPolicy names, with the key `credentials`; it is used at once",
                )
            self._from_file = (
                BotocoreProvider(files.name, why=source, where=_where(files))
                if isinstance(source, str)
                else source
            )
            self._file_state = state
        kept = self._from_file
        return kept.retrieve() if isinstance(kept, BotocoreProvider) else kept

    def _check_token(self, path: Path) -> None:
        """Raise for a missing projected token, to distinguish it from a failing token service."""
        try:
            empty = path.stat().st_size == 0
        except OSError as error:
            raise self._no_token(path, str(error)) from None
        if empty:
            raise self._no_token(path, "the file is empty")

    def _no_token(self, path: Path, reason: str) -> CredentialsMissing:
        return CredentialsMissing(
            f"no web identity token: {reason}",
            where=str(path),
            remedy="mount the service account's projected token there; it is used at once",
        )

    def _assumed(self, source: str) -> Credentials:
        if self._role is None:
            sts = self._environment.get("AWS_ENDPOINT_URL_STS")
            identity = self._environment.get("AWS_WEB_IDENTITY_TOKEN_FILE")
            self._role = _Role(
                custom_endpoint=sts if identity else None,
                http_client=self._http,
                region=self._region,
            )
        try:
            return self._role.retrieve()
        # IMPORTANT: all errors of minio's providers end here.
        except Exception as error:  # noqa: BLE001 - see above
            # The error's text may contain the request's URL with a token, so only its class is reported.
            configured = any(self._environment.get(name) for name in _ROLE_SETTINGS)
            failed = not isinstance(error, (ValueError, KeyError)) or "HTTP status code 5" in str(error)
            if configured and failed:
                raise StoreUnavailable(
                    f"{source} returned no credentials: {type(error).__name__}",
                    remedy="is the token service up?",
                ) from None
            why = "it returned no usable ones" if configured else "there is none"
            raise AccessDenied(f"no store credentials from {source}: {why}", remedy=_HOW) from None


def _where(files: ProfileFiles) -> str:
    """Return the existing files of a profile."""
    there = [path for path in (files.credentials, files.config) if path.is_file()]
    return " and ".join(map(str, there)) or str(files.credentials)
