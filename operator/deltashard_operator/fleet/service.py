"""The HTTPS application that sidecars report to: one short connection per report, nothing kept between two of them.

`POST /v1/report` with the pod's projected token; fleet.proto has the messages and the answers. The replica that does
not lead answers 421 before it looks at anything, and one that leads 503 until it has seen all pods. Namespace,
pod and UID of a report must be those of its token; what else it says is for the `Ledger` to judge. Everything runs on
the caller's loop, and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import sslproto
from collections.abc import Callable, Mapping

import structlog
from aiohttp import web
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_proto.v1 import fleet_pb2 as wire
from google.protobuf.message import DecodeError

from deltashard_operator.fleet import report as reports
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.report import BadReport, Ledger, Refused, Reply, Unknown
from deltashard_operator.fleet.token_review import NotAuthentic, Reviewer, ReviewUnavailable, TooManyReviews
from deltashard_operator.tls.certificate import Certificate

PATH = "/v1/report"
CONTENT_TYPE = "application/x-protobuf"
MAX_BODY_BYTES = 128 << 10  # a report with 64 incidents of 1,024 characters has 70 KiB
BODY_S = 10.0  # seconds that a body may take
CONNECTION_S = 30.0  # seconds that a connection may last: up to twice as long
RETRY_S = {429: 10, 503: 60}  # seconds to come again in, at most; who speaks for a run is nudged besides
OUTCOMES: Mapping[str, int] = {
    "not_leading": 421,
    "starting": 503,
    "no_token": 401,
    "not_authentic": 401,
    "too_many_reviews": 429,
    "review_unavailable": 503,
    "incomplete": 408,
    "too_large": 413,
    "bad_report": 400,
    "no_protocol": 409,
    "wrong_pod": 403,
    "refused": 403,
    "unknown_pod": 404,
    "failed": 500,
}
"""Status of each refusal, by its outcome in the metrics."""
ERRORS: Mapping[type[Exception], str] = {
    NotAuthentic: "not_authentic",
    TooManyReviews: "too_many_reviews",
    ReviewUnavailable: "review_unavailable",
    BadReport: "bad_report",
    Unknown: "unknown_pod",
    Refused: "refused",
    web.HTTPRequestEntityTooLarge: "too_large",
    TimeoutError: "incomplete",
    ConnectionError: "incomplete",
    web.RequestPayloadError: "incomplete",
    DecodeError: "bad_report",
}
"""Outcome of the errors that others raise."""
# asyncio reads TLS into a buffer of 256 KiB per connection: a crowd of a thousand would be 300 MiB for a moment.
sslproto.SSLProtocol.max_size = 16 << 10
_log = structlog.get_logger("deltashard.fleet")


class _Rejection(Exception):
    """A report that is not taken; `args` are the outcome and the sentence for the sidecar."""


class ReportServer:
    """Takes reports. Serve its `application` with the certificate, and run `close_old` as a task."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        reviewer: Reviewer,
        certificate: Certificate,
        metrics: FleetMetrics,
        leads: Callable[[], bool] = lambda: True,
        synced: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ledger = ledger
        self._reviewer = reviewer
        self._metrics = metrics
        self._leads, self._synced = leads, synced
        self.application = web.Application(client_max_size=MAX_BODY_BYTES)
        self.application.router.add_post(PATH, self._report)
        metrics.serving.set_function(lambda: int(leads() and synced() and certificate.loaded is not None))
        for outcome in ("taken", *OUTCOMES):
            metrics.reports.labels(outcome)

    async def close_old(self, runner: web.AppRunner) -> None:
        """Close connections that last longer than any report needs, for ever."""
        before: set[object] = set()
        while True:
            await asyncio.sleep(CONNECTION_S)
            connections = runner.server.connections if runner.server is not None else []
            for each in connections:
                if each in before:
                    each.force_close()
            before = set(connections)

    async def _report(self, request: web.Request) -> web.Response:
        begun_s = time.perf_counter()
        try:
            reply = await self._reply(request)
            outcome, response = "taken", web.Response(body=reply.SerializeToString())
            response.content_type = CONTENT_TYPE
        except Exception as error:  # noqa: BLE001 - one sidecar's trouble; the server goes on
            outcome, sentence = _refusal(error)
            if outcome == "failed":
                _log.exception("fleet.report_failed", peer=request.remote)
            response = web.Response(status=OUTCOMES[outcome], text=sentence)
            if (longest_s := RETRY_S.get(response.status, 0)) > 0:
                after_s = random.randint(longest_s // 10, longest_s)  # noqa: S311 - spread, not secret
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
        identity = await self._reviewer.review(token, request.remote or "")
        async with asyncio.timeout(BODY_S):
            message = wire.ReportRequest.FromString(await request.read())
        least, most = FLEET_PROTOCOL
        if not least <= message.protocol <= most:
            raise _Rejection("no_protocol", f"protocols {least} to {most} are spoken, not {message.protocol}")
        value = reports.report_of(message)
        who = value.who
        if (who.namespace, who.pod, who.pod_uid) != identity:
            raise _Rejection("wrong_pod", f"the token is of pod {identity.namespace}/{identity.pod}")
        return self._ledger(value)


def _refusal(error: Exception) -> tuple[str, str]:
    """Outcome of an error, and the sentence for the sidecar."""
    if isinstance(error, _Rejection):
        return error.args[0], error.args[1]
    for kind, outcome in ERRORS.items():
        if isinstance(error, kind):
            return outcome, str(error) or "the body did not come whole in time"
    return "failed", "the controller could not take this report"
