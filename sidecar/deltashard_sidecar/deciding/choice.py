"""Which interval a run has, and when another one replaces it: `decide`, from what was measured and the policy. Pure.

    measuring    until `interval.MIN_SAVES` saves were measured: the timers as stated, else a minute
    held         the choice, with what it follows from, until `interval.should_replace`

Without a goal, and with `fixed`, the timers stay as stated, and what `auto` would choose is shown.
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

MEASURING_S = 60.0  # interval until saves were measured, where the policy has none
MIN_INTERVAL_S = 1.0  # however many attempts before ended without a checkpoint
ChoiceCause = Literal["measured", "cost", "failures", "durable", "policy"]
"""Why a choice came: the first one; what saves cost changed; how often steps are lost; a save takes longer than the
interval; another goal or bound."""
CHOICE_CAUSES: tuple[ChoiceCause, ...] = get_args(ChoiceCause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What holds now."""

    applied: bool
    """Whether a goal is in force: otherwise the timers are the policy's."""
    held: CurrentChoice | None
    """None while saves are measured."""
    every_s: float
    every_steps: int
    decision: fleet.Decision
    cause: ChoiceCause | None
    """Why `held` is another one than before; None: it is not."""

    def apply_to(self, policy: pb.Policy) -> pb.Policy:
        if not self.applied:
            return policy
        return changed(policy, every_s=self.every_s, every_steps=self.every_steps)


def decide(known: Measurements, policy: pb.Policy) -> Choice:
    """The choice now, after `known.held` before, under a policy that was checked."""
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
        decision.why = f"what saves cost is being measured: {saves.n} of {MIN_SAVES} saves"
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
        decision.would = timers(held.basis.seconds, 0)
        decision.why = found.why if applied else f"as stated; under auto {found.why}"
        decision.bound, decision.unreachable = found.bound, found.unreachable
        if applied:
            every_s, every_steps = held.basis.seconds, 0
    if applied and known.doublings is not None:
        most_s = _cap_s(policy, known.doublings)
        if not 0 < every_s <= most_s:
            decision.would = timers(every_s, every_steps)
            decision.bound = "attempts before ended without a checkpoint: twice as long with each commit"
            every_s = most_s
    decision.value = timers(every_s, every_steps)
    return Choice(
        applied=applied, held=held, every_s=every_s, every_steps=every_steps, decision=decision, cause=cause
    )


def apply_choice(choice: Choice, known: Measurements) -> Measurements:
    """What is known once `choice` is in force: where it replaces another one, its cost is measured from the start."""
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
    """Why the choice in force is replaced by what was `found` under the goal and bounds of this name."""
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
    """The longest interval in an attempt that follows attempts without a checkpoint: a minute, doubled by each commit.

    What ended them may end this one as early, and the same steps would be lost again and again. Each of them but the
    last halves the minute, down to a second; `doublings` is the commits of this attempt less those. So an attempt keeps
    about half of what it trained, however long it lives.
    """
    return clamp(policy, max(MIN_INTERVAL_S, MEASURING_S * 2.0 ** max(-30, min(doublings, 30))))


def timers(every_s: float, every_steps: int) -> str:
    stated = [f"{every_s:.4g} s"] if every_s > 0 else []
    if every_steps > 0:
        stated.append(f"{every_steps} steps")
    return f"every {' or '.join(stated)}" if stated else "on demand"
