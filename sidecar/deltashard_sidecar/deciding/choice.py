"""Choice of a run's save interval, and when to replace it: `decide`, from measurements and policy. Pure.

    measuring    until `interval.MIN_SAVES` saves are measured: the policy's timers, else one minute
    held         the choice and its basis, until `interval.should_replace`

Without a goal, and with `fixed`, the timers stay as stated, and the decision shows what `auto` would choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from deltashard_checkpoint.deciding.goal import AUTO, FIXED, goal
from deltashard_checkpoint.deciding.interval import (
    EVIDENCE_RATIO,
    MIN_SAVES,
    Basis,
    Interval,
    IntervalInputs,
    choice_key,
    choose_interval,
    clamp,
    failure_shards,
    should_replace,
)
from deltashard_checkpoint.deciding.record import CurrentChoice
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.deciding.measurements import Measurements
from deltashard_sidecar.policy import changed

MEASURING_S = 60.0  # interval until saves are measured, if the policy has none
MIN_INTERVAL_S = 1.0  # lower limit of the cap, after any number of attempts without a checkpoint
ChoiceCause = Literal["measured", "cost", "failures", "durable", "policy"]
"""Why a choice was made: the first one; the cost of saves changed; the failure rate changed; a save takes longer than
the interval; another goal or bound."""
CHOICE_CAUSES: tuple[ChoiceCause, ...] = get_args(ChoiceCause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The interval in force, and how it was decided."""

    applied: bool
    """Whether a goal is in force; otherwise the policy's timers apply."""
    held: CurrentChoice | None
    """None while saves are measured."""
    every_s: float
    every_steps: int
    decision: fleet.Decision
    cause: ChoiceCause | None
    """Why `held` was replaced; None: it was not."""

    def apply_to(self, policy: pb.Policy) -> pb.Policy:
        if not self.applied:
            return policy
        return changed(policy, every_s=self.every_s, every_steps=self.every_steps)


def decide(known: Measurements, policy: pb.Policy) -> Choice:
    """Return the choice that follows from `known` (with the previous choice, `known.held`) and a validated policy."""
    stated = goal(policy.goal) if policy.goal else FIXED
    applied = stated != FIXED
    aim = stated if applied else AUTO
    saves, held, seen = known.profile.save, known.held, known.evidence
    decision = fleet.Decision(
        subject="interval",
        goal=str(stated),
        evidence=(
            f"{known.saves} saves measured by this sidecar, {saves.n} in the mean; {seen.lossy:.3g} lossy failures "
            f"and {seen.restores:.3g} restores in {seen.exposure_s / 3600:.3g} h of training"
        ),
    )
    every_s, every_steps = policy.every_s, policy.every_steps
    cause: ChoiceCause | None = None
    if held is None and saves.n < MIN_SAVES:
        decision.why = f"the cost of saves is being measured: {saves.n} of {MIN_SAVES} saves"
        if applied and not every_s and not every_steps:
            every_s = clamp(policy, MEASURING_S)
    else:
        now = _interval_inputs(known, policy)
        found, name = choose_interval(aim, now), choice_key(aim, policy)
        cause = _cause(known, now, found, name)
        if held is None or cause is not None:
            held = CurrentChoice(
                basis=Basis(seconds=found.seconds, cost_s=now.cost_s, mtbf_s=now.mtbf_s), goal=name
            )
        decision.proposed = timers(held.basis.seconds, 0)
        decision.why = found.why if applied else f"as stated; under auto {found.why}"
        decision.bound, decision.unreachable = found.bound, found.unreachable
        if applied:
            every_s, every_steps = held.basis.seconds, 0
    if applied and known.doublings is not None:
        max_interval_s = _cap_s(policy, known.doublings)
        if not 0 < every_s <= max_interval_s:
            decision.proposed = timers(every_s, every_steps)
            decision.bound = "previous attempts ended without a checkpoint: doubles with each commit"
            every_s = max_interval_s
    decision.value = timers(every_s, every_steps)
    return Choice(
        applied=applied, held=held, every_s=every_s, every_steps=every_steps, decision=decision, cause=cause
    )


def apply_choice(choice: Choice, known: Measurements) -> Measurements:
    """Return `known` with `choice` in force. If it replaces another choice, its cost is measured from zero."""
    replaced = choice.applied and choice.cause is not None and known.held is not None
    profile = known.profile.with_cost_reset() if replaced else known.profile
    return replace(known, profile=profile, held=choice.held)


def _interval_inputs(known: Measurements, policy: pb.Policy) -> IntervalInputs:
    profile, opening = known.profile, known.opening
    return IntervalInputs(
        cost_s=known.cost_s,
        durable_s=profile.durable.p95,
        step_s=profile.step_s,
        mtbf_s=known.rates.mtbf_s,
        shards=failure_shards(opening.world_size, opening.pods),
        partial=known.partial,
        left_s=known.left_steps * profile.step_s if profile.step_s else math.inf,
        user=policy,
    )


def _cause(known: Measurements, now: IntervalInputs, found: Interval, name: str) -> ChoiceCause | None:
    """Return why `found`, under the goal and bounds `name`, replaces the choice in force; None: it does not."""
    if (held := known.held) is None:
        return "measured"
    if held.goal != name:
        return "policy"
    if not should_replace(held.basis, found, known.profile.save, now):
        return None
    if held.basis.seconds < now.durable_s:
        return "durable"
    ratio = now.mtbf_s / held.basis.mtbf_s
    return "cost" if 1 / EVIDENCE_RATIO < ratio < EVIDENCE_RATIO else "failures"


def _cap_s(policy: pb.Policy, doublings: int) -> float:
    """Return the longest interval after attempts without a checkpoint: one minute, doubled by each commit.

    Whatever ended those attempts may end this one as early, so the same steps would be lost repeatedly. Each attempt
    but the last halves the minute, down to one second. `doublings` is the number of this attempt's commits less those.
    An attempt thus keeps about half of its training, however long it runs.
    """
    return clamp(policy, max(MIN_INTERVAL_S, MEASURING_S * 2.0 ** max(-30, min(doublings, 30))))


def timers(every_s: float, every_steps: int) -> str:
    stated = [f"{every_s:.4g} s"] if every_s > 0 else []
    if every_steps > 0:
        stated.append(f"{every_steps} steps")
    return f"every {' or '.join(stated)}" if stated else "on demand"
