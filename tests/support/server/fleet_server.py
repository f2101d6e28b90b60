"""A heartbeat service for tests of the sidecar's client: a real gRPC server with TLS, as small as the contract allows."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import fleet_pb2_grpc

from tests.support.eventually import eventually


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass
class Authority:
    """A CA that signs for localhost."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "deltashard tests")])
        self.certificate = self._sign(self.name, self.key.public_key(), authority=True)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            built = built.add_extension(
                x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
            )
        return built.sign(self.key, hashes.SHA256())

    def server(self) -> tuple[bytes, bytes]:
        """(key, certificate) for localhost, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        certificate = self._sign(name, key.public_key(), authority=False)
        return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


class FleetServer(fleet_pb2_grpc.FleetServicer):
    """Takes every sidecar in whose token is `token`, unless told otherwise, and keeps what it hears."""

    def __init__(
        self, authority: Authority, *, port: int = 0, token: str = "good", heartbeat_s: float = 15.0
    ):
        self.authority = authority
        self.token = token
        self.heartbeat_s = heartbeat_s
        self.reauthenticate_s = 1800.0
        self.refuse: grpc.StatusCode | None = None
        self.end_at_once = False
        self.acknowledge = True
        self.hellos: list[fleet.Hello] = []
        self.tokens: list[str] = []
        self.beats: list[fleet.Heartbeat] = []
        self._streams: set[queue.SimpleQueue[fleet.ReportReply | None]] = set()
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        fleet_pb2_grpc.add_FleetServicer_to_server(self, self._server)
        self.port = 0
        eventually(lambda: self._bind(port), timeout_s=60.0, what=f"port {port} is free")

    def _bind(self, port: int) -> int:
        """One that somebody holds is waited for: a port given is that of a server that has just ended."""
        credentials = grpc.ssl_server_credentials([self.authority.server()])
        with contextlib.suppress(RuntimeError):
            self.port = self._server.add_secure_port(f"localhost:{port}", credentials)
        return self.port

    def flags(self, tmp_path: Path) -> dict[str, Any]:
        """Of a sidecar that has this controller; its token lies in a file there."""
        token = tmp_path / "token"
        token.write_text(self.token)
        return {"fleet": self.address, "fleet-ca": self.authority.pem, "fleet-token-file": token}

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.end_streams()
        self._server.stop(0).wait()
        self._pool.shutdown()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def connected(self) -> int:
        return len(self._streams)

    def end_streams(self) -> None:
        """As the service does when it is time to authenticate again."""
        for stream in list(self._streams):
            stream.put(None)

    def tell(self, **reply: object) -> None:
        """Send one reply to every sidecar."""
        for stream in list(self._streams):
            stream.put(fleet.ReportReply(**reply))

    def Report(self, requests, context):
        """See fleet.proto."""
        token = dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        if token != self.token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this token is not good")
        if self.refuse is not None:
            context.abort(self.refuse, "refused by the test")
        outbox: queue.SimpleQueue[fleet.ReportReply | None] = queue.SimpleQueue()
        hello = next(requests)
        self.hellos.append(hello.hello)
        welcome = fleet.Welcome(
            protocol=1, heartbeat_s=self.heartbeat_s, reauthenticate_s=self.reauthenticate_s
        )
        yield fleet.ReportReply(welcome=welcome)
        if self.end_at_once:
            return
        self._streams.add(outbox)
        context.add_callback(lambda: outbox.put(None))
        threading.Thread(target=self._read, args=(requests, outbox), daemon=True).start()
        try:
            while (reply := outbox.get()) is not None:
                yield reply
        finally:
            self._streams.discard(outbox)

    def _read(
        self,
        requests: Iterator[fleet.ReportRequest],
        outbox: queue.SimpleQueue[fleet.ReportReply | None],
    ) -> None:
        try:
            for request in requests:
                beat = request.heartbeat
                self.beats.append(beat)
                if beat.incidents and self.acknowledge:
                    ack = fleet.ReportReply.Ack(incident=max(i.id for i in beat.incidents))
                    outbox.put(fleet.ReportReply(ack=ack))
        except Exception:
            pass
        outbox.put(None)

    def incidents(self, kind: fleet.IncidentKind) -> list[fleet.Incident]:
        """Every incident of a kind that was heard of, once each."""
        heard = {i.id: i for beat in list(self.beats) for i in beat.incidents if i.kind == kind}
        return [heard[key] for key in sorted(heard)]

    @property
    def last(self) -> fleet.Heartbeat:
        return self.beats[-1] if self.beats else fleet.Heartbeat()
