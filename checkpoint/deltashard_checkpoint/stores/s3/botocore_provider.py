"""Credentials that need AWS's library: processes, single sign-on, and roles assumed from a profile.

botocore is optional (`deltashard[aws]`), imported when a profile needs it, and renews expiring credentials. It may run
a program or call a token service without a timeout, so it runs on a thread, with a bounded wait.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import ModuleType
from typing import Any

from minio.credentials.credentials import Credentials

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import AccessDenied, CredentialsMissing, StoreUnavailable
from deltashard_checkpoint.stores.deadline import remaining_s

ANSWER_TIMEOUT_S = 30.0
"""Longest wait for a process or a token service."""
_UNREACHABLE_ERRORS = ("ConnectionError", "HTTPClientError", "EndpointConnectionError")


class BotocoreProvider:
    """Credentials of one profile through botocore; for one caller at a time.

    `why` is the setting that needs botocore, `where` the files. Raises `CredentialsMissing` without botocore.
    """

    def __init__(self, profile: str, *, why: str, where: str) -> None:
        self._why = why
        self._where = where
        self._exceptions = self._module("exceptions")
        session = self._module("session").Session(profile=profile)
        config = self._module("config").Config(
            connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2}
        )
        session.set_default_client_config(config)
        self._session = session
        self._found: Any = None
        self._pending: Future[Credentials | None] | None = None

    def retrieve(self) -> Credentials:
        """Return valid keys; raises `CredentialsMissing`, `AccessDenied` or `StoreUnavailable`."""
        # A request that timed out is still running: wait for it instead of starting another.
        self._pending = self._pending or self._start()
        try:
            found = self._pending.result(max(0.0, min(ANSWER_TIMEOUT_S, remaining_s())))
        except FutureTimeout:
            raise StoreUnavailable(
                f"no store credentials from {self._why} yet: it does not respond", where=self._where
            ) from None
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if found is None:
            raise CredentialsMissing(f"{self._why} returned no store credentials", where=self._where)
        return found

    def _start(self) -> Future[Credentials | None]:
        asked: Future[Credentials | None] = Future()

        def ask() -> None:
            try:
                asked.set_result(self._fetch())
            except DeltashardError as error:
                asked.set_exception(error)

        threading.Thread(target=ask, name="botocore", daemon=True).start()
        return asked

    def _fetch(self) -> Credentials | None:
        try:
            self._found = self._found or self._session.get_credentials()
            keys = None if self._found is None else self._found.get_frozen_credentials()
        # IMPORTANT: all botocore errors end here. Their text may contain secrets: report only the class.
        except Exception as error:  # noqa: BLE001 - see above
            raise self._translated(error) from None
        return None if keys is None else Credentials(keys.access_key, keys.secret_key, keys.token)

    def _translated(self, error: Exception) -> DeltashardError:
        what = f"no store credentials from {self._why}"
        if any(isinstance(error, getattr(self._exceptions, name)) for name in _UNREACHABLE_ERRORS):
            return StoreUnavailable(
                f"{what} now: {type(error).__name__}", where=self._where, remedy="is the token service up?"
            )
        code = ""
        if isinstance(error, self._exceptions.ClientError):
            code = f" ({getattr(error, 'response', {}).get('Error', {}).get('Code', '')})"
        remedy = (
            "run `aws sso login` with this profile"
            if "sso" in self._why
            else "`aws sts get-caller-identity` with this profile shows details"
        )
        return AccessDenied(f"{what}: {type(error).__name__}{code}", where=self._where, remedy=remedy)

    def _module(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(f"botocore.{name}")
        except ImportError:
            raise CredentialsMissing(
                f"the profile uses {self._why}, which needs botocore, but botocore is not installed",
                where=self._where,
                remedy="pip install 'deltashard[aws]'; or give keys, or a role of the pod's service account",
            ) from None
