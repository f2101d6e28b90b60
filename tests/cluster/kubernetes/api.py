"""The Kubernetes API over HTTPS with a client certificate: JSON in, JSON out, no cached state.

A few lines of urllib3 replace a client library: tests post manifests as users write them, and the import of the
library would take longer than the start of the cluster.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import urllib3

from tests.support.machine import limit_s

Object = dict[str, Any]


class ApiError(Exception):
    """The apiserver refused a request; `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class KubeApi:
    """Calls as one user."""

    def __init__(self, server: str, *, ca: Path, certificate: tuple[Path, Path]) -> None:
        self._server = server
        self._http = urllib3.PoolManager(
            maxsize=8,
            ca_certs=str(ca),
            cert_file=str(certificate[0]),
            key_file=str(certificate[1]),
            timeout=urllib3.Timeout(connect=limit_s(5), read=limit_s(30)),
            retries=False,
        )

    def close(self) -> None:
        self._http.clear()

    def call(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json"
    ) -> str:
        data = None if body is None else json.dumps(body)
        reply = self._http.request(
            method, f"{self._server}{path}", body=data, headers={"Content-Type": content_type}
        )
        text = reply.data.decode()
        if reply.status >= 300:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise ApiError(reply.status, text)
        return text

    def get(self, path: str) -> Object:
        found: Object = json.loads(self.call("GET", path))
        return found

    def find(self, path: str) -> Object | None:
        try:
            return self.get(path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def items(self, path: str) -> list[Object]:
        found: list[Object] = self.get(path)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        made: Object = json.loads(self.call("POST", path, body))
        return made

    def patch(self, path: str, change: Any, how: str = "merge") -> None:
        self.call("PATCH", path, change, content_type=f"application/{how}-patch+json")

    def delete(self, path: str, **options: Any) -> None:
        try:
            self.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except ApiError as error:
            if error.code != 404:
                raise

    def ready(self) -> bool:
        try:
            return self.call("GET", "/readyz") == "ok"
        except (ApiError, urllib3.exceptions.HTTPError):
            return False
