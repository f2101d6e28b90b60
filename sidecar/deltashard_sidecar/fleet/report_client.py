"""The client of the controller: one thread that reports, and takes what is answered. Nothing waits for it.

Every call is a connection of its own: TLS against the injected authority, the token as the file holds it now, no proxy,
no redirect, `DEADLINE_S` for all of it. One is under way at a time, and an answer that comes later is dropped: the next
report says it all again. Whatever goes wrong is counted by cause, and logged when the cause changes; `report_schedule`
says when to come again. Without a controller training, saves and restores go on, under the newest commit's directive.
"""

from __future__ import annotations

import http.client
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_proto.v1 import fleet_pb2 as fleet
from google.protobuf.message import DecodeError

from deltashard_sidecar import policy
from deltashard_sidecar.fleet.report import SidecarState, is_news, who
from deltashard_sidecar.fleet.report_schedule import Answer, ReportSchedule
from deltashard_sidecar.save_orders import SaveOrders
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.incident import Incidents
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

PATH = "/v1/report"
DEADLINE_S = 10.0
LOOK_S = 0.5
"""Between looks whether there is news."""
LAST_DEADLINE_S = 3.0
"""For the last report, at the end; a controller that listens takes milliseconds."""
MAX_ANSWER = 1 << 20
MAX_OVER = 8
"""Ends of ordered saves in one report."""

CAUSES = {
    401: "unauthenticated",
    403: "denied",
    404: "unknown_pod",
    421: "not_leading",
    429: "busy",
    503: "busy",
}
"""Of the metric, by the answer's status; others are `protocol`."""


class _NotReported(Exception):
    """There is no answer, and this is why: a cause of the metric and a sentence."""

    def __init__(self, cause: str, why: object) -> None:
        super().__init__(str(why))
        self.cause = cause


class ReportClient:
    """The thread; `nudge` may be called from any other."""

    def __init__(
        self,
        settings: Settings,
        state: SidecarState,
        *,
        incidents: Incidents,
        orders: SaveOrders,
        follow: Callable[[fleet.Directive], None],
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._state = state
        self._incidents = incidents
        self._orders = orders
        self._follow = follow
        self._metrics = metrics
        self._log = log
        self._who = who(settings)
        self._process = secrets.token_hex(8)
        self._sequence = 0
        self._told = fleet.ReportRequest()
        """The last report that was taken."""
        self._speaks = False
        self._bare = False
        """The last report was no report to the controller: what is of the outside in it stays out of the next."""
        self._said = "nothing"
        """How the last report ended: a cause, or empty when it was taken."""
        self._refused = 0
        """The directive that was refused last."""
        self._schedule = ReportSchedule()
        self._nudged = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Report now."""
        self._nudged = True
        self._wake.set()

    def stop(self) -> None:
        """Tell the last news (the commit that a closing trainer waited for), within a moment."""
        self._stopped = True
        self._wake.set()
        self._thread.join(LAST_DEADLINE_S)

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - what nobody foresaw costs reports, never the thread
                self._failed("other", error)
            self._wake.wait(min(LOOK_S, max(0.0, self._schedule.due_s - time.monotonic())))
            self._wake.clear()
        if not self._schedule.failures:
            self._orders.look()
            self._report(LAST_DEADLINE_S)

    def _look(self) -> None:
        self._orders.look()
        now_s = time.monotonic()
        if self._nudged:
            self._nudged = False
            self._schedule = self._schedule.nudged(now_s)
        if is_news(self._request(), self._told):
            self._schedule = self._schedule.changed(now_s)
        if now_s >= self._schedule.due_s:
            self._report(DEADLINE_S)

    def _request(self, *, sent: bool = False) -> fleet.ReportRequest:
        return fleet.ReportRequest(
            pod=self._state.pod(),
            incidents=self._incidents.kept(sent=sent),
            saves_over=self._orders.over()[:MAX_OVER],
        )

    def _report(self, deadline_s: float) -> None:
        self._sequence += 1
        request = self._request(sent=True)
        request.protocol, request.process = FLEET_PROTOCOL.most, self._process
        request.sequence, request.now_s = self._sequence, time.time()
        request.who.CopyFrom(self._who)
        if self._state.speaks or self._speaks:
            request.run.CopyFrom(self._state.run())
        if self._bare:
            for each in request.incidents:
                each.message = ""
        try:
            token = self._token()
            status, retry_after_s, body = self._posted(request.SerializeToString(), token, deadline_s)
            if status == http.HTTPStatus.OK:
                self._taken(request, body)
                return
            answer = Answer(
                status=status,
                retry_after_s=retry_after_s,
                token_changed=status == http.HTTPStatus.UNAUTHORIZED and self._token() != token,
            )
        except _NotReported as error:
            self._failed(error.cause, error)
            return
        self._bare |= status in (400, 413)
        self._failed(CAUSES.get(status, "protocol"), body[:500].decode(errors="replace"), answer)

    def _token(self) -> str:
        path = self._settings.fleet_token_file
        try:
            return "" if path is None else path.read_text().strip()
        except (OSError, ValueError) as error:
            raise _NotReported("token", error) from error

    def _posted(self, body: bytes, token: str, deadline_s: float) -> tuple[int, float, bytes]:
        """(status, Retry-After, body) of the answer."""
        to = urlsplit(f"//{self._settings.fleet}")
        headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/x-protobuf",
            "connection": "close",
        }
        began_s = time.monotonic()
        try:
            context = ssl.create_default_context(cadata=self._settings.fleet_ca or None)
            context.verify_flags &= (
                ~ssl.VERIFY_X509_STRICT
            )  # a user's own authority may be of before RFC 5280
            connection = http.client.HTTPSConnection(
                to.hostname or "", to.port, timeout=deadline_s, context=context
            )
            try:
                connection.request("POST", PATH, body, headers)
                answer = connection.getresponse()
                found = answer.status, _seconds(answer.getheader("retry-after")), answer.read(MAX_ANSWER)
            finally:
                connection.close()
            if time.monotonic() - began_s > deadline_s:
                raise TimeoutError("the answer came too late")
        except ssl.SSLCertVerificationError as error:
            raise _NotReported("verification", error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _NotReported("unreachable", error) from error
        return found

    def _taken(self, request: fleet.ReportRequest, body: bytes) -> None:
        try:
            reply = fleet.ReportReply.FromString(body)
        except DecodeError as error:
            raise _NotReported("protocol", error) from error
        if reply.sequence != request.sequence:
            raise _NotReported("protocol", f"report {request.sequence} was answered as {reply.sequence}")
        answer = Answer(status=http.HTTPStatus.OK, next_s=reply.next_s)
        self._schedule = self._schedule.answered(answer, time.monotonic())
        if self._said:
            self._log.info("fleet.reported", controller=self._settings.fleet, next_s=reply.next_s)
        self._metrics.fleet_connected.set(1)
        self._told, self._speaks, self._bare, self._said = request, reply.speaks, False, ""
        self._incidents.told(reply.told)
        self._orders.answered(reply.saves, {each.id for each in request.saves_over})
        if reply.HasField("directive") and reply.directive.id != self._refused:
            try:
                self._follow(policy.received(reply.directive, self._settings.workload_uid))
            except DeltashardError as error:
                self._refused = reply.directive.id
                self._log.error("directive.refused", **explain(error))
        self._wake.set()  # what the answer brought may be news

    def _failed(self, cause: str, why: object, answer: Answer | None = None) -> None:
        """Counted each time, and said once per cause: a controller that is away for days is one line."""
        self._schedule = self._schedule.answered(answer or Answer(), time.monotonic())
        self._incidents.told(0)
        self._metrics.fleet_connected.set(0)
        self._metrics.fleet_refusals.labels(cause).inc()
        if cause != self._said:
            self._said = cause
            self._log.warning("fleet.refused", cause=cause, why=str(why), controller=self._settings.fleet)


def _seconds(text: str | None) -> float:
    """Of a Retry-After; 0: there is none, or it is no number."""
    return float(text) if text is not None and text.isdecimal() else 0.0
