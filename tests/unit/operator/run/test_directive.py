"""Directives for runs, and when none is needed."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.fleet.report import Reply
from deltashard_operator.run.directive import differs, directive_of, due
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import policy as sidecar_policy
from deltashard_sidecar.policy import ActivePolicy


def changed(policy: pb.Policy, **fields: Any) -> pb.Policy:
    return pb.Policy(**{field.name: value for field, value in policy.ListFields()} | fields)


PLAIN = pb.Policy(every_s=60.0, every_steps=7, encoding="q4", differential="full")
AUTO = pb.Policy(every_s=300.0, encoding="q8", differential="full", goal="auto")
BUDGET = pb.Policy(every_s=300.0, encoding="q8", differential="full", bits_goal="budget")


@pytest.mark.parametrize(
    ("wanted", "in_force", "expected"),
    [
        (PLAIN, PLAIN, False),
        (pb.Policy(encoding="q4"), PLAIN, False),  # no timer at all is no directive
        (changed(PLAIN, every_steps=0), PLAIN, True),
        (changed(PLAIN, every_s=0.0), PLAIN, True),
        (changed(PLAIN, every_s=61.0), PLAIN, True),
        (pb.Policy(encoding="q8"), PLAIN, True),
        (AUTO, changed(AUTO, every_s=93.0), False),  # the chosen interval
        (changed(AUTO, goal=""), changed(AUTO, every_s=93.0), True),
        (changed(AUTO, max_interval_s=60.0), changed(AUTO, every_s=93.0), True),
        (AUTO, changed(AUTO, every_s=93.0, goal=""), True),
        (BUDGET, changed(BUDGET, encoding="q2"), False),  # the chosen bits
        (changed(BUDGET, bits_goal=""), changed(BUDGET, encoding="q2"), True),
        (changed(BUDGET, min_bits=4), changed(BUDGET, encoding="q2"), True),
        (changed(BUDGET, tables="a=q8"), changed(BUDGET, encoding="q2"), True),
        (BUDGET, changed(BUDGET, encoding="q2", bits_goal=""), True),
    ],
)
def test_directive_is_sent_only_for_expressible_differences(
    wanted: pb.Policy, in_force: pb.Policy, expected: bool
) -> None:
    assert differs(wanted, in_force) == expected


def test_directive_overrides_the_pods_startup_settings() -> None:
    """Encodings stay, because the directive does not contain them."""
    started = pb.Policy(
        goal="auto",
        min_interval_s=90.0,
        max_interval_s=100.0,
        tables="a=q4",
        bits_goal="budget",
        encoding="q8",
    )
    given = Reply(sequence=1, next_s=1, directive=directive_of(pb.Policy(every_s=60.0)))
    received = sidecar_policy.received(given.directive, "w")
    found = ActivePolicy(initial=started).with_directive(received).policy
    assert found == pb.Policy(every_s=60.0, encoding="q8")


def test_directive_is_sent_until_it_is_in_force() -> None:
    first, second = pb.Policy(every_s=60.0, encoding="q8"), pb.Policy(every_s=90.0, encoding="q8")
    assert directive_of(first) == directive_of(changed(second, every_s=60.0))
    assert directive_of(first).id not in (0, directive_of(second).id)
    assert due(first, 0, first) is None, "the pod was started with it"
    assert due(first, 0, pb.Policy()) is None, "no sidecar has reported what is in force"
    assert due(second, 0, first) == directive_of(second)
    assert due(second, directive_of(second).id, first) is None
    assert due(first, directive_of(second).id, first) == directive_of(first), "back to the startup settings"
