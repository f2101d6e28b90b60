"""The seam of recovery: which plan a Checkpointer takes, with an extra and without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deltashard.errors import UserError
from deltashard.restore import recovery_plan
from deltashard.restore.recovery_plan import RecoveryPlan, plan_of


def context(*, partial: bool) -> Any:
    return SimpleNamespace(config=SimpleNamespace(partial=partial))


def test_without_an_extra_recovery_is_full_and_partial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_plan, "FACTORIES", [])
    plan = plan_of(context(partial=False))
    assert type(plan) is RecoveryPlan
    assert (plan.terms, plan.pls_target, plan.pls, plan.metadata, plan.dead) == ("full", 0.0, 0.0, {}, False)
    with pytest.raises(UserError, match="not installed"):
        plan_of(context(partial=True))


def test_first_plan_that_is_offered_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = RecoveryPlan()
    factories = [lambda _: None, lambda _: offered, lambda _: RecoveryPlan()]
    monkeypatch.setattr(recovery_plan, "FACTORIES", factories)
    assert plan_of(context(partial=True)) is offered
