"""The client of the heartbeat service against a real gRPC server over TLS, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from deltashard_checkpoint.backoff import Backoff
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import settings
from deltashard_sidecar.fleet import fleet_stream
from deltashard_sidecar.fleet.fleet_stream import Fleet
from deltashard_sidecar.telemetry.structured_logging import configure

from tests.support.eventually import eventually
from tests.support.machine import limit_s
from tests.support.server.fleet_server import Authority, FleetServer
from tests.support.server.port import free_port
from tests.support.sidecar.fleet_side import SOON, Side

DEADLINE_S = 60.0
AT_ONCE = Backoff(first_s=0.0, longest_s=0.0)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@contextmanager
def client(
    side: Side, address: str, authority: Authority, token: Path, *, backoff: Backoff = SOON
) -> Iterator[Fleet]:
    config = settings.load([], {
        "DELTASHARD_URL": "memory://x", "DELTASHARD_RUN": "ns/run", "DELTASHARD_DIR": "/d", "DELTASHARD_CACHE_DIR": "/c",
        "DELTASHARD_FLEET": address, "DELTASHARD_FLEET_CA": authority.pem, "DELTASHARD_FLEET_TOKEN_FILE": str(token),
        "POD_NAME": "pod", "POD_NAMESPACE": "ns", "POD_UID": "p-1", "NODE_NAME": "node",
        "DELTASHARD_WORKLOAD_KIND": "Job", "DELTASHARD_WORKLOAD_NAME": "job", "DELTASHARD_WORKLOAD_UID": "w-1",
        "DELTASHARD_INDEX": "2", "DELTASHARD_REPLICA": "1", "DELTASHARD_POLICY": "default",
    })  # fmt: skip
    one = Fleet(
        config, beat=side.beat, follow=side.directives.append, save_now=side.asked.append,
        acknowledge=side.incidents.acknowledge, metrics=side.metrics, log=configure("error", run="r"), backoff=backoff,
    )  # fmt: skip
    one.start()
    try:
        yield one
    finally:
        one.stop()


def wait(condition: Callable[[], object], what: str) -> None:
    eventually(condition, timeout_s=DEADLINE_S, what=what)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("good\n")
    return path


def test_it_says_who_it_is_then_how_it_stands(
    authority: Authority, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hello from the downward API, a heartbeat at once and at every change; what comes back reaches the sidecar."""
    monkeypatch.setattr(fleet_stream, "NEWS_DEADLINE_S", DEADLINE_S)  # this machine may be busier than a node
    side = Side()
    with FleetServer(authority) as server, client(side, server.address, authority, token):
        wait(lambda: server.beats, "a heartbeat")
        hello = server.hellos[0]
        assert (hello.pod, hello.namespace, hello.pod_uid, hello.node) == ("pod", "ns", "p-1", "node")
        assert (hello.workload_kind, hello.workload_name, hello.workload_uid) == ("Job", "job", "w-1")
        assert (hello.index, hello.replica, hello.policy, hello.run) == ("2", "1", "default", "ns/run")
        assert hello.process
        assert hello.version
        assert side.value("deltashard_fleet_connected") == 1
        side.phase = fleet.PHASE_TRAINING
        wait(lambda: server.last.phase == fleet.PHASE_TRAINING, "the change")
        server.tell(directive=fleet.Directive(generation=3, policy=pb.Policy(every_s=5)))
        server.tell(directive=fleet.Directive(generation=4, policy=pb.Policy(encoding="bogus")))
        server.tell(save_now=fleet.SaveRequested(reason="user"))
        wait(lambda: side.asked, "the save")
        (directive,) = side.directives
        assert (directive.generation, directive.workload, directive.policy.every_s) == (3, "w-1", 5.0)
        side.incidents.add(fleet.INCIDENT_KIND_FENCED, cause="fenced", message="m")
        wait(lambda: not side.incidents.kept(), "the acknowledgement")
        side.phase = fleet.PHASE_CLOSED
    assert server.last.phase == fleet.PHASE_CLOSED, "the last news goes out before the stream ends"
    assert side.value("deltashard_fleet_connected") == 0


def test_incidents_outlast_a_controller_that_is_away(authority: Authority, token: Path) -> None:
    """Told to the next one, which listens where the first one did."""
    side = Side()
    with (
        FleetServer(authority, port=free_port()) as first,  # nobody takes it meanwhile
        client(side, first.address, authority, token),
    ):
        wait(lambda: first.beats, "connected")
        first.close()
        wait(lambda: side.value("deltashard_fleet_connected") == 0, "disconnected")
        for number in range(3):
            side.incidents.add(fleet.INCIDENT_KIND_SAVE_FAILED, cause="error", message="m", step=number)
        wait(lambda: side.refused("unreachable"), "a try")
        with FleetServer(authority, port=first.port) as second:
            wait(lambda: len(second.incidents(fleet.INCIDENT_KIND_SAVE_FAILED)) == 3, "the incidents")
            wait(lambda: not side.incidents.kept(), "the acknowledgement")
            assert second.hellos[0].process == first.hellos[0].process
    assert side.value("deltashard_fleet_reconnects_total") >= 1


def test_the_token_is_read_at_each_connect(authority: Authority, token: Path) -> None:
    """It rotates under the client; a refusal is a metric, and trying goes on."""
    side = Side()
    token.unlink()
    with FleetServer(authority) as server, client(side, server.address, authority, token):
        wait(lambda: side.refused("token"), "the missing token is counted")
        token.write_text("stale")
        wait(lambda: side.refused("unauthenticated"), "the refusal is counted")
        token.write_text("good")
        wait(lambda: server.beats, "connected")
        server.token = "next"
        token.write_text("next")
        server.end_streams()
        wait(lambda: "next" in server.tokens and server.connected, "authenticated again")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "denied"),
        (grpc.StatusCode.NOT_FOUND, "unknown_pod"),
        (grpc.StatusCode.UNAVAILABLE, "unreachable"),
    ],
)
def test_every_refusal_is_tried_again(
    authority: Authority, token: Path, code: grpc.StatusCode, cause: str
) -> None:
    """And counted by its cause."""
    side = Side()
    with FleetServer(authority) as server:
        server.refuse = code
        with client(side, server.address, authority, token):
            wait(lambda: side.refused(cause) >= 2, "two refusals")
            server.refuse = None
            wait(lambda: server.beats, "taken in")


def test_another_authority_is_not_believed(authority: Authority, token: Path) -> None:
    """No token reaches a server that the injected authority does not vouch for."""
    side = Side()
    with (
        FleetServer(Authority()) as impostor,
        client(side, impostor.address, authority, token),
    ):
        wait(lambda: side.refused("verification") >= 2, "the failed verification is counted")
        assert not impostor.tokens


@pytest.mark.timeout(limit_s(200))
def test_nothing_is_left_of_a_thousand_streams(authority: Authority, token: Path) -> None:
    """A controller in a crash loop costs no descriptors and no threads."""
    side, process = Side(), psutil.Process()
    reconnects = lambda: side.value("deltashard_fleet_reconnects_total")  # noqa: E731
    with FleetServer(authority) as server:
        server.end_at_once = True
        with client(side, server.address, authority, token, backoff=AT_ONCE):
            eventually(lambda: reconnects() >= 50, timeout_s=40, what="warm")
            fds, threads = process.num_fds(), threading.active_count()
            eventually(lambda: reconnects() >= 1050, timeout_s=100, what="1,000 reconnects")
            eventually(lambda: process.num_fds() <= fds + 8, timeout_s=DEADLINE_S, what="no descriptors left")
            eventually(
                lambda: threading.active_count() <= threads + 4, timeout_s=DEADLINE_S, what="no threads left"
            )
