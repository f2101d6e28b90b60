"""Faulty servers: a TCP proxy that loses, truncates or delays answers, and an HTTP server with one fixed answer."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Self

from tests.support.server.threaded_http import ThreadedHttp


class FaultyProxy:
    """Forwards 127.0.0.1:`port` to an upstream port, byte for byte, except for the configured faults.

    `lose_acks(n, method)`: the next n answers to that method are dropped and the connection closed, after the
    upstream gave them. `truncate(bytes, n)`: the next n answers to a GET break off after so many bytes. `hang =
    True`: no data passes until `release()`. `rewrite` sees (and may change) every chunk of a request.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.rewrite: Callable[[bytes], bytes] = lambda chunk: chunk
        self.lost = 0
        self.truncated = 0
        self._lose: dict[str, int] = {}
        self._truncate_left = 0
        self._truncate_at = 0
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_sockets = list(self._sockets)
        for one in open_sockets:
            _close(one)
        for thread in self._threads:
            thread.join(10)

    def lose_acks(self, count: int = 1, method: str = "PUT") -> None:
        with self._lock:
            self._lose[method] = count

    def truncate(self, at_bytes: int, count: int = 1) -> None:
        with self._lock:
            self._truncate_at, self._truncate_left = at_bytes, count

    @property
    def hang(self) -> bool:
        return not self._flows.is_set()

    @hang.setter
    def hang(self, hangs: bool) -> None:
        (self._flows.clear if hangs else self._flows.set)()

    def release(self) -> None:
        self.hang = False

    def disconnect(self) -> None:
        with self._lock:
            open_sockets, self._sockets = self._sockets, set()
        for one in open_sockets:
            _close(one)

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                upstream = socket.create_connection(("127.0.0.1", self.upstream_port))
            except OSError:
                _close(client)
                continue
            with self._lock:
                self._sockets |= {client, upstream}
            state = {"method": "", "sent": "0"}
            self._spawn(self._forward_requests, client, upstream, state)
            self._spawn(self._forward_responses, client, upstream, state)

    def _forward_requests(
        self, client: socket.socket, upstream: socket.socket, state: dict[str, str]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(1 << 16):
                method = chunk.split(b" ", 1)[0]
                if method in {b"GET", b"PUT", b"HEAD", b"POST", b"DELETE"} and b"HTTP/1.1\r\n" in chunk:
                    state["method"], state["sent"] = method.decode(), "0"
                self._flows.wait()
                upstream.sendall(self.rewrite(chunk))
        _close(upstream)

    def _forward_responses(
        self, client: socket.socket, upstream: socket.socket, state: dict[str, str]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := upstream.recv(1 << 16):
                with self._lock:
                    if self._lose.get(state["method"], 0) > 0:
                        self._lose[state["method"]] -= 1
                        self.lost += 1
                        break
                    sent = int(state["sent"])
                    truncated = state["method"] == "GET" and self._truncate_left > 0
                    truncated = truncated and sent + len(chunk) > self._truncate_at
                    if truncated:
                        self._truncate_left -= 1
                        self.truncated += 1
                        chunk = chunk[: max(0, self._truncate_at - sent)]
                    state["sent"] = str(sent + len(chunk))
                client.sendall(chunk)
                if truncated:
                    break
        _close(client)
        _close(upstream)


class FixedResponses:
    """An HTTP server that gives every request the same answer, once it has read it."""

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests = 0
        self.received: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers and body of each."""
        self.body = body
        """Tests may change the answer while the server runs."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                outer.requests += 1
                body = outer.body
                request_body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                outer.received.append((self.path, dict(self.headers.items()), request_body))
                self.send_response(status)
                usual = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
                for name, value in (usual | (headers or {})).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadedHttp(Handler, tls=tls)
        self.port = self._http.port

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.stop()


class Trickle:
    """A server that answers any GET with a head and then single bytes at intervals, without end."""

    def __init__(self, interval_s: float) -> None:
        self._ended = ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                while not ended.wait(interval_s):
                    self.wfile.write(b"x")

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadedHttp(Handler)
        self.port = self._http.port

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._http.stop()


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
