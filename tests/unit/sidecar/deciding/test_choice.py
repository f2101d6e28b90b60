"""The decision alone: measurements and a policy in, a choice out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding.cost import Measure, Profile
from deltashard_checkpoint.deciding.interval import ENOUGH
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.deciding.choice import decide, under
from deltashard_sidecar.deciding.measurements import MeasuredSave, Measurements, Opening
from deltashard_sidecar.deciding.step_meter import Reading


def measured(cost_s: float, *, attempt: int = 1, world_size: int = 1) -> Measurements:
    """Enough saves for a choice, each of this cost."""
    save = Measure()
    for _ in range(ENOUGH):
        save = save.sampled(cost_s)
    opening = Opening(run="r", attempt=attempt, world_size=world_size, ranks_here=1, reading=Reading(0, 0.0))
    return Measurements(opening=opening, profile=Profile(save=save, durable=save, step_s=0.5))


def test_a_goal_of_pls_holds_from_the_first_attempt_on() -> None:
    """Partial recovery is what the trainer says it is: no restart is needed to see it."""
    known, policy = measured(0.1, world_size=4), pb.Policy(goal="pls=0.0001")
    assert "needs partial recovery" in decide(known, policy).decision.unreachable
    save = MeasuredSave(cut=1, begun=Reading(9, 4.5), timed=True)
    known = known.save_begins(save, planned_steps=0, partial=True)
    assert decide(known, policy).decision.unreachable == ""


def test_another_goal_or_bound_holds_at_once_without_new_measurements() -> None:
    """The choice is made again from what is known."""
    known, causes, found = measured(0.5), [], []
    for policy in (
        pb.Policy(goal="auto"),
        pb.Policy(goal="auto", most_s=120.0),
        pb.Policy(goal="overhead=2%"),
    ):
        choice = decide(known, policy)
        known = under(choice, known)
        causes.append(choice.cause)
        found.append(choice.over(policy).every_s)
        assert decide(known, policy).cause is None, "it holds"
    assert causes == ["measured", "policy", "policy"]
    assert found == pytest.approx([1800.0, 120.0, 25.0], rel=0.05)
    stated = pb.Policy(goal="fixed", every_s=30.0)
    assert decide(known, stated).over(stated).every_s == 30.0, "the kill switch"


def test_cost_is_measured_from_the_start_under_a_choice_that_replaces_another() -> None:
    """Until then a save costs what the choice was made for; the first choice, and none that is not applied, do so."""
    known = measured(0.5)
    first = under(decide(known, pb.Policy(goal="auto")), known)
    assert first.profile == known.profile
    shown = under(decide(first, pb.Policy(goal="fixed", most_s=120.0)), first)
    assert shown.profile == known.profile
    second = under(decide(first, pb.Policy(goal="auto", most_s=120.0)), first)
    assert (second.profile.save.n, second.cost_s) == (0, 0.5)


def test_saves_of_an_attempt_begin_at_its_phase() -> None:
    """At most a tenth of the interval off, the same for the same attempt, spread over attempts."""
    auto = pb.Policy(goal="auto")
    found = [decide(measured(0.1, attempt=attempt), auto).phase for attempt in range(1, 200)]
    assert found == [decide(measured(0.2, attempt=attempt), auto).phase for attempt in range(1, 200)]
    assert all(-0.1 <= each <= 0.1 for each in found)
    assert min(found) < -0.08
    assert max(found) > 0.08
    assert len(set(found)) == len(found)
    assert decide(measured(0.1), pb.Policy(goal="fixed")).phase == 0.0


def test_a_promise_about_lost_work_is_not_stretched_by_the_phase() -> None:
    """The first save of an attempt comes sooner, never later."""
    policy = pb.Policy(goal="lost-work=5m")
    phases = [decide(measured(0.1, attempt=attempt), policy).phase for attempt in range(1, 30)]
    assert -0.1 <= min(phases) < -0.05
    assert max(phases) <= 0


def test_cap_after_attempts_without_a_checkpoint_doubles_within_bounds() -> None:
    """A minute doubled, or halved, so often; a second at least; the choice below it, and the fixed timers, stay."""
    known, policy = measured(0.1), pb.Policy(goal="auto", most_s=600.0)
    intervals = [
        decide(replace(known, doublings=doublings), policy).every_s for doublings in (-9, -1, 0, 2, 9)
    ]
    assert intervals == pytest.approx([1.0, 30.0, 60.0, 240.0, 600.0])
    bounded = pb.Policy(goal="auto", most_s=600.0, least_s=90.0)
    assert decide(replace(known, doublings=0), bounded).every_s == 90.0
    unmeasured, steps = (
        replace(known, profile=Profile(), doublings=0),
        pb.Policy(goal="auto", every_steps=5000),
    )
    assert decide(unmeasured, steps).every_s == 60.0, (
        "no save was measured yet, and every_steps may never come"
    )
    stated = pb.Policy(goal="fixed", every_s=900.0)
    assert decide(replace(known, doublings=0), stated).over(stated).every_s == 900.0


def test_pods_follow_from_all_ranks_that_attached() -> None:
    """Rank 0 may be the first to come back to a sidecar that was started again within an attempt."""
    alone = measured(0.1, world_size=8)
    assert alone.attached(8).rates.mtbf_s == pytest.approx(8 * alone.rates.mtbf_s)
    assert alone.attached(9) == alone
