"""A forward proxy, as in a corporate network: CONNECT for TLS, whole URLs for plain http; it records all requests."""

from __future__ import annotations

import base64
import contextlib
import http.client
import select
import socket
from http.server import BaseHTTPRequestHandler
from typing import Self
from urllib.parse import urlsplit

from tests.support.server.threaded_http import ThreadedHttp


class ForwardProxy:
    """A proxy on 127.0.0.1:`port`. It resolves `*.localhost` itself, as a corporate proxy resolves internal names."""

    def __init__(self, *, login: str = "") -> None:
        """Create the proxy; `login` is the user:password that it requires."""
        self.tunnels: list[str] = []
        """host:port of each CONNECT."""
        self.requests: list[str] = []
        """Method and URL of each plain request."""
        outer = self
        wanted = "Basic " + base64.b64encode(login.encode()).decode() if login else ""

        class ForwardHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def refused(self) -> bool:
                if wanted and self.headers.get("Proxy-Authorization") != wanted:
                    self.send_error(407)
                    return True
                return False

            def do_CONNECT(self) -> None:
                if self.refused():
                    return
                outer.tunnels.append(self.path)
                host, _, port = self.path.rpartition(":")
                try:
                    upstream = socket.create_connection((_known(host), int(port)))
                except OSError:
                    self.send_error(502)
                    return
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                with upstream:
                    _splice(self.connection, upstream)

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                if self.refused():
                    return
                outer.requests.append(f"{self.command} {self.path}")
                parts = urlsplit(self.path)
                upstream = http.client.HTTPConnection(_known(parts.hostname or ""), parts.port or 80)
                with contextlib.closing(upstream):
                    headers = {k: v for k, v in self.headers.items() if not k.lower().startswith("proxy-")}
                    upstream.request(
                        self.command, parts._replace(scheme="", netloc="").geturl(), body or None, headers
                    )
                    answer = upstream.getresponse()
                    content = answer.read()
                self.send_response_only(answer.status, answer.reason)
                for name, value in answer.getheaders():
                    if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadedHttp(ForwardHandler)
        self.port = self._http.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.stop()


def _known(host: str) -> str:
    return "127.0.0.1" if host == "localhost" or host.endswith(".localhost") else host


def _splice(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            for ready in select.select([one, other], [], [])[0]:
                some = ready.recv(1 << 16)
                if not some:
                    return
                (other if ready is one else one).sendall(some)
