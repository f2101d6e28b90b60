"""Clients of the report server: pods with bound tokens in a real API server, and POSTs over real TLS."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import urllib3
from deltashard_checkpoint.process import listen
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.report import Reply, Report, ReportRefused, UnknownPod
from deltashard_operator.fleet.service import BoundedListener, ReportServer
from deltashard_operator.fleet.token_review import Reviewer
from deltashard_operator.kube import cluster_name
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.call import Caller
from deltashard_operator.main import Serving
from deltashard_operator.tls.certificate import Certificate
from deltashard_proto.v1 import fleet_pb2 as wire
from urllib3.util import create_urllib3_context

from tests.support.server.apiserver import CertificateAuthority, Rest, put

FLEET_TIMEOUT_S = 120.0
"""Time limit of a short operation on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPod:
    """A pod object in the API."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def create(cls, rest: Rest, name: str = "", namespace: str = "default") -> Self:
        """Create a pod that no kubelet runs."""
        name = name or f"train-{uuid.uuid4().hex[:8]}"
        spec = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train"}]}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        reply = rest.create(document, namespace)
        assert reply.status == 201, reply.document
        return cls(namespace=namespace, name=name, uid=reply.document["metadata"]["uid"])

    def token(self, rest: Rest, audience: str = cluster_name.FLEET_AUDIENCE, seconds: int = 3600) -> str:
        bound = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        spec = {"audiences": [audience], "expirationSeconds": seconds, "boundObjectRef": bound}
        return request_token(rest, self.namespace, spec)

    def delete(self, rest: Rest) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}?gracePeriodSeconds=0"
        assert rest("DELETE", path).status == 200

    def report(self, *, identity: dict[str, Any] | None = None, **changes: Any) -> wire.ReportRequest:
        identity_fields: dict[str, Any] = {
            "namespace": self.namespace,
            "pod": self.name,
            "pod_uid": self.uid,
            "workload_kind": "Job",
            "workload_name": "train",
            "workload_uid": f"job-of-{self.uid}",
            "run": f"{self.namespace}/train",
        }
        fields: dict[str, Any] = {"protocol": 1, "process": "p1", "sequence": 1, "pod": wire.PodState()}
        return wire.ReportRequest(
            identity=wire.SidecarIdentity(**(identity_fields | (identity or {}))), **(fields | changes)
        )


def request_token(rest: Rest, namespace: str, spec: dict[str, Any]) -> str:
    document = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    reply = rest("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token", document)
    assert reply.status == 201, reply.document
    return str(reply.document["status"]["token"])


@dataclass(slots=True)
class RecordingLedger:
    """A ledger that records its calls."""

    answer: Callable[[Report], Reply] = lambda report: Reply(sequence=report.sequence, next_s=60.0)
    reports: list[Report] = field(default_factory=list)

    def report(self, report: Report) -> Reply:
        reply = self.answer(report)
        self.reports.append(report)
        return reply


def unknown(_report: Report) -> Reply:
    raise UnknownPod("no such pod is known")


def refused(_report: Report) -> Reply:
    raise ReportRefused("not of this workload")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResponse:
    """The answer to a POST."""

    status: int
    reply: wire.ReportReply = field(default_factory=wire.ReportReply)
    text: str = ""
    retry_after: str = ""


def post_report(
    url: str, trusted: bytes, token: str | None, body: wire.ReportRequest | bytes
) -> ReportResponse:
    context = create_urllib3_context()
    context.load_verify_locations(cadata=trusted.decode())
    headers = {"Content-Type": "application/x-protobuf"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    content = body if isinstance(body, bytes) else body.SerializeToString()
    with urllib3.PoolManager(ssl_context=context, retries=False, timeout=FLEET_TIMEOUT_S) as http:
        found = http.request("POST", f"{url}/v1/report", body=content, headers=headers)
        assert found.headers.get("Connection") == "close"
        after = found.headers.get("Retry-After", "")
        if found.status != 200:
            return ReportResponse(status=found.status, text=found.data.decode(), retry_after=after)
        return ReportResponse(status=200, reply=wire.ReportReply.FromString(found.data))


@dataclass(slots=True)
class FleetService:
    """A running server and its dependencies."""

    recorder: RecordingLedger
    authority: CertificateAuthority
    metrics: FleetMetrics
    reviewer: Reviewer
    port: int
    leads: bool = True
    synced: bool = True

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"deltashard_fleet_{name}", labels)
        assert found is not None, name
        return found

    async def post(self, token: str | None, body: wire.ReportRequest | bytes) -> ReportResponse:
        return await asyncio.to_thread(
            post_report, f"https://localhost:{self.port}", self.authority.pem, token, body
        )


@asynccontextmanager
async def serving(api: ApiAccess) -> AsyncIterator[FleetService]:
    authority, metrics, recorder = CertificateAuthority("fleet"), FleetMetrics(), RecordingLedger()
    call = Caller(api)
    reviewer = Reviewer(call, count=lambda outcome: metrics.reviews.labels(outcome).inc())
    with TemporaryDirectory() as name:
        folder = Path(name)
        put(folder, authority.issue())
        certificate = Certificate(folder, "fleet", metrics.registry)
        certificate.reload()
        server = ReportServer(
            handle_report=recorder.report,
            reviewer=reviewer,
            certificate=certificate,
            metrics=metrics,
            leads=lambda: service.leads,
            synced=lambda: service.synced,
        )
        program, listener = Serving(), BoundedListener(listen("127.0.0.1", 0), metrics)
        await program.listen(server.application, listener, certificate.front)
        service = FleetService(recorder, authority, metrics, reviewer, port=listener.getsockname()[1])
        try:
            yield service
        finally:
            await program.close()
            await call.close()
