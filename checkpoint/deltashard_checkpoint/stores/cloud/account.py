"""obstore client of one bucket, created from the environment and recreated when a credentials file changes.

Google: `GOOGLE_APPLICATION_CREDENTIALS` (a key file, or gcloud's), `GOOGLE_SERVICE_ACCOUNT_KEY`, `GOOGLE_BEARER_TOKEN`,
or the metadata server: the node's service account, or with GKE workload identity the pod's. Azure:
`AZURE_STORAGE_CONNECTION_STRING` or `AZURE_STORAGE_CONNECTION_STRING_FILE`; else the account's name (`?account=` or
`AZURE_STORAGE_ACCOUNT_NAME`) with `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN`, a client secret, a federated
token (`AZURE_FEDERATED_TOKEN_FILE`: AKS workload identity) or the machine's managed identity.

An absent or empty file raises `CredentialsMissing`: in a pod the Secret may appear later, and the next request uses it.
Messages contain only the *name* of the source. The client does not retry; `retry.py` does.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing
from deltashard_checkpoint.stores.transport import ca_bundle, checked_endpoint

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore

    Client = AzureStore | GCSStore

CONNECT_TIMEOUT_S = 5.0
_LONGEST = timedelta(days=1)
"""Request timeout of the client; effectively off, because each request has a deadline by its size."""
_GOOGLE_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_GOOGLE_VALUES = ("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN")
_AZURE_VALUES = (
    *(
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
    ),
    *("AZURE_STORAGE_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"),
)
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)


class Account(ABC):
    """Client of one bucket (container); thread-safe."""

    where: str
    """The store's URL."""
    endpoint: str
    """http(s)://host[:port][/account]."""
    credentials_hint: str
    """Settings to change, for messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._state: tuple[object, ...] = ()

    def client(self) -> Client:
        """Return the client for the next request; raises `CredentialsMissing` and `AccessDenied`."""
        with self._lock:
            state = tuple(self._stat(name, Path(value)) for name, value in self._files())
            if self._client is None or state != self._state:
                self._client = self._make_client()
                self._state = state
            return self._client

    def forget(self) -> None:
        """Drop the client, so that the next request reads the credentials again."""
        with self._lock:
            self._client = None

    def source(self) -> str:
        names = [name for name, _ in self._files()] + [
            name for name in self._values() if os.environ.get(name)
        ]
        return names[0] if names else self._ambient()

    def configured(self) -> bool:
        """Whether a source is configured, rather than the machine's identity."""
        return self.source() != self._ambient()

    @abstractmethod
    def _files(self) -> list[tuple[str, str]]:
        """(variable, path) of the configured files."""

    @abstractmethod
    def _values(self) -> tuple[str, ...]:
        """Variables that hold credentials themselves."""

    @abstractmethod
    def _ambient(self) -> str:
        """The source if none is configured."""

    @abstractmethod
    def _make_client(self) -> Client: ...

    def _stat(self, name: str, path: Path) -> tuple[str, int, int, int]:
        try:
            status = path.stat()
        except OSError as error:
            raise self._missing(name, path, error.strerror or str(error)) from None
        if status.st_size == 0:
            raise self._missing(name, path, "the file is empty")
        return str(path), status.st_ino, status.st_size, status.st_mtime_ns

    def _missing(self, name: str, path: Path, reason: str) -> CredentialsMissing:
        return CredentialsMissing(
            f"no store credentials in the file of {name}: {reason}",
            where=str(path),
            remedy="in a pod: create the Secret that the CheckpointPolicy names, with the key `credentials`, or have "
            "the service account's token mounted there; it is used at once",
        )

    def _unusable(self, reason: str) -> AccessDenied:
        return AccessDenied(
            f"credentials of {self.source()} cannot be used: {reason}",
            where=self.where,
            remedy=self.credentials_hint,
        )

    def _options(self) -> dict[str, Any]:
        bundle = ca_bundle()
        options: dict[str, Any] = {
            "client_options": {
                "allow_http": self.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "timeout": _LONGEST,
            },
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
        }
        if bundle is not None:
            options["client_options"]["root_certificate"] = bundle[1].read_bytes()
        return options


class GoogleAccount(Account):
    """Google Cloud Storage, or a compatible service at `endpoint`."""

    credentials_hint = (
        "set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, or give the pod's service account "
        "workload identity"
    )

    def __init__(self, bucket: str, *, endpoint: str | None, where: str) -> None:
        super().__init__()
        if endpoint is not None:
            checked_endpoint(endpoint)
        self.where = where
        self._bucket = bucket
        self._configured_endpoint = endpoint
        self.endpoint = (endpoint or "https://storage.googleapis.com").rstrip("/")

    def _files(self) -> list[tuple[str, str]]:
        return [(name, value) for name in _GOOGLE_FILES if (value := os.environ.get(name))]

    def _values(self) -> tuple[str, ...]:
        return _GOOGLE_VALUES

    def _ambient(self) -> str:
        return "the metadata server's service account"

    def _make_client(self) -> Client:
        stores, base = _obstore()
        config = {"base_url": self._configured_endpoint.rstrip("/")} if self._configured_endpoint else {}
        try:
            return stores.GCSStore(self._bucket, config=config, **self._options())  # type: ignore[no-any-return]
        except (base, ValueError) as error:
            known = "service_account and authorized_user are the types that are read"
            raise self._unusable(f"{_reason(error)} ({known})") from None


class AzureAccount(Account):
    """Azure Blob Storage, or a compatible service at `endpoint`."""

    credentials_hint = (
        "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_CONNECTION_STRING, or give the pod's service account workload "
        "identity (AZURE_CLIENT_ID, AZURE_TENANT_ID, AZURE_FEDERATED_TOKEN_FILE)"
    )

    def __init__(self, container: str, *, account: str | None, endpoint: str | None, where: str) -> None:
        super().__init__()
        if endpoint is not None:
            checked_endpoint(endpoint, path=True)
        self.where = where
        self._container = container
        self._account = account
        self._configured_endpoint = endpoint
        self.endpoint = ""
        """Empty until a connection string provides it."""
        with suppress(CredentialsMissing):
            self.endpoint = self._configuration()["endpoint"]

    def _files(self) -> list[tuple[str, str]]:
        names = ("AZURE_STORAGE_CONNECTION_STRING_FILE", "AZURE_FEDERATED_TOKEN_FILE")
        return [(name, value) for name in names if (value := os.environ.get(name))]

    def _values(self) -> tuple[str, ...]:
        return ("AZURE_STORAGE_CONNECTION_STRING", *_AZURE_VALUES)

    def _ambient(self) -> str:
        return "the machine's managed identity"

    def _configuration(self) -> dict[str, str]:
        """Return obstore's configuration, in addition to what it reads from the environment."""
        found = self._connection()
        stated = found.get("account_name")
        account = self._account or stated or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if stated and account != stated:
            raise self._unusable(f"the URL names the account {account}, the connection string {stated}")
        if not account or _ACCOUNT.fullmatch(account) is None:
            what = f"{account!r} cannot name a storage account" if account else "no storage account is named"
            raise AccessDenied(
                what,
                where=self.where,
                remedy="add ?account=NAME to the URL, or set AZURE_STORAGE_ACCOUNT_NAME",
            )
        endpoint = (
            self._configured_endpoint or found.get("endpoint") or f"https://{account}.blob.core.windows.net"
        )
        checked_endpoint(endpoint, path=True)
        return found | {"account_name": account, "endpoint": endpoint.rstrip("/")}

    def _connection(self) -> dict[str, str]:
        """Parse the connection string: account_name, account_key or sas_key, endpoint."""
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
        if path := os.environ.get("AZURE_STORAGE_CONNECTION_STRING_FILE"):
            try:
                text = Path(path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise self._missing(
                    "AZURE_STORAGE_CONNECTION_STRING_FILE", Path(path), type(error).__name__
                ) from None
        if not text.strip():
            return {}
        parts = dict(each.strip().split("=", 1) for each in text.strip().split(";") if "=" in each)
        if "AccountName" not in parts or not {"AccountKey", "SharedAccessSignature"} & set(parts):
            raise self._unusable(
                "no connection string: it needs AccountName and AccountKey or SharedAccessSignature"
            )
        found = {"account_name": parts["AccountName"]}
        if "AccountKey" in parts:
            found["account_key"] = parts["AccountKey"]
        else:
            found["sas_key"] = parts["SharedAccessSignature"]
        if "BlobEndpoint" in parts:
            found["endpoint"] = parts["BlobEndpoint"]
        elif "EndpointSuffix" in parts:
            scheme = parts.get("DefaultEndpointsProtocol", "https")
            found["endpoint"] = f"{scheme}://{parts['AccountName']}.blob.{parts['EndpointSuffix']}"
        return found

    def _make_client(self) -> Client:
        stores, base = _obstore()
        config = self._configuration()
        self.endpoint = config["endpoint"]
        try:
            return stores.AzureStore(self._container, config=config, **self._options())  # type: ignore[no-any-return]
        except (base, ValueError) as error:
            raise self._unusable(_reason(error)) from None


def _obstore() -> tuple[Any, type[Exception]]:
    from obstore import store
    from obstore.exceptions import BaseError

    return store, BaseError


def _reason(error: Exception) -> str:
    """Return the first line of a client's configuration error, which may quote a name but never a key."""
    return re.sub(r"[A-Za-z0-9+/=_-]{40,}", "***", str(error).partition("\n")[0])[:200]
