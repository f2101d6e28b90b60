"""The client of the controller against a real HTTPS server, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.log.run_state import RunState
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import settings
from deltashard_sidecar.fleet import report_client, report_schedule
from deltashard_sidecar.fleet.report_client import ReportClient
from deltashard_sidecar.save_orders import SaveOrders
from deltashard_sidecar.telemetry.incident import Incidents
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure

from tests.support.eventually import eventually
from tests.support.server.fleet_server import CertificateAuthority, FleetServer

DEADLINE_S = 60.0


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("good\n")
    return path


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between reports. The last report gets a longer deadline, for a busy machine."""
    monkeypatch.setattr(report_schedule, "BACKOFF", Backoff(first_s=0.05, longest_s=0.1))
    monkeypatch.setattr(report_schedule, "UNKNOWN_POD", Backoff(first_s=0.05, longest_s=0.1))
    monkeypatch.setattr(report_schedule, "PAUSE_S", dict.fromkeys((400, 401, 403, 409, 413), 0.1))
    monkeypatch.setattr(report_client, "LAST_DEADLINE_S", DEADLINE_S)


class FakeReporter:
    """The sidecar's side of the client: it supplies the reports and records the directives."""

    is_reporter = False

    def __init__(self) -> None:
        self.log = configure("error", run="r")
        self.metrics = Metrics()
        self.orders = SaveOrders(request_save=lambda _: None, state=lambda: RunState(run="r"), in_flight=list)
        self.incidents = Incidents(self.metrics)
        self.directives: list[fleet.Directive] = []
        self.apply_directive = self.directives.append
        self.phase = fleet.PHASE_WAITING

    def pod(self) -> fleet.PodState:
        return fleet.PodState(phase=self.phase)

    def run(self) -> fleet.RunState:
        return fleet.RunState(checkpoint_count=3)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"deltashard_fleet_{name}", labels) or 0.0

    def refused(self, cause: str) -> float:
        return self.value("report_failures_total", cause=cause)


@contextmanager
def client(
    side: FakeReporter, address: str, authority: CertificateAuthority, token: Path
) -> Iterator[ReportClient]:
    side.settings = settings.load([], {
        "DELTASHARD_URL": "memory://x", "DELTASHARD_RUN": "ns/run", "DELTASHARD_DIR": "/d", "DELTASHARD_CACHE_DIR": "/c",
        "DELTASHARD_FLEET": address, "DELTASHARD_FLEET_CA": authority.pem.decode(), "DELTASHARD_FLEET_TOKEN_FILE": str(token),
        "POD_NAME": "pod", "POD_NAMESPACE": "ns", "POD_UID": "p-1", "NODE_NAME": "node",
        "DELTASHARD_WORKLOAD_KIND": "Job", "DELTASHARD_WORKLOAD_NAME": "job", "DELTASHARD_WORKLOAD_UID": "w-1",
        "DELTASHARD_INDEX": "2", "DELTASHARD_REPLICA": "1", "DELTASHARD_POLICY": "default",
    })  # fmt: skip
    one = ReportClient(side)  # type: ignore[arg-type]
    one.start()
    try:
        yield one
    finally:
        one.stop()


def test_report_has_identity_and_state(authority: CertificateAuthority, token: Path) -> None:
    """Reports are sent at the start, on a change, on a nudge, and at the end. An invalid directive is not applied."""
    side = FakeReporter()
    with FleetServer(authority, next_s=300) as server, client(side, server.address, authority, token) as one:
        eventually(lambda: server.reports, "the first report")
        first = server.last
        assert (first.protocol, first.sequence, first.HasField("run")) == (1, 1, False)
        assert (first.identity.pod, first.identity.namespace, first.identity.pod_uid) == ("pod", "ns", "p-1")
        assert (first.identity.node, first.identity.policy, first.identity.run) == (
            "node",
            "default",
            "ns/run",
        )
        assert (first.identity.workload_uid, first.identity.index, first.identity.replica) == (
            "w-1",
            "2",
            "1",
        )
        assert first.process
        assert first.identity.version
        server.set_reply(report_run=True, directive=fleet.Directive(id=3, policy=pb.Policy(every_s=5)))
        side.phase = fleet.PHASE_TRAINING
        eventually(lambda: side.directives, "the directive")
        assert (side.directives[0].id, side.directives[0].workload) == (3, "w-1")
        server.set_reply(directive=fleet.Directive(id=4, policy=pb.Policy(encoding="bogus")))
        side.incidents.add(fleet.INCIDENT_KIND_FENCED, cause="fenced", message="m")
        eventually(lambda: not side.incidents.pending(), "the incident is acknowledged")
        assert server.last.run.checkpoint_count == 3, "a designated reporter reports for the run"
        reported = len(server.reports)
        one.nudge()
        eventually(lambda: len(server.reports) > reported, "the nudge")
        assert side.value("connected") == 1
        side.phase = fleet.PHASE_CLOSED
    assert server.last.pod.phase == fleet.PHASE_CLOSED
    assert [each.sequence for each in server.reports] == list(range(1, len(server.reports) + 1))
    assert len(side.directives) == 1


def test_token_is_read_for_each_report(authority: CertificateAuthority, token: Path) -> None:
    """The token may rotate. A rejection is counted, and the client keeps retrying."""
    side = FakeReporter()
    token.unlink()
    with FleetServer(authority) as server, client(side, server.address, authority, token):
        eventually(lambda: side.refused("token"), "the missing token is counted")
        token.write_text("stale")
        eventually(lambda: side.refused("unauthenticated"), "the refusal is counted")
        token.write_text("good")
        eventually(lambda: server.reports, "taken")
    side = FakeReporter()  # no token is sent to a server without a certificate of the injected authority
    with FleetServer(CertificateAuthority()) as impostor, client(side, impostor.address, authority, token):
        eventually(lambda: side.refused("verification") >= 2, "the failed verification is counted")
        assert not impostor.tokens


@pytest.mark.parametrize(
    ("status", "cause"),
    [(400, "protocol"), (403, "denied"), (404, "unknown_pod"), (421, "not_leading"), (429, "busy"), (500, "other")],
)  # fmt: skip
def test_every_refusal_is_retried(
    authority: CertificateAuthority, token: Path, status: int, cause: str
) -> None:
    """Each failure is counted by its cause. After an unreadable report the client omits the texts of incidents."""
    side = FakeReporter()
    side.incidents.add(fleet.INCIDENT_KIND_FENCED, cause="fenced", message="m")
    with FleetServer(authority) as server:
        server.reject = lambda _: status
        with client(side, server.address, authority, token):
            eventually(lambda: side.refused(cause) >= 2, "two refusals")
            server.reject = lambda _: 0
            eventually(lambda: server.reports, "taken")
    (incident,) = server.incidents(fleet.INCIDENT_KIND_FENCED)
    assert incident.message == ("" if status == 400 else "m")
