"""When heartbeats go out, what a pod is at, why a stream was refused, and when it is tried again."""

from __future__ import annotations

import grpc
import pytest
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_sidecar.fleet.fleet_stream import refusal
from deltashard_sidecar.fleet.heartbeat import BACKOFF, HeartbeatPace, failures_after, phase
from deltashard_sidecar.telemetry.metric import FLEET_CAUSES


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, fleet.PHASE_WAITING),
        ({"attached": 1}, fleet.PHASE_RESTORING),
        ({"attached": 1, "opened": True, "restoring": True}, fleet.PHASE_RESTORING),
        ({"attached": 1, "opened": True}, fleet.PHASE_TRAINING),
        ({"attached": 1, "opened": True, "saving": True}, fleet.PHASE_SAVING),
        ({"saving": True}, fleet.PHASE_WAITING),
        ({"closed": True}, fleet.PHASE_CLOSED),
        ({"closed": True, "stopping": True}, fleet.PHASE_CLOSED),
        ({"closed": True, "attached": 1}, fleet.PHASE_RESTORING),
        ({"stopping": True, "attached": 1, "opened": True}, fleet.PHASE_STOPPING),
    ],
)
def test_phases(facts: dict[str, object], expected: fleet.Phase) -> None:
    """A job that ended well stays told as such while its pod goes."""
    nothing = {"stopping": False, "attached": 0, "opened": False, "restoring": False, "saving": False}
    assert phase(**{**nothing, "closed": False, **facts}) == expected  # type: ignore[arg-type]


def test_news_goes_out_at_once_but_not_more_often_than_once_a_second() -> None:
    """Steps and sizes are no news; everything else is; silence is broken every heartbeat_s."""
    pace = HeartbeatPace().asked(15.0)
    beat = fleet.Heartbeat(phase=fleet.PHASE_TRAINING, ranks=[fleet.Rank(step=1)], stored_bytes=1)
    assert pace.due(beat, 100.0)
    pace = pace.after(beat, 100.0)
    beat.ranks[0].step, beat.stored_bytes = 9, 9
    assert not pace.due(beat, 110.0)
    assert pace.due(beat, 115.0)
    for change in (
        fleet.Heartbeat(phase=fleet.PHASE_SAVING),
        fleet.Heartbeat(attempt=4),
        fleet.Heartbeat(directive=2),
        fleet.Heartbeat(store_ok=True),
        fleet.Heartbeat(incidents=[fleet.Incident(id=1)]),
    ):
        changed = fleet.Heartbeat()
        changed.CopyFrom(beat)
        changed.MergeFrom(change)
        assert not pace.due(changed, 100.9)
        assert pace.due(changed, 101.0)


def test_measured_numbers_are_no_news_and_decisions_are() -> None:
    """A mean that moves with every save is told with the next heartbeat; another interval, bound or goal at once."""
    held = {
        "subject": "interval",
        "goal": "auto",
        "value": "every 60 s",
        "would": "every 60 s",
    }
    beat = fleet.Heartbeat(
        measured=fleet.Measured(cost_s=1.0, saves=8),
        decisions=[fleet.Decision(**held, why="1 s", evidence="8 saves", bound="not below 3 s")],
    )
    pace = HeartbeatPace().asked(15.0).after(beat, 100.0)
    beat.measured.cost_s, beat.measured.saves = 1.1, 9
    beat.decisions[0].why, beat.decisions[0].evidence, beat.decisions[0].bound = (
        "1.1 s",
        "9 saves",
        "not below 4 s",
    )
    assert not pace.due(beat, 110.0)
    for name, value in (
        ("would", "every 90 s"),
        ("goal", "fixed"),
        ("bound", ""),
        ("unreachable", "too dear"),
    ):
        changed = fleet.Heartbeat()
        changed.CopyFrom(beat)
        setattr(changed.decisions[0], name, value)
        assert pace.due(changed, 101.0), name
    assert pace.due(fleet.Heartbeat(measured=beat.measured), 101.0), "nothing is decided any more"


def test_the_controllers_wish_is_bounded() -> None:
    """Neither a flood nor silence can be asked for."""
    assert HeartbeatPace().asked(0.0).heartbeat_s == 15.0
    assert HeartbeatPace().asked(0.001).heartbeat_s == 1.0
    assert HeartbeatPace().asked(1e9).heartbeat_s == 300.0


def test_pauses_grow_and_are_spread() -> None:
    """Up to a minute; a stream that was taken in starts anew; what will not pass by itself starts slow."""
    failures, longest = 0, []
    for _ in range(40):
        failures = failures_after(failures, welcomed=False, lasting=False)
        longest.append(BACKOFF.delay_s(failures, lambda: 1.0))
    assert longest[:5] == [4.0, 8.0, 16.0, 32.0, 60.0]
    assert max(longest) == 60.0
    failures = failures_after(failures, welcomed=True, lasting=False)
    assert BACKOFF.delay_s(failures, lambda: 1.0) == 4.0
    assert 0 < BACKOFF.delay_s(failures, lambda: 0.0) < 0.5
    lasting = failures_after(0, welcomed=False, lasting=True)
    assert BACKOFF.delay_s(lasting, lambda: 1.0) == 32.0


@pytest.mark.parametrize(
    ("code", "details", "cause"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "", "unauthenticated"),
        (grpc.StatusCode.PERMISSION_DENIED, "", "denied"),
        (grpc.StatusCode.NOT_FOUND, "", "unknown_pod"),
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "unreachable"),
        (grpc.StatusCode.UNAVAILABLE, "Tls handshake failed: CERTIFICATE_VERIFY_FAILED", "verification"),
        (grpc.StatusCode.UNAVAILABLE, "Tls handshake failed (TSI_PROTOCOL_FAILURE): x", "verification"),
        (grpc.StatusCode.UNAVAILABLE, "Hostname Verification Check failed.", "verification"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", "no_room"),
        (grpc.StatusCode.ABORTED, "", "replaced"),
        (grpc.StatusCode.INVALID_ARGUMENT, "", "protocol"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Handshake read failed (recvmsg:Connection reset by peer (104))",
            "unreachable",
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "", "protocol"),
        (grpc.StatusCode.INTERNAL, "", "other"),
    ],
)
def test_refusals_have_a_cause_of_a_closed_set(code: grpc.StatusCode, details: str, cause: str) -> None:
    """What the metric's label says."""
    assert refusal(code, details) == cause
    assert cause in FLEET_CAUSES
