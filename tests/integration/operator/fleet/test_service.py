"""The server of reports: real HTTPS, real tokens, and a real API server that reviews them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import uuid
from pathlib import Path

import pytest
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_operator.fleet import service as reports
from deltashard_operator.fleet.report import Reply, SaveOrder
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_proto.v1 import fleet_pb2 as wire

from tests.support.operator.controller_process import ControllerProcess
from tests.support.operator.fleet_service import ApiPod, post_report, refused, request_token, serving, unknown
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.port import free_port


@pytest.fixture(scope="module")
def pod(http: Rest) -> ApiPod:
    return ApiPod.create(http)


@pytest.fixture(scope="module")
def token(http: Rest, pod: ApiPod) -> str:
    return pod.token(http)


def test_report_is_accepted_and_answered(api: ApiAccess, pod: ApiPod, token: str) -> None:
    """The ledger stores the report and the sidecar gets its reply. One token review serves two reports."""
    order = SaveOrder(id="r-1", reason="request", urgent=True, deadline_s=30.0, pin="best")

    async def scenario() -> None:
        async with serving(api) as service:
            service.recorder.answer = lambda report: Reply(
                sequence=report.sequence,
                next_s=15.0,
                report_run=True,
                saves=(order,),
                acknowledged_incident=4,
            )
            for sequence in (7, 8):
                found = await service.post(token, pod.report(sequence=sequence))
                assert (found.status, found.reply.sequence, found.reply.next_s) == (200, sequence, 15.0)
                assert (
                    found.reply.report_run,
                    found.reply.acknowledged_incident,
                    found.reply.saves[0].pin,
                ) == (True, 4, "best")
            assert [each.identity.pod_uid for each in service.recorder.reports] == [pod.uid] * 2
            assert service.value("reports_total", outcome="accepted") == 2
            assert service.value("report_seconds_count") == 2
            assert service.value("token_reviews_total", outcome="authentic") == 1
            assert service.value("token_reviews_total", outcome="cached") == 1
            assert service.value("serving") == 1
            assert service.value("certificate_not_after_timestamp_seconds") > 0

    asyncio.run(scenario())


def test_rejected_report_has_reason(api: ApiAccess, http: Rest, pod: ApiPod, token: str) -> None:
    """Each rejection has a separate status and counter and does not reach the ledger."""
    other = ApiPod.create(http)
    unbound = request_token(http, "default", {"audiences": ["deltashard-fleet"], "expirationSeconds": 3600})
    good = pod.report()
    cases: list[tuple[str | None, wire.ReportRequest | bytes, int, str]] = [
        (None, good, 401, "no_token"),
        ("nonsense", good, 401, "not_authentic"),
        ("x" * 7000, good, 401, "not_authentic"),
        (pod.token(http, "https://kubernetes.default.svc"), good, 401, "not_authentic"),
        (unbound, good, 401, "not_authentic"),
        (other.token(http), good, 403, "wrong_pod"),
        (token, pod.report(identity={"pod": other.name}), 403, "wrong_pod"),
        (token, pod.report(identity={"pod_uid": other.uid}), 403, "wrong_pod"),
        (token, pod.report(identity={"namespace": "kube-system"}), 403, "wrong_pod"),
        (token, pod.report(identity={"namespace": "No Name"}), 400, "bad_report"),
        (token, b"\xff garbage", 400, "bad_report"),
        (token, b"\0" * (reports.MAX_BODY_BYTES + 1), 413, "too_large"),
        (token, pod.report(protocol=FLEET_PROTOCOL.most + 1), 409, "unsupported_protocol"),
        (token, b"", 409, "unsupported_protocol"),
    ]

    async def scenario() -> None:
        async with serving(api) as service:
            for sent, body, status, outcome in cases:
                before = service.value("reports_total", outcome=outcome)
                found = await service.post(sent, body)
                assert (found.status, bool(found.text)) == (status, True), (outcome, found)
                assert service.value("reports_total", outcome=outcome) == before + 1
            assert service.recorder.reports == []
            for answer, status in ((unknown, 404), (refused, 403), (lambda _: 1 / 0, 500)):
                service.recorder.answer = answer  # type: ignore[assignment]
                assert (await service.post(token, good)).status == status
            service.synced = False
            assert (await service.post(token, good)).status == 503
            service.leads = False
            assert (await service.post(None, b"")).status == 421
            assert service.value("serving") == 0

    asyncio.run(scenario())


def test_token_of_deleted_pod_is_rejected(api: ApiAccess, http: Rest) -> None:
    """The API rejects the token after its own cache expires."""
    gone = ApiPod.create(http)
    token = gone.token(http)
    gone.delete(http)

    async def scenario() -> None:
        async with serving(api) as service:
            statuses: set[int] = set()
            async with asyncio.timeout(120):
                while 401 not in statuses:
                    service.reviewer._cache.clear()
                    statuses.add((await service.post(token, gone.report())).status)

    asyncio.run(scenario())


def test_api_outage_is_retryable(apiserver: ApiServer, http: Rest, pod: ApiPod, token: str) -> None:
    """The server answers 503 with Retry-After. Cached reviews remain valid, and service resumes with the API."""
    other = ApiPod.create(http)
    theirs = other.token(http)

    async def scenario(proxy: FaultyProxy, api: ApiAccess) -> None:
        async with serving(api) as service:
            assert (await service.post(token, pod.report())).status == 200
            upstream, proxy.upstream_port = proxy.upstream_port, free_port()
            proxy.disconnect()
            found = await service.post(theirs, other.report())
            assert found.status == 503
            assert 6 <= int(found.retry_after) <= 60
            assert (await service.post(token, pod.report())).status == 200
            proxy.upstream_port = upstream
            assert (await service.post(theirs, other.report())).status == 200

    with FaultyProxy(apiserver.port) as proxy:
        api = apiserver.access()
        api.configuration.host = f"https://127.0.0.1:{proxy.port}"
        asyncio.run(scenario(proxy, api))


def test_idle_peers_are_disconnected(
    api: ApiAccess, pod: ApiPod, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection displaces a client that is idle before or after its handshake. Partial bodies time out."""

    async def scenario() -> None:
        async with serving(api) as service:
            context = ssl.create_default_context(cadata=service.authority.pem.decode())
            silent = await asyncio.open_connection("127.0.0.1", service.port)
            idle = await asyncio.open_connection("localhost", service.port, ssl=context)
            monkeypatch.setattr(reports, "CONNECTION_S", 0.0)
            assert (await service.post(token, pod.report())).status == 200
            for reader, writer in (silent, idle):
                assert await reader.read() == b""
                writer.close()
        monkeypatch.setattr(reports, "CONNECTION_S", 60.0)
        monkeypatch.setattr(reports, "BODY_S", 0.2)
        async with serving(api) as service:
            context = ssl.create_default_context(cadata=service.authority.pem.decode())
            reader, writer = await asyncio.open_connection("localhost", service.port, ssl=context)
            head = f"POST /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
            writer.write(head.encode())
            assert b" 408 " in await reader.readline()
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", ["CONNECTIONS", "PEER_CONNECTIONS"])
def test_connections_are_bounded(
    api: ApiAccess, pod: ApiPod, token: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The limits hold in total and for each address. Further connections are closed until others end."""
    monkeypatch.setattr(reports, limit, 3)

    async def scenario() -> None:
        async with serving(api) as service:
            held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3)]
            late, writer = await asyncio.open_connection("127.0.0.1", service.port)
            assert await late.read() == b""
            writer.close()
            assert service.value("reports_total", outcome=reports.TOO_MANY_CONNECTIONS) == 1
            for reader, writer in held:
                writer.write_eof()
                assert await reader.read() == b""  # the server closed the connection
                writer.close()
            assert (await service.post(token, pod.report())).status == 200

    asyncio.run(scenario())


def test_review_ends_with_connection(api: ApiAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of running and waiting reviews is bounded by the number of connections."""

    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def hanging(_token: str) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with serving(api) as service, asyncio.timeout(60):
            monkeypatch.setattr(service.reviewer, "review", hanging)
            context = ssl.create_default_context(cadata=service.authority.pem.decode())
            _, writer = await asyncio.open_connection("localhost", service.port, ssl=context)
            writer.write(
                b"POST /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Length: 9\r\n\r\n"
            )
            await begun.wait()
            writer.close()
            await ended.wait()

    asyncio.run(scenario())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6_only(apiserver: ApiServer, tmp_path: Path) -> None:
    """The controller's pages and its report port listen on an IPv6 address only."""
    controller = ControllerProcess(apiserver, tmp_path, host="::1", namespace=f"six-{uuid.uuid4().hex[:8]}")
    controller.start()
    try:
        assert controller.get("livez") == (200, "ok")
        url = f"https://[::1]:{controller.fleet_port}"
        assert post_report(url, controller.authority.pem, None, b"").status == 401
    finally:
        assert controller.stop() == 0, controller.log
