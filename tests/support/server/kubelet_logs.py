"""A stand-in for a kubelet's log endpoint, which an API server calls for containers' logs.

It is a real TLS server on loopback, and a Node with its address; use as a context manager.
"""

from __future__ import annotations

import ssl
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

from tests.support.server.apiserver import CertificateAuthority, Rest, put
from tests.support.server.threaded_http import ThreadedHttp

MERGE = "application/merge-patch+json"


class KubeletLogs:
    """Logs by (pod, container), and by (pod, container, "previous") those before its restart."""

    def __init__(self, http: Rest, node: str, folder: Path, logs: dict[tuple[str, ...], str]) -> None:
        self._http, self._node, self.logs = http, node, logs
        self.requested: list[str] = []
        put(folder, CertificateAuthority("kubelet").issue(node))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        outer = self

        class KubeletHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requested.append(self.path)
                parts = urlsplit(self.path)
                _, kind, _, pod, container = parts.path.split("/")
                assert kind == "containerLogs"
                query = parse_qs(parts.query)
                key = (pod, container, *(["previous"] if query.get("previous") == ["true"] else []))
                text = outer.logs.get(key)
                self.send_response(404 if text is None else 200)
                self.end_headers()
                lines = (text or "no such log").splitlines(keepends=True)
                self.wfile.write(
                    "".join(lines[-int(query["tailLines"][0]) :] if "tailLines" in query else lines).encode()
                )

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadedHttp(KubeletHandler, tls=context)

    def __enter__(self) -> Self:
        self._server.start()
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._node}}
        assert self._http("POST", "/api/v1/nodes", node).status == 201
        port = {"kubeletEndpoint": {"Port": self._server.port}}
        status = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": port}
        path = f"/api/v1/nodes/{self._node}/status"
        assert self._http("PATCH", path, {"status": status}, content=MERGE).status == 200
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._http("DELETE", f"/api/v1/nodes/{self._node}")
