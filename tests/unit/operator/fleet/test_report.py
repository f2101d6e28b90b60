"""Received reports become bounded values for logs, metrics and statuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import yaml
from deltashard_operator.fleet import report as reports
from deltashard_operator.fleet.report import IncidentKind, InvalidReport, Outcome, SidecarPhase
from deltashard_proto.v1 import fleet_pb2 as wire
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator.definition import DEFINITIONS

UIDS = {"pod_uid": "3b2a0f7e-0001", "workload_uid": "3b2a0f7e-0002"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=1500)


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return messages(field.message_type._concrete_class)
        case FieldDescriptor.CPPTYPE_STRING:
            return TEXTS
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_INT64:
            return st.integers(-(1 << 63), (1 << 63) - 1)
        case FieldDescriptor.CPPTYPE_UINT64:
            return st.integers(0, (1 << 64) - 1)
        case FieldDescriptor.CPPTYPE_UINT32:
            return st.integers(0, (1 << 32) - 1)
        case _:  # all enums, including newer values
            return st.integers(0, 20)


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            field.name: st.lists(_values(field), max_size=3) if field.is_repeated else _values(field)
            for field in kind.DESCRIPTOR.fields
        },
    ).map(lambda fields: kind(**fields))


def report(**changes: Any) -> wire.ReportRequest:
    identity = wire.SidecarIdentity(namespace="team-a", pod="train-0-abcde", **UIDS)
    return wire.ReportRequest(
        **({"identity": identity, "pod": wire.PodState(), "process": "p1", "sequence": 1} | changes)
    )


def assert_bounded(value: Any) -> None:
    match value:
        case bool() | None:
            return
        case int():
            assert 0 <= value <= reports.MAX_INT64
        case float():
            assert math.isfinite(value)
            assert value >= 0
        case str():
            assert len(value) <= reports.MAX_TABLES
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in value)
        case tuple():
            assert len(value) <= max(reports.MAX_INCIDENTS, reports.MAX_RANKS)
            for each in value:
                assert_bounded(each)
        case Message():
            for field, each in value.ListFields():
                assert_bounded(tuple(each) if field.is_repeated else each)
        case _:
            for field in dataclasses.fields(value):
                if (type(value), field.name) != (reports.PodState, "directive"):  # a hash of 64 bits
                    assert_bounded(getattr(value, field.name))


@given(messages(wire.ReportRequest))
def test_any_message_is_a_bounded_value_or_a_bad_report(message: wire.ReportRequest) -> None:
    for sent in (message, report(pod=message.pod, run=message.run, incidents=message.incidents)):
        try:
            value = reports.parse_report(wire.ReportRequest.FromString(sent.SerializeToString()))
        except InvalidReport:
            assert sent is message
            continue
        assert_bounded(value)
        ids = [each.id for each in value.incidents]
        assert ids == sorted(set(ids))
        assert (value.identity.run_key, value.process) == (
            (sent.identity.namespace, sent.identity.workload_uid),
            sent.process,
        )
        assert (value.run is None) == (not sent.HasField("run"))
        assert value.pod.directive == sent.pod.directive
        if sent.pod.attempt <= reports.MAX_INT64:
            assert value.pod.attempt == sent.pod.attempt


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"identity": {name: bad}}
            for name, bad in (("namespace", ""), ("namespace", "Team"), ("pod", "a/b"))
        ),
        *(
            {"identity": {name: bad}}
            for name, bad in (("pod", "a\n"), ("pod_uid", ""), ("workload_uid", "x" * 300))
        ),
        {"process": " "},
        {"sequence": 0},
        {"pod": None},
    ],
)
def test_impossible_values_are_a_bad_report(changes: dict[str, Any]) -> None:
    """Identities are not truncated: a truncated name can be another pod's."""
    if "identity" in changes:
        fields = {"namespace": "team-a", "pod": "train-0", **UIDS} | changes["identity"]
        changes = {"identity": wire.SidecarIdentity(**fields)}
    with pytest.raises(InvalidReport):
        reports.parse_report(report(**changes))


def test_every_enum_value_of_the_contract_has_a_name() -> None:
    """Values of a newer sidecar are UNKNOWN."""
    for number in [*wire.Phase.values(), 99]:
        phase = reports.parse_report(report(pod=wire.PodState(phase=number))).pod.phase
        assert (phase is SidecarPhase.UNKNOWN) == (number in {wire.PHASE_UNSPECIFIED, 99})
    for number in [*wire.IncidentKind.values(), 99]:
        (incident,) = reports.parse_report(report(incidents=[wire.Incident(id=1, kind=number)])).incidents
        assert (incident.kind is IncidentKind.UNKNOWN) == (number in {0, 99})
        assert incident.count == 1
    for number in [*wire.SaveResult.Outcome.values(), 99]:
        (saved,) = reports.parse_report(
            report(save_results=[wire.SaveResult(id="r", outcome=number)])
        ).save_results
        assert (saved.outcome is Outcome.UNKNOWN) == (number in {0, 99})


def test_oldest_of_too_many_incidents_are_kept() -> None:
    """Reported ids cover all lower ids, so the omitted incidents must have higher ids."""
    many = [wire.Incident(id=number) for number in range(200, 0, -1)]
    value = reports.parse_report(report(incidents=many))
    assert [each.id for each in value.incidents] == list(range(1, reports.MAX_INCIDENTS + 1))


def test_checkpoint_run_accepts_every_text() -> None:
    """The API server would refuse the whole status for one text that is too long."""
    (path,) = (each for each in DEFINITIONS if "run" in each.name)
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    decision = status["decisions"]["items"]["properties"]
    limits = {name: field["maxLength"] for name, field in decision.items() if "maxLength" in field}
    limits |= {name: status[name]["maxLength"] for name in ("encoding", "differential", "goal")}
    limits["pins"] = status["newestCheckpoints"]["items"]["properties"]["pins"]["items"]["maxLength"]
    assert limits | {"tables": reports.MAX_TABLES} == reports.LIMITS
