"""HTTPS application that sidecars report to: one short, stateless connection per report.

`POST /v1/report` with the pod's projected token; fleet.proto defines messages and status codes. A replica that is not
the leader answers 421 before any other check, and a leader answers 503 until it has seen all pods. Namespace, pod and
UID of a report must match its token; the `ReportHandler` validates the rest. Everything runs on the caller's loop
without blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from asyncio import sslproto
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from aiohttp import web
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_proto.v1 import fleet_pb2 as wire
from google.protobuf.message import DecodeError

from deltashard_operator.fleet import report as reports
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.report import InvalidReport, Reply, ReportHandler, ReportRefused, UnknownPod
from deltashard_operator.fleet.token_review import NotAuthentic, Reviewer, ReviewUnavailable
from deltashard_operator.tls.certificate import Certificate

PATH = "/v1/report"
CONTENT_TYPE = "application/x-protobuf"
MAX_BODY_BYTES = 128 << 10  # a report with 64 incidents of 1,024 characters has 70 KiB
BODY_S = 10.0  # seconds to receive a body
CONNECTIONS, PEER_CONNECTIONS = 512, 16  # concurrent connections, in all and per peer; 100 KiB each with TLS
CONNECTION_S = 60.0  # maximum age in seconds of a connection while others arrive
RETRY_S = 60  # maximum Retry-After in seconds of a 503; reporters are nudged in addition
TOO_MANY_CONNECTIONS = "too_many_connections"  # outcome of a connection that is closed on arrival
OUTCOMES: Mapping[str, int] = {
    "not_leading": 421,
    "starting": 503,
    "no_token": 401,
    "not_authentic": 401,
    "review_unavailable": 503,
    "incomplete": 408,
    "too_large": 413,
    "bad_report": 400,
    "unsupported_protocol": 409,
    "wrong_pod": 403,
    "refused": 403,
    "unknown_pod": 404,
    "failed": 500,
}
"""HTTP status of each rejection, by its outcome in the metrics."""
ERRORS: Mapping[type[Exception], str] = {
    NotAuthentic: "not_authentic",
    ReviewUnavailable: "review_unavailable",
    InvalidReport: "bad_report",
    UnknownPod: "unknown_pod",
    ReportRefused: "refused",
    web.HTTPRequestEntityTooLarge: "too_large",
    TimeoutError: "incomplete",
    ConnectionError: "incomplete",
    web.RequestPayloadError: "incomplete",
    DecodeError: "bad_report",
}
"""Outcome of errors that other components raise."""
# asyncio's TLS read buffer is 256 KiB per connection, 150 MiB with all connections in use.
sslproto.SSLProtocol.max_size = 16 << 10
_log = structlog.get_logger("deltashard.fleet")


class _Rejection(Exception):
    """Rejected report; `args` are the outcome and the message for the sidecar."""


class BoundedListener(socket.socket):
    """Listening socket that closes connections beyond `CONNECTIONS`, or `PEER_CONNECTIONS` per address, on arrival.

    Excess connections then cost no TLS handshakes, and their sidecars back off. Connections older than `CONNECTION_S`
    are closed when new ones arrive.
    """

    def __init__(self, listening: socket.socket, metrics: FleetMetrics) -> None:
        super().__init__(fileno=listening.detach())
        self._refused = metrics.reports.labels(TOO_MANY_CONNECTIONS)
        self._open: list[tuple[float, str, socket.socket]] = []  # arrival time, peer, connection

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next accepted connection within the limits. Raises `BlockingIOError` if none is waiting."""
        while True:
            (connection, address), now_s = super().accept(), time.monotonic()
            self._open = [each for each in self._open if each[2].fileno() >= 0]
            for since_s, _, each in self._open:
                if now_s - since_s > CONNECTION_S:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
            of_peer = sum(peer == address[0] for _, peer, _ in self._open)
            if len(self._open) < CONNECTIONS and of_peer < PEER_CONNECTIONS:
                self._open.append((now_s, address[0], connection))
                return connection, address
            connection.close()
            self._refused.inc()


class ReportServer:
    """Report server. Serve its `application` on a `BoundedListener` with the certificate."""

    def __init__(
        self,
        *,
        handle_report: ReportHandler,
        reviewer: Reviewer,
        certificate: Certificate,
        metrics: FleetMetrics,
        leads: Callable[[], bool] = lambda: True,
        synced: Callable[[], bool] = lambda: True,
    ) -> None:
        self._handle_report = handle_report
        self._reviewer = reviewer
        self._metrics = metrics
        self._leads, self._synced = leads, synced
        self.application = web.Application(client_max_size=MAX_BODY_BYTES)
        self.application.router.add_post(PATH, self._report)
        metrics.serving.set_function(lambda: int(leads() and synced() and certificate.loaded is not None))
        for outcome in ("accepted", TOO_MANY_CONNECTIONS, *OUTCOMES):
            metrics.reports.labels(outcome)

    async def _report(self, request: web.Request) -> web.Response:
        begun_s = time.perf_counter()
        try:
            reply = await self._reply(request)
            outcome, response = "accepted", web.Response(body=reply.SerializeToString())
            response.content_type = CONTENT_TYPE
        except Exception as error:  # noqa: BLE001 - the error of one sidecar's report; the server continues
            outcome, sentence = _error_response(error)
            if outcome == "failed":
                _log.exception("fleet.report_failed", peer=request.remote)
            response = web.Response(status=OUTCOMES[outcome], text=sentence)
            if response.status == 503:
                after_s = random.randint(RETRY_S // 10, RETRY_S)  # noqa: S311 - spread, not secret
                response.headers["Retry-After"] = str(after_s)
        response.force_close()
        self._metrics.reports.labels(outcome).inc()
        self._metrics.seconds.observe(time.perf_counter() - begun_s)
        return response

    async def _reply(self, request: web.Request) -> Reply:
        """Validate a request and return the controller's reply. Raises `_Rejection` or one of `ERRORS`."""
        if not self._leads():
            raise _Rejection("not_leading", "this replica is not the leader: open a new connection")
        if not self._synced():
            raise _Rejection(
                "starting", "the controller has not listed all pods yet: retry as Retry-After asks"
            )
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise _Rejection("no_token", "send the pod's token as `authorization: Bearer TOKEN`")
        identity = await self._reviewer.review(token)
        async with asyncio.timeout(BODY_S):
            message = wire.ReportRequest.FromString(await request.read())
        least, most = FLEET_PROTOCOL
        if not least <= message.protocol <= most:
            raise _Rejection(
                "unsupported_protocol", f"protocols {least} to {most} are supported, not {message.protocol}"
            )
        value = reports.parse_report(message)
        sidecar = value.identity
        if (sidecar.namespace, sidecar.pod, sidecar.pod_uid) != identity:
            raise _Rejection("wrong_pod", f"the token is of pod {identity.namespace}/{identity.pod}")
        return self._handle_report(value)


def _error_response(error: Exception) -> tuple[str, str]:
    """Return the outcome of an error and the message for the sidecar."""
    if isinstance(error, _Rejection):
        return error.args[0], error.args[1]
    for kind, outcome in ERRORS.items():
        if isinstance(error, kind):
            return outcome, str(error) or "the body is incomplete or timed out"
    return "failed", "internal error; see the controller's log"
