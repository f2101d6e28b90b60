"""The stream to the controller: heartbeats out, directives in. Nothing waits for it; without it everything goes on.

    fleet thread     connect, read replies, sleep the back-off, connect again, until `stop`
    sending thread   (gRPC's own, one a stream) asks for a heartbeat twice a second and sends it when it is worth it

A stream begins with a new channel (TLS against the injected authority, the token as the file holds it now) and ends
with it, so nothing outlives a stream and a controller that moved is found again. Whatever goes wrong (no token, an
authority that does not fit, a refusal) is counted by cause, logged when the cause changes, and tried again after
`heartbeat.BACKOFF`. A stream that is silently dead ends by gRPC's keepalive, or when it outlived the time after which
the controller would have ended it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.process import version
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1.fleet_pb2_grpc import FleetStub

from deltashard_sidecar import policy
from deltashard_sidecar.fleet import heartbeat
from deltashard_sidecar.fleet.heartbeat import BACKOFF, HeartbeatPace, failures_after
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

LOOK_S = 0.5
"""Between looks whether a heartbeat is worth sending."""
WELCOME_DEADLINE_S = 30.0
"""From connecting to Welcome; beyond it the controller counts as away."""
MARGIN_S = 120.0
"""A stream is ended from here so long after the controller should have ended it."""
LONGEST_STREAM_S = 6 * 3600.0
NEWS_DEADLINE_S = 3.0
"""For the last heartbeat, at the end; a controller that reads takes milliseconds."""
STOP_DEADLINE_S = 1.0

_OPTIONS = (
    # A channel is one stream's: never a broken connection of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    # Pods often have proxy variables for the outside; the controller is inside.
    ("grpc.enable_http_proxy", 0),
    # The service allows it; a lost node of the controller's is noticed in a minute and a half.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 1 << 20),
)

_CODES = {
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "denied",
    grpc.StatusCode.NOT_FOUND: "unknown_pod",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "no_room",
    grpc.StatusCode.ABORTED: "replaced",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "unreachable",
    grpc.StatusCode.CANCELLED: "unreachable",
    grpc.StatusCode.UNIMPLEMENTED: "protocol",
    grpc.StatusCode.FAILED_PRECONDITION: "protocol",
    grpc.StatusCode.INVALID_ARGUMENT: "protocol",
}
_UNTRUSTED = ("tsi_protocol_failure", "certificate", "verification")
"""A handshake that merely broke (the controller restarts) says none of these."""


def refusal(code: grpc.StatusCode, details: str) -> str:
    """Why a stream was not taken in, one of `metric.FLEET_CAUSES`."""
    if code == grpc.StatusCode.UNAVAILABLE and any(word in details.lower() for word in _UNTRUSTED):
        return "verification"
    return _CODES.get(code, "other")


@dataclass(slots=True, kw_only=True, eq=False)
class _ClientStream:
    """One connection's state, shared by the two threads."""

    begun_s: float
    pace: HeartbeatPace = field(default_factory=HeartbeatPace)
    welcomed: threading.Event = field(default_factory=threading.Event)
    ends_s: float = 0.0
    over: bool = False
    finishing: bool = False
    wake: threading.Event = field(default_factory=threading.Event)
    call: Any = None

    def end(self) -> None:
        """No more heartbeats: the sending thread goes."""
        self.over = True
        self.wake.set()

    def finish(self) -> None:
        """One more heartbeat if there is news, then this side is done."""
        self.finishing = True
        self.wake.set()

    def cancel(self) -> None:
        """End it from here, at once."""
        self.end()
        if self.call is not None:
            self.call.cancel()


class Fleet:
    """The client; `beat`, `follow`, `save_now`, and `acknowledge` are the sidecar's."""

    def __init__(
        self,
        settings: Settings,
        *,
        beat: Callable[[], fleet.Heartbeat],
        follow: Callable[[fleet.Directive], None],
        save_now: Callable[[fleet.SaveRequested], object],
        acknowledge: Callable[[int], None],
        metrics: Metrics,
        log: Logger,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._settings = settings
        self._beat = beat
        self._follow = follow
        self._save_now = save_now
        self._acknowledge = acknowledge
        self._metrics = metrics
        self._log = log
        self._backoff = backoff
        self._hello = heartbeat.hello(
            settings,
            version=version(),
            process=secrets.token_hex(8),
            started_at_s=time.time(),
        )
        self._stopped = threading.Event()
        self._stream: _ClientStream | None = None
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def stop(self) -> None:
        """Say the last news (the commit that a closing trainer waited for) and end the stream, within a moment."""
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            if stream.welcomed.is_set():
                stream.finish()
                self._thread.join(NEWS_DEADLINE_S)
            stream.cancel()
        if self._thread.is_alive():
            self._thread.join(STOP_DEADLINE_S)

    def _run(self) -> None:
        first, failures = True, 0
        while not self._stopped.is_set():
            if not first:
                self._metrics.fleet_reconnects.inc()
            first = False
            welcomed, cause = self._connect()
            if cause and not self._stopped.is_set():
                self._metrics.fleet_refusals.labels(cause).inc()
            failures = failures_after(failures, welcomed=welcomed, lasting=cause in heartbeat.LASTING)
            self._stopped.wait(self._backoff.delay_s(failures))

    def _connect(self) -> tuple[bool, str]:
        """One stream, from connecting to its end; (whether it was taken in, why not)."""
        settings = self._settings
        try:
            token = "" if settings.fleet_token_file is None else settings.fleet_token_file.read_text().strip()
        except (OSError, ValueError) as error:
            self._say("token", str(error))
            return False, "token"
        credentials = grpc.ssl_channel_credentials(settings.fleet_ca.encode() or None)
        stream = _ClientStream(begun_s=time.monotonic())
        cause, why = "", "the controller ended the stream"
        with grpc.secure_channel(settings.fleet, credentials, options=_OPTIONS) as channel:
            try:
                stub = FleetStub(channel)  # type: ignore[no-untyped-call]  # generated
                stream.call = stub.Report(
                    self._requests(stream),
                    metadata=(("authorization", f"Bearer {token}"),),
                    timeout=LONGEST_STREAM_S,
                )
                self._stream = stream
                if self._stopped.is_set():
                    stream.cancel()
                for reply in stream.call:
                    self._take(stream, reply)
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
                why = (error.details() if isinstance(error, grpc.Call) else str(error)) or ""
                cause = refusal(code, why)
                why = f"{code.name}: {why}"
            finally:
                stream.end()
                self._stream = None
                self._metrics.fleet_connected.set(0)
        welcomed = stream.welcomed.is_set()
        if welcomed:
            self._log.info("fleet.ended", why=why, after_s=round(time.monotonic() - stream.begun_s, 1))
            return True, ""
        self._say(cause or "protocol", why)
        return False, cause or "protocol"

    def _say(self, cause: str, why: str) -> None:
        """Once per cause: a controller that is away for days is one line."""
        if cause != self._said and not self._stopped.is_set():
            self._said = cause
            self._log.warning("fleet.refused", cause=cause, why=why, controller=self._settings.fleet)

    def _requests(self, stream: _ClientStream) -> Iterator[fleet.ReportRequest]:
        """What is sent; runs on a thread of gRPC's that ends with this generator."""
        yield fleet.ReportRequest(hello=self._hello)
        until_s = stream.begun_s + WELCOME_DEADLINE_S
        while not stream.welcomed.wait(LOOK_S):
            if stream.over:
                return
            if time.monotonic() >= until_s:
                stream.cancel()
                return
        while not stream.over:
            now_s = time.monotonic()
            if now_s >= stream.ends_s:
                stream.cancel()
                return
            last = stream.finishing
            beat = self._beat()
            if stream.pace.due(beat, now_s) or (last and heartbeat.news(beat) != stream.pace.sent):
                yield fleet.ReportRequest(heartbeat=beat)
                stream.pace = stream.pace.after(beat, now_s)
            if last:
                return
            stream.wake.wait(LOOK_S)

    def _take(self, stream: _ClientStream, reply: fleet.ReportReply) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "welcome":
            welcome = reply.welcome
            stream.pace = stream.pace.asked(welcome.heartbeat_s)
            lives_s = min(welcome.reauthenticate_s or LONGEST_STREAM_S, LONGEST_STREAM_S) + MARGIN_S
            stream.ends_s = time.monotonic() + lives_s
            self._said = ""
            self._metrics.fleet_connected.set(1)
            self._log.info(
                "fleet.connected", controller=self._settings.fleet, heartbeat_s=welcome.heartbeat_s
            )
            stream.welcomed.set()
        elif kind == "ack":
            self._acknowledge(reply.ack.incident)
        elif kind == "directive":
            try:
                self._follow(policy.received(reply.directive, self._settings.workload_uid))
            except DeltashardError as error:
                self._log.error("directive.refused", **explain(error))
        elif kind == "save_now":
            self._save_now(reply.save_now)
