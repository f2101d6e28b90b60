"""Client of the controller: one thread that sends reports and handles the replies. Nothing waits for it.

Every call uses a new connection: TLS with the injected authority, the token as currently in its file, no proxy, no
redirects, and `DEADLINE_S` in total. One call is in flight at a time, and a reply after the deadline is dropped: the
next report has the same content. Every failure is counted by cause, and logged when the cause changes.
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
from deltashard_sidecar.fleet.report import SidecarState, needs_report, pod_identity
from deltashard_sidecar.fleet.report_schedule import ReportSchedule
from deltashard_sidecar.telemetry.structured_logging import explain

PATH = "/v1/report"
DEADLINE_S = 10.0
POLL_S = 0.5
LAST_DEADLINE_S = 3.0
"""For the last report, at the end; a reachable controller answers within milliseconds."""
MAX_ANSWER = 1 << 20
MAX_FINISHED_SAVES = 8


class NoToken(Exception):
    """The token file cannot be read."""


CAUSES = {
    401: "unauthenticated",
    403: "denied",
    404: "unknown_pod",
    421: "not_leading",
    429: "busy",
    503: "busy",
}
"""HTTP status -> cause in the metric; any other is `protocol`, or `other` from 500 on."""
FAULTS = (
    (NoToken, "token"),
    (ssl.SSLCertVerificationError, "verification"),
    (DecodeError, "protocol"),
    ((OSError, http.client.HTTPException), "unreachable"),
)
"""Error -> cause in the metric; any other is `other`."""


class ReportClient:
    """The reporting thread; `nudge` may be called from any other."""

    def __init__(self, side: SidecarState) -> None:
        self._side = side
        self._settings = side.settings
        self._log = side.log
        self._metrics = side.metrics
        self._identity = pod_identity(side.settings)
        self._process = secrets.token_hex(8)
        self._sequence = 0
        self._last_request = fleet.ReportRequest()
        self._is_reporter = False
        self._omit_messages = False
        """Whether the last report was rejected as invalid: the next one omits messages, which contain foreign text."""
        self._last_cause = "nothing"
        """Cause of the last report's failure; empty: it was accepted."""
        self._rejected_directive = 0
        self._schedule = ReportSchedule()
        self._nudged = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        self._nudged = True
        self._wake.set()

    def stop(self) -> None:
        """Stop after a last report (with the commit that a closing trainer waited for), within `LAST_DEADLINE_S`."""
        self._stopped = True
        self._wake.set()
        self._thread.join(LAST_DEADLINE_S)

    def _run(self) -> None:
        while not self._stopped:
            self._try(self._poll)
            self._wake.wait(min(POLL_S, max(0.0, self._schedule.due_s - time.monotonic())))
            self._wake.clear()
        if not self._schedule.failures:
            self._try(lambda: self._report(LAST_DEADLINE_S))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - an unexpected error costs a report, never the thread
            cause = next((cause for kind, cause in FAULTS if isinstance(error, kind)), "other")
            if cause == "other" != self._last_cause:
                self._log.error("fleet.unexpected", exc_info=error)
            self._record_failure(0, cause, f"{type(error).__name__}: {error}")

    def _poll(self) -> None:
        self._side.orders.poll()
        now_s = time.monotonic()
        if self._nudged:
            self._nudged = False
            self._schedule = self._schedule.nudged(now_s)
        if needs_report(self._request(), self._last_request):
            self._schedule = self._schedule.changed(now_s)
        if now_s >= self._schedule.due_s:
            self._report(DEADLINE_S)

    def _request(self, *, sent: bool = False) -> fleet.ReportRequest:
        return fleet.ReportRequest(
            protocol=FLEET_PROTOCOL.most,
            process=self._process,
            sequence=self._sequence,
            now_s=time.time(),
            identity=self._identity,
            pod=self._side.pod(),
            incidents=self._side.incidents.pending(sent=sent),
            save_results=self._side.orders.finished()[:MAX_FINISHED_SAVES],
        )

    def _report(self, deadline_s: float) -> None:
        self._sequence += 1
        request = self._request(sent=True)
        if self._side.is_reporter or self._is_reporter:
            request.run.CopyFrom(self._side.run())
        if self._omit_messages:
            for each in request.incidents:
                each.message = ""
        token = self._token()
        status, retry_after_s, body = self._post(request.SerializeToString(), token, deadline_s)
        if status == http.HTTPStatus.OK:
            self._handle_reply(request, fleet.ReportReply.FromString(body))
            return
        self._omit_messages |= status in (400, 413)
        why = body[:500].decode(errors="replace")
        cause = CAUSES.get(status, "protocol" if status < http.HTTPStatus.INTERNAL_SERVER_ERROR else "other")
        self._record_failure(status, cause, why, retry_after_s)
        if status == http.HTTPStatus.UNAUTHORIZED and self._token() != token:
            self._nudged = True  # the token was replaced meanwhile

    def _token(self) -> str:
        path = self._settings.fleet_token_file
        try:
            return "" if path is None else path.read_text().strip()
        except (OSError, ValueError) as error:
            raise NoToken(error) from error

    def _post(self, body: bytes, token: str, deadline_s: float) -> tuple[int, float, bytes]:
        """Send a report; returns (status, Retry-After, body) of the reply."""
        began_s, to = time.monotonic(), urlsplit(f"//{self._settings.fleet}")
        headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/x-protobuf",
            "connection": "close",
        }
        context = ssl.create_default_context(cadata=self._settings.fleet_ca or None)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # a user's authority might violate RFC 5280
        call = http.client.HTTPSConnection(to.hostname or "", to.port, timeout=deadline_s, context=context)
        try:
            call.request("POST", PATH, body, headers)
            answer = call.getresponse()
            after, found = answer.getheader("retry-after", ""), answer.read(MAX_ANSWER)
        finally:
            call.close()
        if time.monotonic() - began_s > deadline_s:
            raise TimeoutError(f"the reply took longer than {deadline_s} s")
        return answer.status, float(after) if after.isdecimal() else 0.0, found

    def _handle_reply(self, request: fleet.ReportRequest, reply: fleet.ReportReply) -> None:
        self._schedule = self._schedule.accepted(reply.next_s, time.monotonic())
        if self._last_cause:
            self._log.info("fleet.reported", controller=self._settings.fleet, next_s=reply.next_s)
        self._metrics.fleet_connected.set(1)
        self._last_request, self._is_reporter, self._omit_messages, self._last_cause = (
            request,
            reply.report_run,
            False,
            "",
        )
        self._side.incidents.acknowledge(reply.acknowledged_incident)
        self._side.orders.handle_reply(reply.saves, {each.id for each in request.save_results})
        if reply.HasField("directive") and reply.directive.id != self._rejected_directive:
            try:
                self._side.apply_directive(policy.received(reply.directive, self._settings.workload_uid))
            except DeltashardError as error:
                self._rejected_directive = reply.directive.id
                self._log.error("directive.rejected", **explain(error))
        self._wake.set()  # the reply may have caused changes to report

    def _record_failure(self, status: int, cause: str, why: str, retry_after_s: float = 0.0) -> None:
        """Count a failure, and log it if the cause is new: an unreachable controller is logged once."""
        self._schedule = self._schedule.failed(status, time.monotonic(), retry_after_s=retry_after_s)
        self._side.incidents.acknowledge(0)
        self._metrics.fleet_connected.set(0)
        self._metrics.fleet_report_failures.labels(cause).inc()
        if cause != self._last_cause:
            self._last_cause = cause
            self._log.warning("fleet.report_failed", cause=cause, why=why, controller=self._settings.fleet)
