"""Sidecars as the fleet service sees them: pods with bound tokens in a real API server, and streams over real TLS."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.service import Fleet
from deltashard_operator.fleet.sidecar_report import Directive, Heartbeat, Hello, Refused, Unknown
from deltashard_operator.fleet.token_review import Reviewer
from deltashard_operator.kube import cluster_name
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import fleet_pb2_grpc as service
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.server.apiserver import Authority, Issued, Rest
from tests.support.server.port import free_port

PATIENCE_S = 120.0
"""For what should take an instant, on a machine that has other things to do."""
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""A pool of its own: streams of one test must not share a connection, as those of two pods do not."""


def directive(generation: int, every_s: float = 60.0) -> Directive:
    return Directive(generation=generation, policy=pb.Policy(every_s=every_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod object in the API."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def create(cls, rest: Rest, name: str = "", namespace: str = "default") -> Self:
        """A pod that nobody runs."""
        name = name or f"train-{uuid.uuid4().hex[:8]}"
        spec = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train"}]}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        reply = rest.create(document, namespace)
        assert reply.status == 201, reply.document
        return cls(namespace=namespace, name=name, uid=reply.document["metadata"]["uid"])

    def token(self, rest: Rest, audience: str = cluster_name.FLEET_AUDIENCE, seconds: int = 3600) -> str:
        """A token as the kubelet would project it."""
        bound = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        spec = {"audiences": [audience], "expirationSeconds": seconds, "boundObjectRef": bound}
        return request_token(rest, self.namespace, spec)

    def delete(self, rest: Rest) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}?gracePeriodSeconds=0"
        assert rest("DELETE", path).status == 200

    def hello(self, process: str = "p1", **changes: Any) -> wire.Hello:
        """What its sidecar says first."""
        fields: dict[str, Any] = {
            "protocol_min": 1,
            "protocol_max": 1,
            "namespace": self.namespace,
            "pod": self.name,
            "pod_uid": self.uid,
            "process": process,
            "workload_kind": "Job",
            "workload_name": "train",
            "workload_uid": f"job-of-{self.uid}",
            "run": f"{self.namespace}/train",
        }
        return wire.Hello(**(fields | changes))


def request_token(rest: Rest, namespace: str, spec: dict[str, Any]) -> str:
    document = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    reply = rest("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token", document)
    assert reply.status == 201, reply.document
    return str(reply.document["status"]["token"])


@dataclass(slots=True)
class Book:
    """A ledger that writes down what it is told."""

    known: Callable[[Hello], bool] = lambda _hello: True
    refuse: bool = False
    take: bool = True
    """Whether incidents are taken."""
    present: dict[tuple[str, str], Hello] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    """(what, pod, process)."""
    heartbeats: list[tuple[Hello, Heartbeat]] = field(default_factory=list)

    def connected(self, hello: Hello) -> None:
        if not self.known(hello):
            raise Unknown(f"no pod {hello.pod} is known")
        if self.refuse:
            raise Refused("not of this workload")
        assert hello.stream_key not in self.present, "connected twice"
        self.present[hello.stream_key] = hello
        self.events.append(("connected", hello.pod, hello.process))

    def reported(self, hello: Hello, heartbeat: Heartbeat) -> int:
        assert self.present[hello.stream_key] == hello
        self.heartbeats.append((hello, heartbeat))
        ids = [each.id for each in heartbeat.incidents]
        return max(ids, default=0) if self.take else 0

    def disconnected(self, hello: Hello) -> None:
        del self.present[hello.stream_key]
        self.events.append(("disconnected", hello.pod, hello.process))


class Tls:
    """The certificate a fleet serves; assign another to rotate."""

    def __init__(self, issued: Issued | None) -> None:
        self.issued = issued

    def __call__(self) -> tuple[bytes, bytes] | None:
        return None if self.issued is None else (self.issued.certificate, self.issued.key)


@dataclass(slots=True)
class Service:
    """A running fleet and all that it stands on."""

    fleet: Fleet
    book: Book
    tls: Tls
    authority: Authority
    metrics: FleetMetrics
    reviewer: Reviewer

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"deltashard_fleet_{name}", labels)
        assert found is not None, name
        return found

    def reporter(self, pod: Pod, token: str, process: str = "p1", **hello: Any) -> Reporter:
        """A sidecar of this pod, not connected yet."""
        assert self.fleet.port is not None
        return Reporter(self.fleet.port, self.authority.pem, token, pod.hello(process, **hello))

    async def refused(
        self, pod: Pod, token: str | None, process: str = "p1", /, **hello: Any
    ) -> tuple[grpc.StatusCode, str]:
        """How the call of a sidecar of this pod ends, which is not welcome."""
        assert self.fleet.port is not None
        return await refused(self.fleet.port, self.authority.pem, token, pod.hello(process, **hello))


@asynccontextmanager
async def serving(api: Any, **settings: Any) -> AsyncIterator[Service]:
    """A fleet that reviews tokens at this API, on a port of loopback that is kept."""
    authority, metrics, book = Authority("fleet"), FleetMetrics(), settings.pop("book", None) or Book()
    tls = Tls(authority.issue())
    reviewer = Reviewer(api, count=metrics.reviewed)
    # Three of them are how long a sidecar may be silent: none shall be because this machine is busy.
    settings = {"heartbeat_s": PATIENCE_S} | settings
    fleet = Fleet(ledger=book, reviewer=reviewer, tls=tls, metrics=metrics, **settings)
    await fleet.start("127.0.0.1", free_port())  # which a next one may have, when this one has stopped
    try:
        yield Service(fleet, book, tls, authority, metrics, reviewer)
    finally:
        await fleet.stop(5.0)
        reviewer.close()


class Reporter:
    """One sidecar's stream; use as an async context manager."""

    def __init__(self, port: int, trusted: bytes, token: str | None, hello: wire.Hello) -> None:
        self.hello = hello
        self.channel = grpc.aio.secure_channel(
            f"localhost:{port}",
            grpc.ssl_channel_credentials(trusted),
            options=OPTIONS,
        )
        stub = service.FleetStub(self.channel)  # type: ignore[no-untyped-call]
        self.call = stub.Report(metadata=metadata_of(token))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def greet(self) -> wire.Welcome:
        """Hello and its answer."""
        await self.call.write(wire.ReportRequest(hello=self.hello))
        reply = await self.next()
        assert reply.WhichOneof("kind") == "welcome"
        return reply.welcome

    async def beat(self, **fields: Any) -> None:
        """A heartbeat."""
        await self.call.write(wire.ReportRequest(heartbeat=wire.Heartbeat(**fields)))

    async def next(self) -> wire.ReportReply:
        """The next reply; fails when the call ended."""
        reply = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert reply is not grpc.aio.EOF, "the stream ended"
        return reply

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the call ends."""

        async def drained() -> tuple[grpc.StatusCode, str]:
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            return await self.call.code(), await self.call.details()

        return await asyncio.wait_for(drained(), PATIENCE_S)


async def refused(
    port: int, trusted: bytes, token: str | None, hello: wire.Hello
) -> tuple[grpc.StatusCode, str]:
    """How a call that is not welcome ends upon its Hello: status and sentence; OK when it was welcome.

    By gRPC's synchronous client, as a sidecar has it. The asynchronous one puts INTERNAL in the place of a status that
    came before what it wrote (grpc issue 36066, open).
    """

    def called() -> tuple[grpc.StatusCode, str]:
        over = threading.Event()

        def hellos() -> Iterator[wire.ReportRequest]:
            yield wire.ReportRequest(hello=hello)
            over.wait(PATIENCE_S)  # the server has the last word, not an end of ours

        with grpc.secure_channel(
            f"localhost:{port}", grpc.ssl_channel_credentials(trusted), options=OPTIONS
        ) as channel:
            stub = service.FleetStub(channel)  # type: ignore[no-untyped-call]
            try:
                call = stub.Report(hellos(), metadata=metadata_of(token), timeout=PATIENCE_S)
                for _welcome in call:
                    call.cancel()
                    break
            except grpc.RpcError as error:  # which is the call itself
                return error.code(), error.details() or ""
            finally:
                over.set()
        return grpc.StatusCode.OK, ""

    return await asyncio.to_thread(called)


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a call brings along."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
