"""The fleet service: real gRPC over TLS, real tokens, a real API server that reviews them."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from deltashard_operator.fleet import service as fleets
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.service import Files, Fleet, FleetUnavailable
from deltashard_proto.v1 import fleet_pb2 as wire
from kubernetes import client

from tests.support.eventually import eventually_async
from tests.support.operator.fleet_service import (
    PATIENCE_S,
    Book,
    Pod,
    Reporter,
    directive,
    refused,
    request_token,
    serving,
)
from tests.support.server.apiserver import ApiServer, Authority, Rest, put
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import free_port

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def rest(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as rest:
        yield rest


@pytest.fixture(scope="module")
def pod(rest: Rest) -> Pod:
    return Pod.create(rest)


@pytest.fixture(scope="module")
def token(rest: Rest, pod: Pod) -> str:
    return pod.token(rest)


def test_a_sidecar_reports_and_hears(api: client.ApiClient, pod: Pod, token: str) -> None:
    """Welcome; heartbeats reach the ledger; incidents are acknowledged once taken, and again when repeated."""

    async def scenario() -> None:
        async with serving(api, heartbeat_s=7.0, reauthenticate_s=900.0) as service:
            async with service.reporter(pod, token) as sidecar:
                welcome = await sidecar.greet()
                assert (welcome.protocol, welcome.heartbeat_s, welcome.reauthenticate_s) == (1, 7.0, 900.0)
                service.book.take = False
                incidents = [wire.Incident(id=number, message="m") for number in (3, 4)]
                await sidecar.beat(run="default/train", phase=wire.PHASE_TRAINING, incidents=incidents)
                await eventually_async(lambda: service.book.heartbeats, "the heartbeat")
                service.book.take = True
                for _ in range(2):
                    await sidecar.beat(incidents=incidents)
                    assert (await sidecar.next()).ack.incident == 4
                await sidecar.call.done_writing()
                assert (await sidecar.status())[0] is Code.OK
            await eventually_async(lambda: not service.book.present, "the end")
            assert service.book.events == [("connected", pod.name, "p1"), ("disconnected", pod.name, "p1")]
            assert [h.run for _, h in service.book.heartbeats] == ["default/train", "", ""]
            assert service.value("heartbeats_total") == 3
            assert service.value("incidents_total") == 6
            assert service.value("streams_ended_total", cause="gone") == 1
            assert service.value("token_reviews_total", outcome="authentic", source="api") == 1

    asyncio.run(scenario())


def test_directives_go_out_on_change_and_on_connect(api: client.ApiClient, pod: Pod, token: str) -> None:
    """Newest only, to all streams of the run and of no other; an older generation goes nowhere."""

    async def scenario() -> None:
        async with serving(api) as service:
            key = (pod.namespace, f"job-of-{pod.uid}")
            service.fleet.direct(key, directive(2))
            service.fleet.direct(key, directive(1))
            service.fleet.direct(("default", "another"), directive(9))
            async with service.reporter(pod, token) as one, service.reporter(pod, token, "p2") as two:
                for sidecar in (one, two):
                    await sidecar.greet()
                    assert (await sidecar.next()).directive.generation == 2
                service.fleet.direct(key, directive(3, every_s=5.0))
                service.fleet.direct(key, directive(3, every_s=6.0))
                for sidecar in (one, two):
                    reply = await sidecar.next()
                    assert (reply.directive.generation, reply.directive.policy.every_s) == (3, 5.0)
                assert service.fleet.save_now(key, "user", urgent=True, deadline_s=20.0) == 2
                for sidecar in (one, two):
                    request = (await sidecar.next()).save_now
                    assert (request.reason, request.urgent, request.deadline_s) == ("user", True, 20.0)
            service.fleet.forget(key)
            async with service.reporter(pod, token, "p3") as three:
                await three.greet()
                assert service.fleet.save_now(("default", "another"), "user", urgent=False, deadline_s=0) == 0
                assert service.fleet.save_now(key, "user", urgent=False, deadline_s=0) >= 1
                assert (await three.next()).WhichOneof("kind") == "save_now", (
                    "no directive of a run that is over"
                )
            assert service.value("directives_sent_total") == 4

    asyncio.run(scenario())


def test_a_token_is_believed_for_its_own_pod_only(
    api: client.ApiClient, rest: Rest, pod: Pod, token: str
) -> None:
    """Wrong audience, no token, nonsense, a token of no pod, another pod's: refused, by name, and never connected."""
    other = Pod.create(rest)
    unbound = request_token(rest, "default", {"audiences": ["deltashard-fleet"], "expirationSeconds": 3600})
    cases: list[tuple[str | None, dict[str, Any], Code, str]] = [
        (None, {}, Code.UNAUTHENTICATED, "no_token"),
        ("nonsense", {}, Code.UNAUTHENTICATED, "not_authentic"),
        ("x" * 9000, {}, Code.UNAUTHENTICATED, "not_authentic"),
        (pod.token(rest, "https://kubernetes.default.svc"), {}, Code.UNAUTHENTICATED, "not_authentic"),
        (unbound, {}, Code.UNAUTHENTICATED, "not_authentic"),
        (other.token(rest), {}, Code.PERMISSION_DENIED, "wrong_pod"),
        (token, {"pod": other.name}, Code.PERMISSION_DENIED, "wrong_pod"),
        (token, {"pod_uid": other.uid}, Code.PERMISSION_DENIED, "wrong_pod"),
        (token, {"namespace": "kube-system"}, Code.PERMISSION_DENIED, "wrong_pod"),
        (token, {"namespace": "No Name"}, Code.INVALID_ARGUMENT, "bad_report"),
        (token, {"protocol_min": 2, "protocol_max": 3}, Code.FAILED_PRECONDITION, "no_protocol"),
    ]

    async def scenario() -> None:
        async with serving(api) as service:
            for number, (sent, changes, code, cause) in enumerate(cases):
                before = service.value("streams_refused_total", cause=cause)
                found, sentence = await service.refused(pod, sent, f"p{number}", **changes)
                assert found is code, (cause, sentence)
                assert service.value("streams_refused_total", cause=cause) == before + 1
            assert service.book.events == []
            async with service.reporter(pod, token) as sidecar:
                await sidecar.beat()
                assert (await sidecar.status())[0] is Code.INVALID_ARGUMENT, "a heartbeat before Hello"

    asyncio.run(scenario())


def test_the_ledger_has_the_last_word(api: client.ApiClient, pod: Pod, token: str) -> None:
    """A pod it does not know yet may come again; one that it refuses may not."""

    async def scenario() -> None:
        known = False
        book = Book(known=lambda _hello: known)
        async with serving(api, book=book) as service:
            assert (await service.refused(pod, token))[0] is Code.NOT_FOUND
            known, book.refuse = True, True
            code, sentence = await service.refused(pod, token)
            assert code is Code.PERMISSION_DENIED
            assert "not of this workload" in sentence
            book.refuse = False
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
            await eventually_async(lambda: not book.present, "the end")
            assert [event for event, _, _ in book.events] == ["connected", "disconnected"]

    asyncio.run(scenario())


def test_a_deleted_pods_token_is_worth_nothing(api: client.ApiClient, rest: Rest) -> None:
    """The API says so, once its own cache does."""
    gone = Pod.create(rest)
    token = gone.token(rest)
    gone.delete(rest)

    async def scenario() -> None:
        async with serving(api) as service:
            code, turn = None, 0
            async with asyncio.timeout(PATIENCE_S):
                while code is not Code.UNAUTHENTICATED:
                    turn += 1
                    service.reviewer._answers.clear()
                    code, _ = await service.refused(gone, token, f"p{turn}")

    asyncio.run(scenario())


def test_a_newer_stream_of_a_process_takes_the_older_ones_place(
    api: client.ApiClient, pod: Pod, token: str
) -> None:
    """ABORTED for the older; the ledger hears of its end before it hears of the newer."""

    async def scenario() -> None:
        async with serving(api) as service, service.reporter(pod, token) as older:
            await older.greet()
            async with service.reporter(pod, token) as newer:
                await newer.greet()
                assert (await older.status())[0] is Code.ABORTED
                await newer.beat()
                await eventually_async(lambda: service.book.heartbeats, "the newer one's heartbeat")
                assert [event for event, _, _ in service.book.events] == [
                    "connected",
                    "disconnected",
                    "connected",
                ]
                assert service.value("streams") == 1
                assert service.value("streams_ended_total", cause="replaced") == 1
            await eventually_async(lambda: not service.book.present, "the end")

    asyncio.run(scenario())


def test_streams_end_by_silence_by_age_and_by_a_stop(api: client.ApiClient, pod: Pod, token: str) -> None:
    """Silence and a stop are UNAVAILABLE, age is a good end; each leaves once."""

    async def scenario() -> None:
        async with serving(api, heartbeat_s=1.0) as service:
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                assert (await sidecar.status())[0] is Code.UNAVAILABLE
            assert service.value("streams_ended_total", cause="silent") == 1
        async with serving(api, reauthenticate_s=2.0) as service:
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                assert (await sidecar.status())[0] is Code.OK
            assert service.value("streams_ended_total", cause="reauthenticate") == 1
        async with serving(api) as service, service.reporter(pod, token) as sidecar:
            await sidecar.greet()
            stopping = asyncio.create_task(service.fleet.stop(30.0))
            assert (await sidecar.status())[0] is Code.UNAVAILABLE
            await stopping
            assert [event for event, _, _ in service.book.events] == ["connected", "disconnected"]
            assert service.value("serving") == 0

    asyncio.run(scenario())


def test_after_a_restart_sidecars_come_again(api: client.ApiClient, pod: Pod, token: str) -> None:
    """Same port, same authority, a new service: the same sidecar is welcome, and hears the directive that is kept."""

    async def scenario() -> None:
        port = free_port()
        for generation in (1, 2):
            async with serving(api) as service:
                await service.fleet.stop(0)
                again = Fleet(
                    ledger=service.book,
                    reviewer=service.reviewer,
                    tls=service.tls,
                    metrics=FleetMetrics(),
                )
                await again.start("127.0.0.1", port)
                again.direct((pod.namespace, f"job-of-{pod.uid}"), directive(generation))
                async with Reporter(port, service.authority.pem, token, pod.hello()) as sidecar:
                    await sidecar.greet()
                    assert (await sidecar.next()).directive.generation == generation
                    stopping = asyncio.create_task(again.stop(30.0))
                    assert (await sidecar.status())[0] is Code.UNAVAILABLE
                    await stopping

    asyncio.run(scenario())


def test_an_api_that_is_away_is_no_refusal(apiserver: ApiServer, rest: Rest, pod: Pod, token: str) -> None:
    """UNAVAILABLE while it cannot be asked; what was asked before still holds; then it works again."""
    other = Pod.create(rest)
    other_token = other.token(rest)

    async def scenario(proxy: FaultyProxy, api: client.ApiClient) -> None:
        async with serving(api) as service:
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
            upstream, proxy.upstream_port = proxy.upstream_port, free_port()
            api.rest_client.pool_manager.clear()
            assert (await service.refused(other, other_token))[0] is Code.UNAVAILABLE
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
            assert service.value("token_reviews_total", outcome="unavailable", source="api") == 1
            assert service.value("token_reviews_total", outcome="authentic", source="cache") == 1
            proxy.upstream_port = upstream
            async with service.reporter(other, other_token) as sidecar:
                await sidecar.greet()

    with FaultyProxy(apiserver.port) as proxy, apiserver.api() as api:
        api.configuration.host = f"https://127.0.0.1:{proxy.port}"
        api.configuration.retries = False
        asyncio.run(scenario(proxy, client.ApiClient(api.configuration)))


def test_a_new_certificate_serves_new_connections_while_streams_live_on(
    api: client.ApiClient, pod: Pod, token: str
) -> None:
    """Rotation of the leaf and of its authority; a client with the old bundle works as long as the old leaf serves."""

    async def scenario() -> None:
        old, new = Authority("old"), Authority("new")
        async with serving(api) as service:
            service.tls.issued = old.issue()
            loads = service.metrics.loads.labels("loaded")._value.get
            await eventually_async(lambda: loads() == 2, "the old certificate")
            assert service.fleet.port is not None
            port = service.fleet.port
            async with Reporter(port, old.pem, token, pod.hello("first")) as first:
                await first.greet()
                # The bundle with both is out before the new leaf serves: both kinds of clients are served throughout.
                async with Reporter(port, old.pem + new.pem, token, pod.hello("both")) as both:
                    await both.greet()
                service.tls.issued = old.issue()
                await eventually_async(lambda: loads() == 3, "a new leaf of the old authority")
                async with Reporter(port, old.pem, token, pod.hello("old-bundle")) as lagging:
                    await lagging.greet()
                    service.tls.issued = new.issue()
                    await eventually_async(lambda: loads() == 4, "a leaf of the new authority")
                    async with Reporter(port, old.pem + new.pem, token, pod.hello("both")) as both:
                        await both.greet()
                    lost = await refused(port, old.pem, token, pod.hello("lost"))
                    assert lost[0] is Code.UNAVAILABLE, "no handshake"
                    before = len(service.book.heartbeats)
                    await first.beat()
                    await eventually_async(
                        lambda: len(service.book.heartbeats) == before + 1, "the first one lives on"
                    )
                    await first.call.done_writing()
                    assert (await first.status())[0] is Code.OK
                    drains = service.fleet._drains
                    await eventually_async(lambda: len(drains) == 1, "a server goes with its last stream")
                    stopping = asyncio.create_task(service.fleet.stop(60.0))
                    assert (await lagging.status())[0] is Code.UNAVAILABLE
                    await asyncio.wait_for(stopping, 60.0)
                    await eventually_async(lambda: not drains, "all are gone")

    asyncio.run(scenario())


def test_the_port_opens_when_there_is_a_certificate(
    api: client.ApiClient, pod: Pod, token: str, tmp_path: Path
) -> None:
    """Files that appear late, and then halves of them: said, and what serves goes on serving."""

    async def scenario() -> None:
        async with serving(api) as service:
            authority, metrics, port = Authority(), FleetMetrics(), free_port()
            late = Fleet(ledger=service.book, reviewer=service.reviewer, tls=Files(tmp_path), metrics=metrics)
            await late.start("127.0.0.1", port)
            assert late.unready()
            put(tmp_path, authority.issue())
            await eventually_async(lambda: late.port == port, "the port")
            assert not late.unready()
            (tmp_path / "tls.key").write_bytes(authority.issue().key)
            failed = metrics.loads.labels("failed")._value.get
            before = failed()
            await eventually_async(lambda: failed() > before, "the misfit is seen")
            async with Reporter(port, authority.pem, token, pod.hello()) as sidecar:
                await sidecar.greet()
            with socket.create_server(("127.0.0.1", 0)) as taken:
                unlucky = Fleet(
                    ledger=service.book, reviewer=service.reviewer, tls=service.tls, metrics=FleetMetrics()
                )
                with pytest.raises(FleetUnavailable, match="is the port free"):
                    await unlucky.start("127.0.0.1", taken.getsockname()[1])
            await late.stop(5.0)

    asyncio.run(scenario())


def test_limits_hold(api: client.ApiClient, pod: Pod, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many streams, no Hello, a message too large, a flood of save requests: bounded, and counted."""

    async def scenario() -> None:
        async with serving(api, max_streams=1) as service:
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                assert (await service.refused(pod, token, "p2"))[0] is Code.RESOURCE_EXHAUSTED
                key = (pod.namespace, f"job-of-{pod.uid}")
                told = sum(service.fleet.save_now(key, "user", urgent=False, deadline_s=0) for _ in range(50))
                assert told == fleets.MAX_SAVES, "nothing is sent before the loop turns"
                assert service.value("messages_dropped_total") == 50 - told
                for _ in range(told):
                    assert (await sidecar.next()).HasField("save_now")
                huge = wire.Incident(id=1, message="x" * (2 * fleets.MAX_MESSAGE_BYTES))
                with suppress(grpc.aio.AioRpcError):  # it may be refused before all of it is written
                    await sidecar.beat(incidents=[huge])
                assert (await sidecar.status())[0] is not Code.OK
            await eventually_async(lambda: not service.fleet._places, "room for another one")
            monkeypatch.setattr(fleets, "HELLO_S", 0.3)
            async with service.reporter(pod, token) as mute:
                assert (await mute.status())[0] is Code.UNAVAILABLE
            assert service.value("streams_refused_total", cause="no_hello") == 1

    asyncio.run(scenario())


def test_who_is_not_proven_takes_no_place(api: client.ApiClient, pod: Pod, token: str) -> None:
    """A crowd that never says Hello, with no token or garbage, is sent away at once, and costs the API nothing."""

    async def scenario() -> None:
        async with serving(api, max_streams=1) as service:
            for sent in (None, "garbage", "x" * 9000, "a.e30.c") * 5:
                assert service.fleet.port is not None
                async with Reporter(service.fleet.port, service.authority.pem, sent, pod.hello()) as stranger:
                    assert (await stranger.status())[0] is Code.UNAUTHENTICATED, "without a Hello"
            assert service.value("token_reviews_total", outcome="refused", source="api") == 0
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                assert service.fleet._places == {pod.uid: 1}

    asyncio.run(scenario())


def test_a_pod_has_a_few_places_and_not_all(
    api: client.ApiClient, rest: Rest, pod: Pod, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is good for any number of calls; those that never say Hello count, too."""
    monkeypatch.setattr(fleets, "HELLO_S", PATIENCE_S)
    other = Pod.create(rest)

    async def scenario() -> None:
        async with serving(api, max_streams=2 * fleets.POD_STREAMS) as service:
            async with AsyncExitStack() as stack:
                for n in range(fleets.POD_STREAMS):
                    sidecar = await stack.enter_async_context(service.reporter(pod, token, f"p{n}"))
                    if n % 2:
                        await sidecar.greet()
                await eventually_async(
                    lambda: service.fleet._places[pod.uid] == fleets.POD_STREAMS, "all proven"
                )
                assert (await service.refused(pod, token, "more"))[0] is Code.RESOURCE_EXHAUSTED
                assert service.value("streams_refused_total", cause="too_many") == 1
                async with service.reporter(other, other.token(rest)) as theirs:
                    await theirs.greet()
            await eventually_async(lambda: not service.fleet._places, "room again")
            async with service.reporter(pod, token, "more") as more:
                await more.greet()

    asyncio.run(scenario())


def test_a_sidecar_that_does_not_read_loses_its_stream(
    api: client.ApiClient, pod: Pod, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded, and so is how long it waits."""

    async def scenario() -> None:
        async with serving(api) as service, service.reporter(pod, token) as sidecar:
            await sidecar.greet()
            monkeypatch.setattr(fleets, "WRITE_S", 0.5)
            key = (pod.namespace, f"job-of-{pod.uid}")
            huge = "x" * (3 << 20)
            ended = service.metrics.ended.labels("slow")._value.get

            def flooded() -> bool:
                service.fleet.save_now(key, huge, urgent=False, deadline_s=0)
                return ended() == 1

            await eventually_async(flooded, "the end of patience")
            assert service.book.events[-1] == ("disconnected", pod.name, "p1")

    asyncio.run(scenario())


def test_a_ledger_that_fails_costs_one_stream(api: client.ApiClient, pod: Pod, token: str) -> None:
    """INTERNAL for that sidecar; the service goes on."""

    async def scenario() -> None:
        async with serving(api) as service:
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                hello = service.book.present.popitem()[1]  # so that the next report is a KeyError
                await sidecar.beat()
                assert (await sidecar.status())[0] is Code.INTERNAL
                service.book.present.clear()
                assert service.value("streams_ended_total", cause="failed") == 1
            async with service.reporter(pod, token) as sidecar:
                await sidecar.greet()
                assert list(service.book.present.values()) == [hello]

    asyncio.run(scenario())


@pytest.mark.slow
def test_three_hundred_sidecars_at_once(api: client.ApiClient, rest: Rest) -> None:
    """All come at the same moment, report, are directed, and vanish without a word: the books are empty again."""
    pods = [Pod.create(rest) for _ in range(75)]
    tokens = [each.token(rest) for each in pods]

    async def scenario() -> None:
        async with serving(api) as service:
            sidecars = [
                service.reporter(pod, token, f"p{number}", workload_uid="one-job")
                for pod, token in zip(pods, tokens, strict=True)
                for number in range(fleets.POD_STREAMS)
            ]
            await asyncio.gather(*(each.greet() for each in sidecars))
            assert len(service.book.present) == 300
            assert service.value("streams") == 300
            assert service.value("token_reviews_total", outcome="authentic", source="api") <= 300
            await asyncio.gather(
                *(each.beat(incidents=[wire.Incident(id=7)], phase=wire.PHASE_SAVING) for each in sidecars)
            )
            for reply in await asyncio.gather(*(each.next() for each in sidecars)):
                assert reply.ack.incident == 7
            service.fleet.direct(("default", "one-job"), directive(1))
            for reply in await asyncio.gather(*(each.next() for each in sidecars)):
                assert reply.directive.generation == 1
            for each in sidecars:
                await each.__aexit__()
            await eventually_async(lambda: not service.book.present, "all gone")
            assert service.value("streams") == 0
            assert service.value("streams_ended_total", cause="gone") == 300
            assert service.value("streams_ended_total", cause="failed") == 0
            assert not service.fleet._by_run
            assert len(service.book.events) == 600

    asyncio.run(scenario())
    gc.collect()
