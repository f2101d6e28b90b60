"""The choice as a function of measurements and a policy."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.deciding.cost import Measure, Profile
from deltashard_checkpoint.deciding.interval import MIN_SAVES
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.deciding.choice import apply_choice, decide
from deltashard_sidecar.deciding.measurements import MeasuredSave, Measurements, Opening
from deltashard_sidecar.deciding.step_meter import Reading


def measured(cost_s: float, *, world_size: int = 1) -> Measurements:
    save = Measure()
    for _ in range(MIN_SAVES):
        save = save.with_sample(cost_s)
    opening = Opening(attempt=1, world_size=world_size, ranks_here=1, reading=Reading(0, 0.0))
    return Measurements(opening=opening, profile=Profile(save=save, durable=save, step_s=0.5))


def test_pls_goal_applies_from_the_first_attempt() -> None:
    known, policy = measured(0.1, world_size=4), pb.Policy(goal="pls=0.0001")
    assert "needs partial recovery" in decide(known, policy).decision.unreachable
    save = MeasuredSave(snapshot_id=1, started=Reading(9, 4.5), timed=True)
    known = known.save_started(save, planned_steps=0, partial=True)
    assert decide(known, policy).decision.unreachable == ""


def test_new_goal_applies_at_once_and_restarts_measurement() -> None:
    """The choice is repeated from known values. Until a save is measured, the choice's assumed cost applies."""
    known, causes, found = measured(0.5), [], []
    for policy in (
        pb.Policy(goal="auto"),
        pb.Policy(goal="auto", max_interval_s=120.0),
        pb.Policy(goal="overhead=2%"),
    ):
        choice = decide(known, policy)
        known = apply_choice(choice, known)
        causes.append((choice.cause, known.profile.save.n, known.cost_s))
        found.append(choice.apply_to(policy).every_s)
        assert decide(known, policy).cause is None, "the choice is stable"
    assert causes == [("measured", MIN_SAVES, 0.5), ("policy", 0, 0.5), ("policy", 0, 0.5)]
    assert found == pytest.approx([1800.0, 120.0, 25.0], rel=0.05)
    stated = pb.Policy(goal="fixed", every_s=30.0)
    assert decide(known, stated).apply_to(stated).every_s == 30.0, "goal=fixed disables the choice"
