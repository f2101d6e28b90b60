"""The service sidecars report to: one stream per sidecar process, over TLS, with the pod's token.

A stream's life: metadata with a token, review of the token (`token_review`); only then it takes one of the service's
places, of which a pod has `POD_STREAMS`; Hello (which must be of the token's pod), the ledger's word, Welcome; then
heartbeats in, and acknowledgements, directives and save requests out. It ends when the sidecar goes, is
silent for three heartbeats, when a newer stream of the same process comes, or after `reauthenticate_s` (less a jitter
of a tenth) to come again with a fresh token. The ledger hears `connected` and `disconnected` exactly once each, in
this order.

Everything runs on the caller's loop and nothing blocks it. What a stream can have waiting to be sent is bounded by its
kind: the highest acknowledgement, the newest directive, `MAX_SAVES` save requests; a sidecar that reads
too slowly loses only save requests, counted, and after `WRITE_S` its stream. One that sends too fast is read no faster
than one message in `GAP_S`: its socket fills up, not our memory.

A directive is kept for streams to come.

Without a certificate nothing listens; the port opens when there is one. A changed certificate gets a gRPC server of
its own on the same port, and the old one takes no more connections and ends with its last stream, which is after
`reauthenticate_s` at the latest. (gRPC's dynamic credentials swap the certificate while other threads use it: a use
after free that showed as a crash in every fourth run of our tests.)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509
from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import fleet_pb2_grpc as service

from deltashard_operator.fleet import sidecar_report, token_review
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.sidecar_report import Directive, Hello, Ledger, RunKey
from deltashard_operator.fleet.sidecar_stream import (
    ENDINGS,
    MAX_SAVES,
    Rejection,
    Stream,
    host_of,
    match,
    token_of,
)
from deltashard_operator.fleet.token_review import NotAuthentic, PodIdentity, ReviewUnavailable
from deltashard_operator.tls.certificate import Certificate, CertificateUnusable

"""The only one so far."""
HEARTBEAT_S = 15.0
REAUTHENTICATE_S = 1800.0
SILENT_HEARTBEATS = 3
HELLO_S = 20.0
"""Seconds from the proof of who calls to its Hello."""
WRITE_S = 30.0
"""A message that the sidecar's side does not take for so long ends the stream."""
GAP_S = 0.2
RELOAD_S = 1.0
MAX_STREAMS = 10_000
POD_STREAMS = 4
"""Streams of a pod: its sidecar has one process at a time, and a connection or two whose end nobody noticed yet."""
MAX_MESSAGE_BYTES = 1 << 20
"""A heartbeat with 64 incidents of 1,024 characters has a tenth of it."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    (
        "grpc.max_metadata_size",
        16 << 10,
    ),  # a token and little else; gRPC's own limit is a matter of luck from 8 KiB on
    ("grpc.max_concurrent_streams", 8),  # of one connection: a sidecar has one stream
    ("grpc.so_reuseport", 1),  # for the server with the next certificate
    # Calls that this busy loop did not come to in 30 s gRPC would cancel by itself, and no metric of ours would say so.
    # Whoever called gives up by a deadline of its own.
    ("grpc.server_max_unrequested_time_in_server", 600),
    # Heartbeats tell who is dead; pings are for what lies between and forgets quiet connections.
    ("grpc.keepalive_time_ms", 120_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),  # sidecars may ping every 30 s
    ("grpc.max_connection_idle_ms", 300_000),  # without any stream
)
Pair = tuple[bytes, bytes]
"""Certificate chain and key, PEM."""
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not have it
_log = structlog.get_logger("deltashard.fleet")


class FleetUnavailable(EnvironmentFault):
    """The service cannot listen."""


class Files:
    """The certificate in a directory as `Fleet(tls=...)` takes it: for one that somebody else issues (cert-manager)."""

    def __init__(self, directory: Path) -> None:
        self._certificate = Certificate(directory)

    def __call__(self) -> Pair | None:
        """The newest whole pair; raises `CertificateUnusable` when the files changed into something else."""
        self._certificate.refresh()
        return None if self._certificate.loaded is None else self._certificate.loaded.content


class Fleet(service.FleetServicer):
    """The service. Build, `start` and use it on one asyncio loop."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        reviewer: token_review.Reviewer,
        tls: Callable[[], Pair | None],
        metrics: FleetMetrics,
        heartbeat_s: float = HEARTBEAT_S,
        reauthenticate_s: float = REAUTHENTICATE_S,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        """`tls` is asked every second: it must not block, and its pair must have been checked by whoever made it."""
        self._ledger = ledger
        self._reviewer = reviewer
        self._tls = tls
        self.metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._reauthenticate_s = reauthenticate_s
        self._max_streams = max_streams
        self._places: Counter[str] = Counter()
        """Calls that are proven, by pod UID."""
        self._streams: dict[tuple[str, str], Stream] = {}
        self._by_run: dict[RunKey, set[Stream]] = {}
        self._directives: dict[RunKey, Directive] = {}
        self._pair: Pair | None = None
        self._server: grpc.aio.Server | None = None
        self._served: Pair | None = None
        """Certificate and key that `_server` was made with."""
        self._drains: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        """Servers of older certificates, and what waits for their last streams."""
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._unreviewed = False
        """Tokens could not be reviewed, last time."""
        self.port: int | None = None
        """The port that is open; None before there is a certificate."""
        metrics.streams.set_function(lambda: len(self._streams))
        metrics.serving.set_function(lambda: int(self.port is not None))

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> None:
        """Open the port, or have it opened as soon as there is a certificate.

        Raises:
            FleetUnavailable: the address cannot be listened on.
        """
        self._reload()
        await self._open(host, port)
        self._watching = asyncio.create_task(self._watch(host, port), name="fleet-certificate")

    async def stop(self, grace_s: float) -> None:
        """Take no new streams, send the sidecars away, and close after at most `grace_s`."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        for stream in list(self._streams.values()):
            stream.finish("stopping")
        servers = [*self._drains, *([] if self._server is None else [self._server])]
        await asyncio.gather(*(server.stop(grace_s) for server in servers), *self._drains.values())
        self.port = None

    def unready(self) -> list[str]:
        """Why sidecars cannot report; empty when they can."""
        reasons = []
        if self.port is None:
            reasons.append("the fleet service has no certificate yet")
        if self._watching is not None and self._watching.done():
            reasons.append("the fleet service's watch of its certificate ended")
        return reasons

    async def _watch(self, host: str, port: int) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            self._reload()
            try:
                await self._open(host, port)
            except FleetUnavailable as error:
                self.metrics.loads.labels("failed").inc()
                _log.error("fleet.unavailable", error=str(error))

    def _reload(self) -> None:
        try:
            self._pair = self._tls() or self._pair
        except CertificateUnusable as error:
            self.metrics.loads.labels("failed").inc()
            _log.warning("fleet.certificate_unusable", error=str(error))

    async def _open(self, host: str, port: int) -> None:
        """A server for the newest certificate, unless it has one or there is none."""
        if self._pair is None or self._pair == self._served:
            return
        certificate, key = self._pair
        not_after_s = x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
        server = grpc.aio.server(options=OPTIONS)
        service.add_FleetServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        address = f"[{host}]:{self.port or port}" if ":" in host else f"{host}:{self.port or port}"
        try:
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError as error:
            raise FleetUnavailable(
                f"cannot listen: {error}", where=address, remedy="is the port free?"
            ) from None
        await server.start()
        older, self._server, self._served, self.port = self._server, server, self._pair, bound
        if older is not None:
            drain = asyncio.create_task(older.stop(self._reauthenticate_s), name="fleet-drain")
            self._drains[older] = drain
            drain.add_done_callback(lambda _: self._drains.pop(older, None))
        self.metrics.loads.labels("loaded").inc()
        self.metrics.not_after.set(not_after_s)
        _log.info("fleet.serving", port=bound, not_after_s=not_after_s)

    # -- the controller's side -------------------------------------------------------------------------------------

    def direct(self, run_key: RunKey, directive: Directive) -> None:
        """From now on this is the run's directive: for its sidecars here and for those to come."""
        before = self._directives.get(run_key)
        if before is not None and before.generation >= directive.generation:
            return
        self._directives[run_key] = directive
        for stream in self._by_run.get(run_key, ()):
            stream.directive = directive
            stream.wake.set()

    def forget(self, run_key: RunKey) -> None:
        """The run is over: drop its directive."""
        self._directives.pop(run_key, None)

    def save_now(self, run_key: RunKey, reason: str, urgent: bool, deadline_s: float) -> int:
        """Ask the run's sidecars that are here for a save; returns how many will be told."""
        request = wire.SaveRequested(reason=reason, urgent=urgent, deadline_s=deadline_s)
        told = 0
        for stream in self._by_run.get(run_key, ()):
            if len(stream.saves) >= MAX_SAVES:
                self.metrics.dropped.inc()
                continue
            stream.saves.append(request)
            stream.wake.set()
            told += 1
        return told

    # -- one call --------------------------------------------------------------------------------------------------

    async def Report(self, _requests: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Stream of a sidecar, from its token to its end."""
        pod_uid = ""
        try:
            try:
                identity = await self._proven(context)
                self._take_place(identity)
                pod_uid = identity.pod_uid
                hello = await self._hello(context, identity)
                stream = self._enter(hello)
            except Rejection as rejection:
                self.metrics.refused.labels(rejection.cause).inc()
                await context.abort(rejection.code, rejection.sentence)
                return
            cause = "gone"  # also when the call is cancelled, which is how a broken connection shows
            try:
                cause = await self._serve(stream, context)
            finally:
                self._leave(stream)
                self.metrics.ended.labels(cause).inc()
            if cause in ENDINGS:
                await context.abort(*ENDINGS[cause])
        finally:
            if pod_uid:
                self._places[pod_uid] -= 1
                self._places += Counter()  # without those at 0

    def _take_place(self, identity: PodIdentity) -> None:
        """A place for a stream of this pod; raises `Rejection`."""
        room = self._places.total() < self._max_streams and self._places[identity.pod_uid] < POD_STREAMS
        if self._stopping or not room:
            sentence = "no room for another stream: come again"
            raise Rejection("too_many", grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        self._places[identity.pod_uid] += 1

    async def _proven(self, context: Any) -> PodIdentity:
        """Whose the token is; raises `Rejection`. Until then a call costs nothing but its connection."""
        if self._stopping:
            raise Rejection("too_many", *ENDINGS["stopping"])
        token, peer = token_of(context), host_of(context.peer())
        try:
            identity = await self._reviewer.review(token, peer)
        except NotAuthentic as error:
            _log.info("fleet.not_authentic", peer=peer, error=str(error))
            raise Rejection("not_authentic", grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
        except ReviewUnavailable as error:
            if not self._unreviewed:  # once per outage, not once per sidecar
                _log.warning("fleet.review_unavailable", error=str(error))
            self._unreviewed = True
            raise Rejection("review_unavailable", grpc.StatusCode.UNAVAILABLE, str(error)) from None
        if self._unreviewed:
            _log.info("fleet.reviews_again")
        self._unreviewed = False
        return identity

    async def _hello(self, context: Any, identity: PodIdentity) -> Hello:
        """What the pod that was proven says of itself; raises `Rejection`."""
        try:
            async with asyncio.timeout(HELLO_S):
                first = await context.read()
        except TimeoutError:
            raise Rejection("no_hello", grpc.StatusCode.UNAVAILABLE, "no Hello came: come again") from None
        if first is EOF or first.WhichOneof("kind") != "hello":
            raise Rejection("bad_report", grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        try:
            hello = sidecar_report.hello_of(first.hello)
        except sidecar_report.BadReport as error:
            raise Rejection("bad_report", grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        match(hello, identity)
        if FLEET_PROTOCOL.common(hello.protocol_min, hello.protocol_max) is None:
            theirs = f"{hello.protocol_min}..{hello.protocol_max}"
            sentence = f"this controller speaks protocol {FLEET_PROTOCOL.most}, not {theirs}"
            raise Rejection("no_protocol", grpc.StatusCode.FAILED_PRECONDITION, sentence)
        return hello

    def _enter(self, hello: Hello) -> Stream:
        """Put a proven sidecar on the books; raises `Rejection`."""
        if self._stopping:
            raise Rejection("too_many", *ENDINGS["stopping"])
        before = self._streams.get(hello.stream_key)
        if before is not None:  # its connection broke and nobody noticed yet
            before.finish("replaced")
            self._leave(before)
        try:
            self._ledger.connected(hello)
        except sidecar_report.Unknown as error:
            raise Rejection("unknown_pod", grpc.StatusCode.NOT_FOUND, str(error)) from None
        except sidecar_report.Refused as error:
            _log.warning("fleet.refused", namespace=hello.namespace, pod=hello.pod, error=str(error))
            raise Rejection("refused", grpc.StatusCode.PERMISSION_DENIED, str(error)) from None
        except Exception:  # noqa: BLE001 - one sidecar's call fails, not the service
            _log.exception("fleet.ledger_failed", namespace=hello.namespace, pod=hello.pod)
            raise Rejection("failed", *ENDINGS["failed"]) from None
        stream = Stream(hello=hello, directive=self._directives.get(hello.run_key))
        stream.wake.set()
        self._streams[hello.stream_key] = stream
        self._by_run.setdefault(hello.run_key, set()).add(stream)
        self.metrics.accepted.inc()
        return stream

    def _leave(self, stream: Stream) -> None:
        """Take it off the books, once."""
        if stream.left:
            return
        stream.left = True
        hello = stream.hello
        del self._streams[hello.stream_key]
        siblings = self._by_run[hello.run_key]
        siblings.discard(stream)
        if not siblings:
            del self._by_run[hello.run_key]
        try:
            self._ledger.disconnected(hello)
        except Exception:  # noqa: BLE001 - the books stay right whatever the ledger does
            _log.exception("fleet.ledger_failed", namespace=hello.namespace, pod=hello.pod)

    async def _serve(self, stream: Stream, context: Any) -> str:
        """Both directions until something ends it; returns the cause, of `ENDS`."""
        loop = asyncio.get_running_loop()
        lasts_s = self._reauthenticate_s * random.uniform(0.9, 1.0)  # noqa: S311 - a jitter
        timer = loop.call_later(lasts_s, stream.finish, "reauthenticate")
        tasks = [
            asyncio.create_task(self._read(stream, context)),
            asyncio.create_task(self._write(stream, context)),
        ]
        try:
            await asyncio.wait([stream.end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    stream.finish(task.result())
            return stream.end.result()
        except Exception:  # noqa: BLE001 - one sidecar's stream ends, not the service
            _log.exception("fleet.stream_failed", namespace=stream.hello.namespace, pod=stream.hello.pod)
            return "failed"
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: Stream, context: Any) -> str:
        loop = asyncio.get_running_loop()
        silence_s = SILENT_HEARTBEATS * self._heartbeat_s
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    message = await context.read()
            except TimeoutError:
                return "silent"
            read_s = loop.time()
            if message is EOF:
                return "gone"
            if message.WhichOneof("kind") != "heartbeat":
                return "bad_report"
            if stream.left:
                return "replaced"
            heartbeat = sidecar_report.heartbeat_of(message.heartbeat)
            taken = self._ledger.reported(stream.hello, heartbeat)
            self.metrics.heartbeats.inc()
            self.metrics.incidents.inc(len(heartbeat.incidents))
            # Said again whenever it still reports what was taken: the first acknowledgement may have been lost.
            if heartbeat.incidents and heartbeat.incidents[0].id <= taken:
                stream.ack = taken
                stream.wake.set()
            if (rest_s := GAP_S - (loop.time() - read_s)) > 0:
                await asyncio.sleep(rest_s)

    async def _write(self, stream: Stream, context: Any) -> str:
        welcome = wire.Welcome(
            protocol=FLEET_PROTOCOL.most,
            heartbeat_s=self._heartbeat_s,
            reauthenticate_s=self._reauthenticate_s,
        )
        try:
            async with asyncio.timeout(WRITE_S):
                await context.write(wire.ReportReply(welcome=welcome))
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                for reply in stream.pending():
                    async with asyncio.timeout(WRITE_S):
                        await context.write(reply)
                    if reply.HasField("directive"):
                        self.metrics.directives.inc()
                    elif reply.HasField("save_now"):
                        self.metrics.saves.inc()
        except TimeoutError:
            return "slow"
