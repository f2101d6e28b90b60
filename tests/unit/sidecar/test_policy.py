"""Directives: which one is active, what it overrides, and how a commit records it."""

from __future__ import annotations

import json
import math

import pytest
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.policy import ActivePolicy, BadDirective, format_directive, parse_directive, received

TIMERS = ("every_s", "every_steps")
BASE = pb.Policy(every_s=300.0, encoding="q8", differential="intermittent", state_encoding="fp32")


def test_directive_overrides_startup_settings() -> None:
    """Zero and empty fields keep the startup setting. A directive replaces the previous one completely."""
    first = fleet.Directive(id=1, policy=pb.Policy(every_s=60.0, encoding="q4"))
    held = ActivePolicy(initial=BASE).with_directive(first)
    assert (held.policy.every_s, held.policy.encoding, held.policy.differential) == (
        60.0,
        "q4",
        "intermittent",
    )
    held = held.with_directive(fleet.Directive(id=2, policy=pb.Policy(state_encoding="bf16")))
    assert (held.policy.every_s, held.policy.encoding, held.policy.state_encoding) == (300.0, "q8", "bf16")
    assert held.with_directive(fleet.Directive(id=3, policy=pb.Policy())).policy == BASE


def test_timer_directive_disables_the_other_timer() -> None:
    held = ActivePolicy(initial=BASE)
    steps = fleet.Directive(
        id=1, policy=pb.Policy(every_steps=20), explicit_fields=[*TIMERS, "of a newer controller"]
    )
    held = held.with_directive(received(steps, ""))
    assert (held.policy.every_s, held.policy.every_steps, held.policy.encoding) == (0.0, 20, "q8")
    seconds = fleet.Directive(id=2, policy=pb.Policy(every_s=60.0), explicit_fields=TIMERS)
    held = ActivePolicy(initial=pb.Policy(every_steps=20)).with_directive(received(seconds, ""))
    assert (held.policy.every_s, held.policy.every_steps) == (60.0, 0)


def test_directive_cannot_disable_saving() -> None:
    with pytest.raises(BadDirective, match="every timer"):
        received(fleet.Directive(id=1, policy=pb.Policy(encoding="q8"), explicit_fields=TIMERS), "")
    with pytest.raises(BadDirective, match="every timer"):
        parse_directive(
            '{"id": 1, "policy": {}, "explicit_fields": ["every_s", "every_steps"], "workload": ""}'
        )
    with pytest.raises(BadDirective, match="every timer"):
        received(fleet.Directive(id=1, policy=pb.Policy(), explicit_fields=["every_s"]), "")
    for name in ("encoding", "state_encoding", "differential"):  # settings that a save needs
        with pytest.raises(BadDirective, match=name):
            received(fleet.Directive(id=1, policy=pb.Policy(every_s=60.0), explicit_fields=[name]), "")


def test_recorded_form_round_trips() -> None:
    message = fleet.Directive(id=7, policy=pb.Policy(every_s=45.5, encoding="q2"))
    directive = received(message, "uid-1")
    assert parse_directive(format_directive(directive)) == directive
    steps = fleet.Directive(id=8, policy=pb.Policy(every_steps=5), explicit_fields=TIMERS)
    assert parse_directive(format_directive(received(steps, "uid-1"))) == received(steps, "uid-1")
    assert json.loads(format_directive(directive)) == {
        "id": 7,
        "policy": {"encoding": "q2", "every_s": 45.5},
        "explicit_fields": [],
        "workload": "uid-1",
    }


@pytest.mark.parametrize(
    "policy",
    [
        pb.Policy(encoding="q5"),
        pb.Policy(differential="none"),
        pb.Policy(state_encoding="q8"),
        pb.Policy(every_s=-1),
        pb.Policy(every_s=math.inf),
        pb.Policy(every_s=math.nan),
    ],
)
def test_invalid_directive_value_is_refused(policy: pb.Policy) -> None:
    with pytest.raises(BadDirective):
        received(fleet.Directive(id=1, policy=policy), "")
    with pytest.raises(BadDirective):
        received(fleet.Directive(id=0, policy=pb.Policy(every_s=1)), "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"id": 1}',
        '{"id": -1, "policy": {}, "workload": ""}',
        '{"id": 1, "policy": {"every_s": "1"}, "workload": ""}',
        '{"id": 1, "policy": {"every_steps": 1.5}, "workload": ""}',
        '{"id": 1, "policy": {"bogus": 1}, "workload": ""}',
        '{"id": 1, "policy": [], "workload": ""}',
        '{"id": 1, "policy": {}, "workload": 3}',
        '{"id": 1, "policy": {}, "explicit_fields": "every_s"}',
        '{"id": 1, "policy": {}, "explicit_fields": [1]}',
        '{"id": 18446744073709551616, "policy": {}, "workload": ""}',
        '{"id": 1, "policy": {"every_s": NaN}, "workload": ""}',
        '{"id": 1, "policy": {"every_s": 1' + 400 * "0" + '}, "workload": ""}',
        "[" * 100_000,
    ],
)
def test_any_recorded_text_is_parsed_or_refused(text: str) -> None:
    with pytest.raises(BadDirective):
        parse_directive(text)
