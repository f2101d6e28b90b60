"""An S3 proxy that injects faults of networks and object stores, in front of a real server.

The proxy handles HTTP requests one by one: `choose` selects an `S3Fault` for each `ProxyRequest` (its kind, its
key, its number within the kind). A client may observe each fault with a correct store behind a network:

- `REFUSED`: 503 SlowDown, the request had no effect. `EXPIRED`: 403 ExpiredToken.
- `LOST`: the request took effect, and the connection broke before the answer.
- `DOUBLED`: the network delivered the request twice; the client gets the second answer.
- `LATE`: the connection broke, and the request arrives after later ones (`flush_delayed` delivers the rest).
- `TRUNCATED`: the body broke off in the middle, that of a PUT to the server, that of any other request to the client.
- `FLIPPED`: one bit of the body was wrong: that of a PUT to the server, that of an object to the client.
- `HUNG`: no answer arrives until other requests have passed, or `release()`.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit


class S3Fault(StrEnum):
    """The possible faults of a request; the module docstring describes them."""

    REFUSED = "refused"
    EXPIRED = "expired"
    LOST = "lost"
    DOUBLED = "doubled"
    LATE = "late"
    TRUNCATED = "truncated"
    FLIPPED = "flipped"
    HUNG = "hung"


APPLIES: Mapping[str, tuple[S3Fault, ...]] = {
    "put": tuple(S3Fault),
    "create": tuple(S3Fault),
    "get": (S3Fault.REFUSED, S3Fault.EXPIRED, S3Fault.LOST, S3Fault.TRUNCATED, S3Fault.FLIPPED, S3Fault.HUNG),
    "list": (S3Fault.REFUSED, S3Fault.EXPIRED, S3Fault.LOST, S3Fault.TRUNCATED, S3Fault.HUNG),
    "head": (S3Fault.REFUSED, S3Fault.LOST, S3Fault.HUNG),
    "delete": (S3Fault.REFUSED, S3Fault.EXPIRED, S3Fault.LOST, S3Fault.DOUBLED),
}
_ERROR = "<Error><Code>{}</Code><Message>by the proxy of the tests</Message></Error>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """The proxy's view of a request."""

    kind: str
    """put, create (If-None-Match), get, list, head, delete."""
    key: str
    """Key in the bucket; the prefix for a listing."""
    number: int
    """Number of earlier requests of its kind."""


Choice = Callable[[ProxyRequest], S3Fault | None]


def by_seed(seed: int, rate: float) -> Choice:
    """Return a choice that gives about `rate` of all requests a fault, by `seed`. A refusal lasts for three requests."""

    def chosen(request: ProxyRequest, number: int) -> S3Fault | None:
        chance = random.Random(f"{seed}/{request.kind}/{number}")
        return chance.choice(APPLIES[request.kind]) if chance.random() < rate else None

    def choose(request: ProxyRequest) -> S3Fault | None:
        before = range(max(0, request.number - 2), request.number)
        if any(chosen(request, number) is S3Fault.REFUSED for number in before):
            return S3Fault.REFUSED
        return chosen(request, request.number)

    return choose


class FaultyS3Proxy:
    """The proxy on 127.0.0.1:`port`, in front of an upstream port; thread-safe."""

    def __init__(self, upstream_port: int, choose: Choice | None = None) -> None:
        self.upstream_port = upstream_port
        self.choose: Choice = choose or (lambda _request: None)
        self.injected: Counter[tuple[str, S3Fault]] = Counter()
        """(kind, fault) -> count."""
        self.requests: list[ProxyRequest] = []
        self._lock = threading.Condition()
        self._numbers: Counter[str] = Counter()
        self._flipped: set[str] = set()
        self._delayed: list[Callable[[], object]] = []
        self._released = 0
        self._closed = False
        self._server = _ProxyServer(("127.0.0.1", 0), _ProxyHandler)
        self._server.proxy = self
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def disable_faults(self) -> None:
        """Stop all new faults; hung requests continue, late ones arrive."""
        self.choose = lambda _request: None
        self.release()
        self.flush_delayed()

    def flush_delayed(self) -> None:
        with self._lock:
            late, self._delayed = self._delayed, []
        for arrive in late:
            arrive()

    def release(self) -> None:
        with self._lock:
            self._released += 1
            self._lock.notify_all()

    def choose_fault(self, kind: str, key: str) -> tuple[ProxyRequest, S3Fault | None]:
        """Number a request and choose its fault; a late one may arrive before it."""
        with self._lock:
            request = ProxyRequest(kind=kind, key=key, number=self._numbers[kind])
            self._numbers[kind] += 1
            self.requests.append(request)
            fault = self.choose(request)
            if fault is S3Fault.FLIPPED and kind == "get":
                # A network that flips the same object's bits twice would be indistinguishable from a damaged object.
                fault = None if key in self._flipped else fault
                self._flipped.add(key)
            if fault is not None:
                self.injected[kind, fault] += 1
            arriving = self._delayed.pop(0) if self._delayed and len(self.requests) % 3 == 0 else None
            self._lock.notify_all()
        if arriving is not None:
            arriving()
        return request, fault

    def hang(self) -> None:
        """Wait for six other requests, `release` or the end of the proxy, two seconds at most."""
        with self._lock:
            seen, released = len(self.requests), self._released

            def released_or_passed() -> bool:
                return self._closed or self._released > released or len(self.requests) - seen >= 6

            self._lock.wait_for(released_or_passed, 2.0)

    def delay(self, arrive: Callable[[], object]) -> None:
        with self._lock:
            self._delayed.append(arrive)


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultyS3Proxy

    def handle_error(self, *_: object) -> None:
        pass  # the client disconnected


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _ProxyServer
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        kind = {"PUT": "put", "HEAD": "head", "POST": "delete", "DELETE": "delete"}.get(self.command, "get")
        if kind == "put" and self.headers.get("If-None-Match"):
            kind = "create"
        if kind == "get" and not key:
            kind, key = "list", query.get("prefix", [""])[0]
        _request, fault = proxy.choose_fault(kind, key)
        writes = kind in {"put", "create"}
        match fault:
            case S3Fault.REFUSED | S3Fault.EXPIRED:
                code = "SlowDown" if fault is S3Fault.REFUSED else "ExpiredToken"
                self._answer(503 if fault is S3Fault.REFUSED else 403, {}, _ERROR.format(code).encode())
            case S3Fault.LOST:
                self._forward(body)
                self._break()
            case S3Fault.LATE:
                late = (self.command, self.path, body, dict(self.headers.items()))
                proxy.delay(lambda: _send(proxy.upstream_port, *late))
                self._break()
            case S3Fault.TRUNCATED if writes:
                _send_half(proxy.upstream_port, self.command, self.path, body, dict(self.headers.items()))
                self._break()
            case S3Fault.TRUNCATED:
                status, headers, data = self._forward(body)
                self._answer(status, headers, data, truncated=True)
            case S3Fault.FLIPPED if writes:
                self._answer(*self._forward(_flipped(body)))
            case S3Fault.FLIPPED:
                status, headers, data = self._forward(body)
                self._answer(status, headers, _flipped(data) if status in {200, 206} else data)
            case S3Fault.DOUBLED:
                self._forward(body)
                self._answer(*self._forward(body))
            case _:
                if fault is S3Fault.HUNG:
                    proxy.hang()
                self._answer(*self._forward(body))

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        port = self.server.proxy.upstream_port
        return _send(port, self.command, self.path, body, dict(self.headers.items()))

    def _answer(
        self, status: int, headers: Mapping[str, str], data: bytes, *, truncated: bool = False
    ) -> None:
        if status == 0:  # the server itself stopped
            self._break()
            return
        self.send_response_only(status)
        kept = {"Content-Type": "application/xml", **headers}
        length = kept.get("Content-Length") if self.command == "HEAD" else str(len(data))
        for name, value in kept.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if truncated else data)
        self.wfile.flush()
        if truncated:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _send(
    port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """Forward a request and return the server's answer; status 0 without an answer."""
    upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        upstream.request(method, path, body=body or None, headers=dict(headers))
        answer = upstream.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    except (OSError, http.client.HTTPException):
        return 0, {}, b""
    finally:
        upstream.close()


def _send_half(port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a request whose connection breaks in the middle of its body."""
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in headers.items()
    )
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as upstream:
        upstream.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])


def _flipped(data: bytes) -> bytes:
    """Flip one bit, always the same one of equal bytes."""
    if not data:
        return data
    chance = random.Random(len(data))
    wrong = bytearray(data)
    wrong[chance.randrange(len(wrong))] ^= 1 << chance.randrange(8)
    return bytes(wrong)
