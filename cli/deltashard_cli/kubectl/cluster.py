"""Access to the cluster of a kubeconfig through the `kubernetes` client, with plain JSON documents.

Every request has a connect and a read timeout and is not retried: an interactive user can repeat the command. A denied
request becomes an error that names the missing permission.
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
    """The API denied the request."""


class NotFound(UserError):
    """The API has no such object."""


class Cluster:
    """Objects of one cluster; `namespace` defaults to that of the kubeconfig's context."""

    def __init__(self, *, kubeconfig: Path | None, context: str | None, namespace: str | None) -> None:
        """Read the kubeconfig. Raises `UserError` if it is unusable."""
        path = None if kubeconfig is None else str(kubeconfig)
        try:
            contexts, active = config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
            self._api = config.new_client_from_config(path, context)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            raise UserError(
                f"unusable kubeconfig: {error}",
                where=path or "KUBECONFIG, or ~/.kube/config",
                remedy="select it by --kubeconfig, and one of its contexts by --context",
            ) from error
        chosen = next((each for each in contexts if each["name"] == context), active)
        self._api.configuration.retries = False
        self.namespace = namespace or chosen["context"].get("namespace") or "default"

    def runs(self) -> list[Document]:
        found = self._pages(f"{RUNS}/namespaces/{quote(self.namespace, safe='')}/checkpointruns")
        return sorted(found, key=lambda each: str(each["metadata"]["name"]))

    def get(self, path: str) -> Document:
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

    def _document(self, content: bytes) -> Document:
        try:
            found = json.loads(content)
        except ValueError as error:
            raise ClusterUnreachable(
                "the host does not answer as a Kubernetes API", where=self._host
            ) from error
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
            content = bytes(reply.read() or b"")
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterUnreachable(
                f"the API does not answer: {type(error).__name__}: {error}"[:300], where=self._host
            ) from error
        if reply.status >= 400:
            raise self._refused(int(reply.status), content, path)
        return content

    def _refused(self, status: int, content: bytes, path: str) -> Exception:
        try:
            message = str(json.loads(content).get("message", ""))
        except (ValueError, AttributeError):
            message = content.decode("utf-8", "replace")
        message = message[:500] or f"status {status}"
        if status == 404:
            installed = "" if RUNS not in path else "is deltashard installed in this cluster?"
            return NotFound(message, where=path, remedy=installed)
        if status in {401, 403}:
            remedy = "request the role view in the namespace (edit for commands that change something)"
            return RequestDenied(message, where=path, remedy=remedy)
        if status == 429 or status >= 500:
            return ClusterUnreachable(f"{status}: {message}", where=path)
        return RequestDenied(message, where=path)
