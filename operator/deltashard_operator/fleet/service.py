"""The HTTPS application that sidecars report to: one short connection per report, nothing kept between two of them.

`POST /v1/report` with the pod's projected token; fleet.proto has the messages and the answers. The replica that does
not lead answers 421 before it looks at anything, and one that leads 503 until it has seen all pods. Namespace,
pod and UID of a report must be those of its token; what else it says is for the `ReportHandler` to judge. Everything runs on
the caller's loop, and nothing blocks it.
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
BODY_S = 10.0  # seconds that a body may take
CONNECTIONS, PEER_CONNECTIONS = 512, 16  # at once: with TLS 100 KiB each
CONNECTION_S = 60.0  # seconds that one may last while others come
RETRY_S = 60  # seconds to come again in after a 503, at most; who speaks for a run is nudged besides
TOO_MANY_CONNECTIONS = "too_many_connections"  # outcome of one that is closed as it comes
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
"""Status of each refusal, by its outcome in the metrics."""
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
"""Outcome of the errors that others raise."""
# asyncio reads TLS into a buffer of 256 KiB per connection: a crowd would be 150 MiB for a moment.
sslproto.SSLProtocol.max_size = 16 << 10
_log = structlog.get_logger("deltashard.fleet")


class _Rejection(Exception):
    """A report that is not taken; `args` are the outcome and the sentence for the sidecar."""


class BoundedListener(socket.socket):
    """A listening socket: connections beyond `CONNECTIONS`, or `PEER_CONNECTIONS` of an address, are closed at once.

    So a crowd costs no handshakes, and its sidecars back off. Connections that are too old make room.
    """

    def __init__(self, listening: socket.socket, metrics: FleetMetrics) -> None:
        super().__init__(fileno=listening.detach())
        self._refused = metrics.reports.labels(TOO_MANY_CONNECTIONS)
        self._open: list[tuple[float, str, socket.socket]] = []  # when each came, and from where

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that there is room for; raises `BlockingIOError` when no other waits."""
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
    """Takes reports. Serve its `application` at a `BoundedListener`, with the certificate."""

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
        except Exception as error:  # noqa: BLE001 - one sidecar's trouble; the server goes on
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
        """The ledger's reply; raises `_Rejection` or one of `ERRORS`."""
        if not self._leads():
            raise _Rejection("not_leading", "this replica does not lead: try a new connection")
        if not self._synced():
            raise _Rejection("starting", "not all pods were seen yet: come again when you are asked to")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise _Rejection("no_token", "send the pod's token as `authorization: Bearer TOKEN`")
        identity = await self._reviewer.review(token)
        async with asyncio.timeout(BODY_S):
            message = wire.ReportRequest.FromString(await request.read())
        least, most = FLEET_PROTOCOL
        if not least <= message.protocol <= most:
            raise _Rejection(
                "unsupported_protocol", f"protocols {least} to {most} are spoken, not {message.protocol}"
            )
        value = reports.parse_report(message)
        who = value.who
        if (who.namespace, who.pod, who.pod_uid) != identity:
            raise _Rejection("wrong_pod", f"the token is of pod {identity.namespace}/{identity.pod}")
        return self._handle_report(value)


def _error_response(error: Exception) -> tuple[str, str]:
    """Outcome of an error, and the sentence for the sidecar."""
    if isinstance(error, _Rejection):
        return error.args[0], error.args[1]
    for kind, outcome in ERRORS.items():
        if isinstance(error, kind):
            return outcome, str(error) or "the body did not come whole in time"
    return "failed", "the controller could not take this report"
