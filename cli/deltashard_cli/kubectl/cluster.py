"""The cluster of a kubeconfig, by the user's `kubernetes` client: documents go in and come back.

Every request has a connect and a read timeout, and none is tried again: a person waits, and can. What the API refuses
becomes an error that says which right is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deltashard_checkpoint.errors import EnvironmentFault, UserError

try:
    import urllib3
    from kubernetes import client, config
except ImportError:
    raise SystemExit(
        "kubectl-deltashard needs the package kubernetes: pip install 'deltashard[kubectl]'"
    ) from None

CONNECT_S = 10.0
READ_S = 60.0
CHUNK = 500
RUNS = "/apis/deltashard.io/v1alpha1"
Document = dict[str, Any]


class ClusterUnreachable(EnvironmentFault):
    """The API did not answer."""


class RequestDenied(UserError):
    """The API refused what was asked for."""


class NotFound(UserError):
    """The API has no such object."""


class Cluster:
    """Objects of one cluster; `namespace` is the one of the kubeconfig's context unless another is asked for."""

    def __init__(self, *, kubeconfig: Path | None, context: str | None, namespace: str | None) -> None:
        """Read the kubeconfig; raises `UserError` for one that cannot be used."""
        path = None if kubeconfig is None else str(kubeconfig)
        try:
            contexts, active = config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
            self._api = config.new_client_from_config(path, context)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            raise UserError(
                f"the kubeconfig cannot be used: {error}",
                where=path or "KUBECONFIG, or ~/.kube/config",
                remedy="name it by --kubeconfig, and one of its contexts by --context",
            ) from error
        chosen = next((each for each in contexts if each["name"] == context), active)
        self._api.configuration.retries = False
        self.namespace = namespace or chosen["context"].get("namespace") or "default"

    def runs(self) -> list[Document]:
        found = self._pages(f"{RUNS}/namespaces/{quote(self.namespace, safe='')}/checkpointruns")
        return sorted(found, key=lambda each: str(each["metadata"]["name"]))

    def get(self, path: str) -> Document:
        """One object; raises `NotFound`."""
        return self._document(self._request("GET", path))

    def create(self, path: str, body: Document, query: Mapping[str, str] | None = None) -> Document:
        return self._document(self._request("POST", path, body, query))

    def text(self, path: str, query: Mapping[str, str]) -> str:
        return self._request("GET", path, query=query).decode("utf-8", "replace")

    def select(self, path: str, selector: str) -> list[Document]:
        return list(self._pages(path, labelSelector=selector))

    def _pages(self, path: str, **query: str) -> Iterator[Document]:
        query["limit"] = str(CHUNK)
        while True:
            page = self._document(self._request("GET", path, query=query))
            yield from page.get("items") or ()
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return
            query["continue"] = following

    def _document(self, said: bytes) -> Document:
        try:
            found = json.loads(said)
        except ValueError as error:
            raise ClusterUnreachable("what answers is no Kubernetes API", where=self._host) from error
        return found if isinstance(found, dict) else {}

    @property
    def _host(self) -> str:
        return str(self._api.configuration.host)

    def _request(
        self, method: str, path: str, body: Document | None = None, query: Mapping[str, str] | None = None
    ) -> bytes:
        try:
            serialized = self._api.param_serialize(
                method=method,
                resource_path=path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "*/*", "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
            )
            reply = self._api.call_api(*serialized, _request_timeout=(CONNECT_S, READ_S))
            said = bytes(reply.read() or b"")
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterUnreachable(
                f"the API does not answer: {type(error).__name__}: {error}"[:300], where=self._host
            ) from error
        if reply.status >= 400:
            raise self._refused(int(reply.status), said, path)
        return said

    def _refused(self, status: int, said: bytes, path: str) -> Exception:
        try:
            message = str(json.loads(said).get("message", ""))
        except (ValueError, AttributeError):
            message = said.decode("utf-8", "replace")
        message = message[:500] or f"status {status}"
        if status == 404:
            installed = "" if RUNS not in path else "is deltashard installed in this cluster?"
            return NotFound(message, where=path, remedy=installed)
        if status in {401, 403}:
            remedy = "ask for the role view of the namespace (edit, for what changes something)"
            return RequestDenied(message, where=path, remedy=remedy)
        if status == 429 or status >= 500:
            return ClusterUnreachable(f"{status}: {message}", where=path)
        return RequestDenied(message, where=path)
