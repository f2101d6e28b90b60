"""When a status is written, and what is told as Events when too much happens."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.controller import status
from deltashard_operator.controller.status import Pace
from deltashard_operator.fleet.sidecar_report import PolicyInForce
from deltashard_operator.kube.cluster_name import BITS, INTERVAL
from deltashard_operator.policy.refusal import Refusal
from deltashard_operator.run.directive import decided, differs
from deltashard_operator.run.observed_object import Wish

from tests.support.operator import sample


@pytest.mark.parametrize(
    ("changed", "wait_s"),
    [
        ({"phase": "Saving", "step": 4}, status.SOON_S),
        ({"conditions": []}, status.SOON_S),
        ({"restores": 1}, status.SOON_S),
        ({"lastCommitSeq": 4, "step": 4}, 30.0),
        ({"step": 5, "trainedSeconds": 5}, status.QUIET_S),
    ],
)
def test_what_changed_says_how_long_its_write_may_wait(changed: dict[str, Any], wait_s: float) -> None:
    pace = Pace()
    assert pace.wait_s(changed, 100.0) == 0
    pace.written(100.0)
    assert pace.wait_s(changed, 100.0) == wait_s
    assert pace.wait_s(changed, 100.0 + wait_s) == 0


def test_a_write_that_fails_waits_longer_each_time_but_never_over_a_minute() -> None:
    pace, waits = Pace(), []
    for _ in range(10):
        pace.failed(100.0)
        waits.append(pace.wait_s({"phase": "Saving"}, 100.0))
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (2.0, status.MAX_BACKOFF_S)
    pace.written(200.0)
    assert pace.wait_s({"phase": "Saving"}, 201.0) == 0


def test_a_run_does_what_its_policy_says_and_before_that_what_its_annotations_say() -> None:
    spec = {"intervalSeconds": 60, "bits": 4, "everySteps": 7, "differential": "full"}
    wanted = decided(spec, sample.DEFAULTS, Wish())
    assert wanted == PolicyInForce(every_s=60.0, every_steps=7, encoding="q4", differential="full")
    wish = Wish(overrides=((INTERVAL, "5m"), (BITS, "8")))
    assert decided(spec, sample.DEFAULTS, wish).every_s == 300.0
    assert decided(spec, sample.DEFAULTS, wish).encoding == "q8"
    with pytest.raises(Refusal):
        decided({"intervalSeconds": -1}, sample.DEFAULTS, Wish())


def test_only_what_a_directive_can_say_is_compared() -> None:
    in_force = PolicyInForce(every_s=60.0, every_steps=7, encoding="q4", differential="full")
    assert not differs(in_force, in_force)
    assert not differs(PolicyInForce(encoding="q4"), in_force), "no timer at all is no directive"
    assert differs(PolicyInForce(every_s=60.0, encoding="q4"), in_force), "steps are off"
    assert differs(PolicyInForce(every_steps=7, encoding="q4"), in_force), "the interval is off"
    assert differs(PolicyInForce(every_s=61.0, encoding="q4"), in_force)
    assert differs(PolicyInForce(encoding="q8"), in_force)
