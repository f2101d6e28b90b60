"""Both real ends of the reports: the sidecar's client and the controller's service, with a real token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.service import Fleet
from deltashard_operator.fleet.sidecar_report import Directive, IncidentKind, Phase
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import settings
from deltashard_sidecar.fleet import fleet_stream
from deltashard_sidecar.fleet.fleet_stream import Fleet as Client
from deltashard_sidecar.telemetry.structured_logging import configure
from kubernetes import client

from tests.support.eventually import eventually_async
from tests.support.operator.fleet_service import PATIENCE_S, Pod, serving
from tests.support.server.apiserver import ApiServer
from tests.support.sidecar.fleet_side import SOON, Side


def connected(side: Side, pod: Pod, address: str, authority: bytes, token: Path) -> Client:
    """The sidecar's client as injection configures it."""
    config = settings.load([], {
        "DELTASHARD_URL": "memory://x", "DELTASHARD_RUN": "default/train", "DELTASHARD_DIR": "/d",
        "DELTASHARD_CACHE_DIR": "/c", "DELTASHARD_FLEET": address, "DELTASHARD_FLEET_CA": authority.decode(),
        "DELTASHARD_FLEET_TOKEN_FILE": str(token), "POD_NAME": pod.name, "POD_NAMESPACE": pod.namespace,
        "POD_UID": pod.uid, "NODE_NAME": "node", "DELTASHARD_WORKLOAD_KIND": "Job",
        "DELTASHARD_WORKLOAD_NAME": "train", "DELTASHARD_WORKLOAD_UID": "w-1", "DELTASHARD_POLICY": "default",
    })  # fmt: skip
    one = Client(
        config, beat=side.beat, follow=side.directives.append, save_now=side.asked.append,
        acknowledge=side.incidents.acknowledge, metrics=side.metrics, log=configure("error", run="r"), backoff=SOON,
    )  # fmt: skip
    one.start()
    return one


def test_a_sidecar_and_the_controller_understand_each_other(
    apiserver: ApiServer, api: client.ApiClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports, incidents, directives, save requests; a new certificate; a controller that starts anew; the last word."""
    monkeypatch.setattr(fleet_stream, "NEWS_DEADLINE_S", PATIENCE_S)  # this machine may be busier than a node
    with apiserver.http() as rest:
        pod = Pod.create(rest)
        (tmp_path / "token").write_text(pod.token(rest))
    side = Side()
    key = (pod.namespace, "w-1")

    async def scenario() -> None:
        async with serving(api, reauthenticate_s=1.0) as service:
            book, fleet = service.book, service.fleet
            fleet.direct(key, Directive(generation=3, policy=pb.Policy(every_s=7.0)))
            address = f"localhost:{fleet.port}"
            sidecar = connected(side, pod, address, service.authority.pem, tmp_path / "token")
            try:
                await eventually_async(lambda: side.directives, "the directive")
                assert (side.directives[0].generation, side.directives[0].policy.every_s) == (3, 7.0)
                await eventually_async(lambda: book.heartbeats, "the first heartbeat")
                ((hello, _), *_) = book.heartbeats
                assert (hello.pod, hello.pod_uid, hello.run_key) == (pod.name, pod.uid, key)
                side.phase = wire.PHASE_TRAINING
                side.incidents.add(
                    wire.INCIDENT_KIND_SAVE_FAILED, cause="unavailable", message="the store is away"
                )
                await eventually_async(lambda: not side.incidents.kept(), "the acknowledgement")
                beat = next(beat for _, beat in book.heartbeats if beat.incidents)
                assert beat.incidents[0].kind is IncidentKind.SAVE_FAILED
                assert book.heartbeats[-1][1].phase is Phase.TRAINING

                def asked() -> bool:
                    # Again and again: a stream that ends, to authenticate again, may take one along.
                    fleet.save_now(key, "user", urgent=True, deadline_s=5.0)
                    return bool(side.asked)

                await eventually_async(asked, "the save request")

                # A new leaf, and streams that end to authenticate again: they come back to the new server.
                service.tls.issued = service.authority.issue()
                loads = service.metrics.loads.labels("loaded")._value.get
                await eventually_async(lambda: loads() == 2, "the new certificate")
                accepted = service.metrics.accepted._value.get
                before = accepted()
                await eventually_async(lambda: accepted() >= before + 2, "the sidecar comes again, twice")
                assert service.value("streams_refused_total", cause="not_authentic") == 0

                # The controller ends and another one listens in its place.
                assert fleet.port is not None
                port = fleet.port
                await fleet.stop(5.0)
                again = Fleet(ledger=book, reviewer=service.reviewer, tls=service.tls, metrics=FleetMetrics())
                again.direct(key, Directive(generation=4, policy=pb.Policy(encoding="q8")))
                await again.start("127.0.0.1", port)
                await eventually_async(
                    lambda: side.directives[-1].generation == 4, "the next one's directive"
                )
                side.phase = wire.PHASE_CLOSED
                await asyncio.to_thread(sidecar.stop)
                await eventually_async(lambda: book.heartbeats[-1][1].phase is Phase.CLOSED, "the last word")
                await eventually_async(lambda: not book.present, "the end")
                await again.stop(5.0)
            finally:
                await asyncio.to_thread(sidecar.stop)

    asyncio.run(scenario())
