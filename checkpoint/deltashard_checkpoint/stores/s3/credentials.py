"""Where an S3 store's credentials come from: the first source that is configured, asked anew for every request.

In order: `AWS_ACCESS_KEY_ID` + `AWS_SECRET_ACCESS_KEY` (+ `AWS_SESSION_TOKEN`); `MINIO_ACCESS_KEY` +
`MINIO_SECRET_KEY`; a web identity (`AWS_WEB_IDENTITY_TOKEN_FILE`: service accounts on EKS, or MinIO's own STS
by `AWS_ENDPOINT_URL_STS`); the shared credentials file, profile `AWS_PROFILE`; the container's or the instance's role.

A file or token that is absent or empty is `CredentialsMissing`: in a pod the Secret may be created later, and the
next request finds it. A file is read again when it changed (its inode, size or mtime), so a rotated secret is used by
the next request: minio-py's own chain would keep the first answer for ever. Temporary credentials are renewed before
they end. Nothing here is ever logged or put into a message but the *name* of the source.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import AWSConfigProvider, IamAwsProvider, Provider

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, StoreUnavailable

_ROLE_SETTINGS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_HOW = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, "
    "or give the pod's service account a role"
)


class StandardProvider(Provider):
    """The process's S3 credentials by the standard order; thread-safe."""

    def __init__(
        self,
        *,
        http: urllib3.PoolManager,
        region: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = os.environ if environment is None else environment
        self._lock = threading.Lock()
        self._file_state: tuple[int, int, int] | None = None
        self._from_file: Credentials | None = None
        self._http = http
        self._region = region
        self._role: IamAwsProvider | None = None

    def retrieve(self) -> Credentials:
        """Credentials to sign the next request with; raises `CredentialsMissing` when no source has any."""
        static = self._static()
        if static is not None:
            return static
        with self._lock:
            if token := self._environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
                self._check_token(Path(token))
                return self._assumed("the web identity of AWS_WEB_IDENTITY_TOKEN_FILE")
            path = self._file()
            if path is not None:
                return self._read(path)
            if self._environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
                raise CredentialsMissing("no store credentials are configured", remedy=_HOW)
            return self._assumed("the container's or instance's role")

    def forget(self) -> None:
        """Drop what was cached: the store said it is expired."""
        with self._lock:
            self._file_state = None
            self._role = None

    def source(self) -> str:
        """The name of the source in use, for messages."""
        if self._environment.get("AWS_ACCESS_KEY_ID") and self._environment.get("AWS_SECRET_ACCESS_KEY"):
            return "AWS_ACCESS_KEY_ID"
        if self._environment.get("MINIO_ACCESS_KEY") and self._environment.get("MINIO_SECRET_KEY"):
            return "MINIO_ACCESS_KEY"
        if self._environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
            return "AWS_WEB_IDENTITY_TOKEN_FILE"
        path = self._file()
        return "the container's or instance's role" if path is None else f"profile {self._profile} of {path}"

    def _static(self) -> Credentials | None:
        get = self._environment.get
        if (key := get("AWS_ACCESS_KEY_ID")) and (secret := get("AWS_SECRET_ACCESS_KEY")):
            return Credentials(key, secret, get("AWS_SESSION_TOKEN") or None)
        if (key := get("MINIO_ACCESS_KEY")) and (secret := get("MINIO_SECRET_KEY")):
            return Credentials(key, secret)
        return None

    @property
    def _profile(self) -> str:
        return self._environment.get("AWS_PROFILE") or "default"

    def _file(self) -> Path | None:
        named = self._environment.get("AWS_SHARED_CREDENTIALS_FILE")
        if named:
            return Path(named)
        home = Path(self._environment.get("HOME") or "/") / ".aws" / "credentials"
        return home if home.is_file() else None

    def _read(self, path: Path) -> Credentials:
        try:
            status = path.stat()
            state = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._from_file is None or state != self._file_state:
                self._from_file = AWSConfigProvider(str(path), self._profile).retrieve()
                self._file_state = state
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}" if isinstance(error, ValueError) else str(error)
            raise CredentialsMissing(
                f"no store credentials in profile {self._profile}: {reason}",
                where=str(path),
                remedy="the file needs aws_access_key_id and aws_secret_access_key under that profile; in a pod: "
                "create the Secret that the CheckpointPolicy names, with the key `credentials`; it is used at once",
            ) from None
        return self._from_file

    def _check_token(self, path: Path) -> None:
        """A projected token that is not there (yet) is told from a token service that fails."""
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
            self._role = IamAwsProvider(
                custom_endpoint=sts if identity else None,
                http_client=self._http,
                region=self._region,
            )
        try:
            return self._role.retrieve()
        except (OSError, ValueError, KeyError, DeltashardError, urllib3.exceptions.HTTPError) as error:
            # The error's text may hold the request's URL, and that a token: only its type is told.
            configured = any(self._environment.get(name) for name in _ROLE_SETTINGS)
            failed = not isinstance(error, (ValueError, KeyError)) or "HTTP status code 5" in str(error)
            if configured and failed:
                raise StoreUnavailable(
                    f"{source} gave no credentials now: {type(error).__name__}",
                    remedy="is the token service up?",
                ) from None
            raise AccessDenied(
                f"no store credentials from {source}: {type(error).__name__}", remedy=_HOW
            ) from None
