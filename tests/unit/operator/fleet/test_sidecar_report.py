"""What comes over the wire becomes values that can be logged, counted and written to a status."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from deltashard_operator.fleet import sidecar_report
from deltashard_operator.fleet.sidecar_report import BadReport, Heartbeat, Hello, IncidentKind, Phase
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.floats()
COUNTS = st.integers(0, (1 << 64) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=2000)
INCIDENTS = st.builds(
    wire.Incident,
    id=st.one_of(st.integers(0, 200), COUNTS),
    kind=st.integers(0, 12),
    at_s=NUMBERS,
    cause=TEXTS,
    message=TEXTS,
    step=COUNTS,
    lost_steps=COUNTS,
    seconds=NUMBERS,
)
DECISIONS = st.builds(
    wire.Decision,
    subject=st.sampled_from(["interval", "bits", "recovery", "colour", ""]),
    goal=TEXTS,
    value=TEXTS,
    would=TEXTS,
    why=TEXTS,
    bound=TEXTS,
    evidence=TEXTS,
    unreachable=TEXTS,
)
MEASURED = st.builds(
    wire.Measured,
    step_s=NUMBERS,
    stall_s=NUMBERS,
    cost_s=NUMBERS,
    durable_s=NUMBERS,
    restore_s=NUMBERS,
    saves=COUNTS,
    mtbf_s=NUMBERS,
)
HEARTBEATS = st.builds(
    wire.Heartbeat,
    run=TEXTS,
    phase=st.integers(0, 12),
    ranks=st.lists(
        st.builds(wire.Rank, rank=st.integers(0, 1 << 31), world_size=st.integers(0, 1 << 31), step=COUNTS),
        max_size=5,
    ),
    attempt=COUNTS,
    last_commit=st.none()
    | st.builds(
        trainer_wire.Commit,
        seq=COUNTS,
        attempt=COUNTS,
        cut=COUNTS,
        step=COUNTS,
        baseline=st.booleans(),
        durable_s=NUMBERS,
        stored_bytes=COUNTS,
        raw_bytes=COUNTS,
        rows=COUNTS,
    ),
    last_commit_at_s=NUMBERS,
    policy=st.builds(
        trainer_wire.Policy,
        every_s=NUMBERS,
        every_steps=COUNTS,
        encoding=TEXTS,
        goal=TEXTS,
        least_s=NUMBERS,
        bits_goal=TEXTS,
        tables=TEXTS,
    ),
    measured=st.none() | MEASURED,
    decisions=st.lists(DECISIONS, max_size=5),
    stored_bytes=COUNTS,
    incidents=st.lists(INCIDENTS, max_size=6),
)


def hello(**changes: Any) -> wire.Hello:
    fields: dict[str, Any] = {
        "protocol_min": 1,
        "protocol_max": 1,
        "namespace": "team-a",
        "pod": "train-0-abcde",
        "pod_uid": "3b2a0f7e-0000-4000-8000-000000000001",
        "process": "p1",
        "workload_uid": "3b2a0f7e-0000-4000-8000-000000000002",
    }
    return wire.Hello(**(fields | changes))


def assert_bounded(value: Any) -> None:
    """Everything in a value, however deep, is within its bounds."""
    match value:
        case bool():
            return
        case int():
            assert 0 <= value <= sidecar_report.MAX_COUNT
        case float():
            assert math.isfinite(value)
            assert value >= 0
        case str():
            assert len(value) <= sidecar_report.MAX_TABLES
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in value)
        case tuple():
            assert len(value) <= max(sidecar_report.MAX_INCIDENTS, sidecar_report.MAX_RANKS)
            for each in value:
                assert_bounded(each)
        case None:
            return
        case wire.Decision() | trainer_wire.Policy():
            for _, text in value.ListFields():
                assert_bounded(text)
        case _:
            for field in dataclasses.fields(value):
                assert_bounded(getattr(value, field.name))


@given(HEARTBEATS)
def test_any_heartbeat_becomes_a_bounded_value(message: wire.Heartbeat) -> None:
    """Texts are clipped, numbers finite and of int64, incidents rise; what was in bounds is as it came."""
    value = sidecar_report.heartbeat_of(wire.Heartbeat.FromString(message.SerializeToString()))
    assert_bounded(value)
    ids = [each.id for each in value.incidents]
    assert ids == sorted(set(ids))
    assert (value.last_commit is None) == (not message.HasField("last_commit"))
    if message.attempt <= sidecar_report.MAX_COUNT:
        assert value.attempt == message.attempt
    if message.policy.encoding.isprintable() and len(message.policy.encoding) <= sidecar_report.MAX_WORD:
        assert value.policy.encoding == message.policy.encoding


def test_of_decisions_only_what_can_be_shown_is_taken() -> None:
    """One of a subject, its texts clipped to what a status holds."""
    messages = [
        wire.Decision(subject="colour"),
        wire.Decision(subject="interval", value="3 min", why="x" * 2000),
        wire.Decision(subject="interval", value="4 min"),
        wire.Decision(subject="bits", would="q4\nq8"),
    ]
    first, second = sidecar_report.heartbeat_of(wire.Heartbeat(decisions=messages)).decisions
    assert (first.subject, first.value, len(first.why)) == ("interval", "3 min", sidecar_report.MAX_REASON)
    assert (second.subject, second.would) == ("bits", "q4 q8")


@given(
    st.builds(
        hello,
        namespace=TEXTS,
        pod=TEXTS | st.just("pod-1"),
        pod_uid=TEXTS | st.just("u1"),
        url=TEXTS,
        node=TEXTS,
        started_at_s=NUMBERS,
    )
)
def test_any_hello_is_a_bounded_value_or_a_bad_report(message: wire.Hello) -> None:
    """Nothing else than BadReport comes out of a hello."""
    try:
        value = sidecar_report.hello_of(message)
    except BadReport:
        return
    assert_bounded(value)


def test_a_hello_comes_through() -> None:
    """The keys that the controller goes by."""
    value = sidecar_report.hello_of(hello(url="s3://bucket/prefix", index="3"))
    assert isinstance(value, Hello)
    assert value.run_key == ("team-a", "3b2a0f7e-0000-4000-8000-000000000002")
    assert value.stream_key == ("3b2a0f7e-0000-4000-8000-000000000001", "p1")
    assert (value.url, value.index) == ("s3://bucket/prefix", "3")


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": ""},
        {"namespace": "Team"},
        {"pod": "a/b"},
        {"pod": "a\n"},
        {"pod_uid": ""},
        {"process": " "},
        {"workload_uid": "x" * 300},
        {"protocol_min": 0},
        {"protocol_min": 3, "protocol_max": 2},
    ],
)
def test_identities_that_cannot_be_are_bad_reports(changes: dict[str, Any]) -> None:
    """No clipping there: a clipped name is another one's."""
    with pytest.raises(BadReport):
        sidecar_report.hello_of(hello(**changes))


def test_every_phase_and_kind_of_the_contract_has_a_name() -> None:
    """And what a newer sidecar made up is UNKNOWN."""
    for number in wire.Phase.values():
        phase = sidecar_report.heartbeat_of(wire.Heartbeat(phase=number)).phase
        assert (phase is Phase.UNKNOWN) == (number == wire.PHASE_UNSPECIFIED)
    for number in wire.IncidentKind.values():
        (incident,) = sidecar_report.heartbeat_of(
            wire.Heartbeat(incidents=[wire.Incident(id=1, kind=number)])
        ).incidents
        assert (incident.kind is IncidentKind.UNKNOWN) == (number == wire.INCIDENT_KIND_UNSPECIFIED)


def test_of_too_many_incidents_the_oldest_are_taken() -> None:
    """An acknowledgement covers all ids below it: those left out must be above."""
    many = [wire.Incident(id=number) for number in range(200, 0, -1)]
    value: Heartbeat = sidecar_report.heartbeat_of(wire.Heartbeat(incidents=many))
    assert [each.id for each in value.incidents] == list(range(1, sidecar_report.MAX_INCIDENTS + 1))


def test_a_directive_goes_out_whole() -> None:
    """Every field of the policy."""
    policy = trainer_wire.Policy(
        every_s=90.0, every_steps=7, encoding="q4", differential="one-shot", state_encoding="bf16"
    )
    message = sidecar_report.Directive(generation=5, policy=policy).message()
    assert message.generation == 5
    stated = {"goal", "least_s", "most_s", "bits_goal", "least_bits", "tables"}
    assert set(message.whole) == {"every_s", "every_steps", *stated}
    untimed = sidecar_report.Directive(generation=6, policy=trainer_wire.Policy(encoding="q8")).message()
    assert set(untimed.whole) == stated
    assert sidecar_report.heartbeat_of(wire.Heartbeat(policy=message.policy)).policy == policy
