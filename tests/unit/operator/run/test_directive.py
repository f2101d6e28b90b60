"""What runs are told to do: the policy's word, the annotations' before it, and a goal with its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.fleet.report import Reply
from deltashard_operator.kube.cluster_name import ENCODING, GOAL, INTERVAL
from deltashard_operator.run.directive import decided, differs, directive_of, due
from deltashard_operator.run.observed_object import Wish
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import policy as sidecar_policy
from deltashard_sidecar.policy import InForce

from tests.support.operator import sample


def changed(policy: pb.Policy, **fields: Any) -> pb.Policy:
    """The policy with other values of these fields."""
    return pb.Policy(**{field.name: value for field, value in policy.ListFields()} | fields)


def test_a_run_does_what_its_policy_says_and_before_that_what_its_annotations_say() -> None:
    spec = {
        "interval": {"every": "60s", "everySteps": 7},
        "precision": {"encoding": "q4"},
        "differential": "full",
    }
    wanted = decided(spec, sample.DEFAULTS, Wish())
    assert wanted == pb.Policy(every_s=60.0, every_steps=7, encoding="q4", differential="full")
    wish = Wish(overrides=((INTERVAL, "5m"), (ENCODING, "q8")))
    assert decided(spec, sample.DEFAULTS, wish).every_s == 300.0
    assert decided(spec, sample.DEFAULTS, wish).encoding == "q8"
    with pytest.raises(Refusal):
        decided({"interval": {"every": "-1s"}}, sample.DEFAULTS, Wish())


AUTO = {"interval": {"goal": {"type": "Auto"}}}


def test_a_goal_goes_into_a_directive_with_its_bounds() -> None:
    spec = {
        "interval": {"goal": {"type": "LostWork", "lostWork": "5m"}, "atLeast": "30s"},
        "precision": {"goal": "Budget", "leastBits": 4, "tables": {"b": "q4", "a": "q8"}},
    }
    wanted = decided(spec, sample.DEFAULTS, Wish())
    assert (wanted.goal, wanted.least_s, wanted.most_s) == ("lost-work=5m", 30, 0)
    assert (wanted.bits_goal, wanted.least_bits) == ("budget", 4)
    assert wanted.tables == "a=q8,b=q4"
    assert Reply(sequence=1, next_s=1, directive=directive_of(wanted)).directive.policy == wanted


def test_the_word_of_an_annotation_ends_or_begins_a_goal() -> None:
    def goal(spec: dict[str, Any], *overrides: tuple[str, str]) -> str:
        return decided(spec, {**sample.DEFAULTS, **AUTO}, Wish(overrides=overrides)).goal

    assert goal({}) == "auto"
    assert goal({}, (INTERVAL, "5m")) == ""
    assert goal({"interval": {"every": "60s"}}) == ""
    assert goal({"interval": {"every": "60s"}}, (GOAL, "overhead=1%")) == "overhead=1%"
    assert goal({"interval": {"everySteps": 60}}, (INTERVAL, "5m"), (GOAL, "auto")) == "auto"
    assert goal({}, (GOAL, "fixed")) == ""


def test_a_chosen_interval_is_no_reason_for_a_directive_and_another_goal_is() -> None:
    wanted = decided(AUTO, sample.DEFAULTS, Wish())
    in_force = changed(wanted, every_s=93.0)
    assert not differs(wanted, in_force)
    assert differs(changed(wanted, goal=""), in_force), "the goal is off"
    assert differs(changed(wanted, most_s=60.0), in_force)
    assert differs(wanted, changed(in_force, goal="")), "the goal is new"


def test_chosen_bits_are_no_reason_for_a_directive_and_another_goal_is() -> None:
    wanted = decided({"precision": {"goal": "Budget"}}, sample.DEFAULTS, Wish())
    in_force = changed(wanted, encoding="q2")
    assert not differs(wanted, in_force)
    assert differs(changed(wanted, bits_goal=""), in_force), "the goal is off"
    assert differs(changed(wanted, least_bits=4), in_force)
    assert differs(changed(wanted, tables="a=q8"), in_force)
    assert differs(wanted, changed(in_force, bits_goal=""))


def test_a_directive_ends_what_a_pod_was_started_with() -> None:
    """But for encodings, which it does not state."""
    started = pb.Policy(
        goal="auto", least_s=90.0, most_s=100.0, tables="a=q4", bits_goal="budget", encoding="q8"
    )
    given = Reply(sequence=1, next_s=1, directive=directive_of(pb.Policy(every_s=60.0)))
    received = sidecar_policy.received(given.directive, "w")
    found = InForce(started_with=started).after(received).policy
    assert found == pb.Policy(every_s=60.0, encoding="q8")


def test_a_directive_is_its_content_and_is_given_until_it_is_in_force() -> None:
    first, second = pb.Policy(every_s=60.0, encoding="q8"), pb.Policy(every_s=90.0, encoding="q8")
    assert directive_of(first) == directive_of(changed(second, every_s=60.0))
    assert directive_of(first).id not in (0, directive_of(second).id)
    assert due(first, 0, first) is None, "the pod was started with it"
    assert due(first, 0, pb.Policy()) is None, "nobody has told what is in force"
    assert due(second, 0, first) == directive_of(second)
    assert due(second, directive_of(second).id, first) is None
    assert due(first, directive_of(second).id, first) == directive_of(first), (
        "back to what it was started with"
    )


def test_only_what_a_directive_can_say_is_compared() -> None:
    in_force = pb.Policy(every_s=60.0, every_steps=7, encoding="q4", differential="full")
    assert not differs(in_force, in_force)
    assert not differs(pb.Policy(encoding="q4"), in_force), "no timer at all is no directive"
    assert differs(pb.Policy(every_s=60.0, encoding="q4"), in_force), "steps are off"
    assert differs(pb.Policy(every_steps=7, encoding="q4"), in_force), "the interval is off"
    assert differs(pb.Policy(every_s=61.0, encoding="q4"), in_force)
    assert differs(pb.Policy(encoding="q8"), in_force)
