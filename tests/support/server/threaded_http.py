"""An HTTP server on loopback, with its thread: the base of test servers with their own handlers."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass  # the client disconnected


class ThreadedHttp:
    """Answers by `handler` on 127.0.0.1:`port`, from `start` to `stop`."""

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], *, tls: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self._server = _QuietServer(("127.0.0.1", port), handler)
        if tls is not None:
            # The connection's own thread does the handshake: a silent client blocks no other.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
