"""Which interval a run has, and when another one replaces it: from what was measured and seen. Pure.

    measuring    until `interval.ENOUGH` saves were measured: the timers as stated, else a minute
    held         the choice, with what it follows from, until `interval.worth_changing`

Without a goal, and with `fixed`, the timers stay as stated, and what `auto` would choose is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from deltashard_checkpoint.deciding.cost import Profile
from deltashard_checkpoint.deciding.goal import AUTO, FIXED, Goal, goal
from deltashard_checkpoint.deciding.interval import (
    ENOUGH,
    EVIDENCE_RATIO,
    Basis,
    Interval,
    Situation,
    chosen,
    chosen_under,
    within,
    worth_changing,
)
from deltashard_checkpoint.deciding.record import Held
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

MEASURING_S = 60.0
"""Interval until saves were measured, where none is said."""
SOONEST_S = 1.0
"""However many attempts before ended without a checkpoint."""
Cause = Literal["measured", "cost", "failures", "durable", "policy"]
"""Why a choice came: the first one; what saves cost changed; how often steps are lost; a save takes longer than the
interval; another goal or bound."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalTerms:
    """What of a policy an interval is chosen by."""

    goal: Goal
    """`auto` where none is in force."""
    applied: bool
    """Whether a goal is in force."""
    policy: pb.Policy

    @property
    def name(self) -> str:
        return chosen_under(self.goal, self.policy)

    @property
    def shown(self) -> str:
        """The goal in force, in the user's words."""
        return str(self.goal if self.applied else FIXED)


def terms_of(policy: pb.Policy) -> GoalTerms:
    """The terms of a policy, which was checked."""
    aim = goal(policy.goal) if policy.goal else FIXED
    applied = aim != FIXED
    return GoalTerms(goal=aim if applied else AUTO, applied=applied, policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What holds now."""

    held: Held | None
    """None while saves are measured."""
    every_s: float
    every_steps: int
    decision: fleet.Decision
    cause: Cause | None = None
    """Why `held` is another one than before; None: it is not."""


def choose(terms: GoalTerms, profile: Profile, now: Situation, held: Held | None, evidence: str) -> Choice:
    """The choice now, after `held` before; `evidence`: what it rests on, for people."""
    if held is None and profile.save.n < ENOUGH:
        return _measuring(terms, profile, evidence)
    found = chosen(terms.goal, now)
    cause = _cause(terms, profile, now, held, found)
    if held is None or cause is not None:
        basis = Basis(seconds=found.seconds, cost_s=now.cost_s, mtbf_s=now.mtbf_s)
        held = Held(basis=basis, goal=terms.name)
    return _held(terms, held, found, evidence, cause)


def _cause(
    terms: GoalTerms, profile: Profile, now: Situation, held: Held | None, found: Interval
) -> Cause | None:
    if held is None:
        return "measured"
    if held.goal != terms.name:
        return "policy"
    if not worth_changing(held.basis, found, profile.save, now):
        return None
    if held.basis.seconds < now.durable_s:
        return "durable"
    news = now.mtbf_s / held.basis.mtbf_s
    return "cost" if 1 / EVIDENCE_RATIO < news < EVIDENCE_RATIO else "failures"


def _measuring(terms: GoalTerms, profile: Profile, evidence: str) -> Choice:
    every_s, every_steps = terms.policy.every_s, terms.policy.every_steps
    if terms.applied and not every_s and not every_steps:
        every_s = within(terms.policy, MEASURING_S)
    return Choice(
        held=None,
        every_s=every_s,
        every_steps=every_steps,
        decision=fleet.Decision(
            subject="interval",
            goal=terms.shown,
            value=timers(every_s, every_steps),
            would="",
            why=f"what saves cost is being measured: {profile.save.n} of {ENOUGH} saves",
            evidence=evidence,
        ),
    )


def _held(terms: GoalTerms, held: Held, found: Interval, evidence: str, cause: Cause | None) -> Choice:
    every_s = held.basis.seconds if terms.applied else terms.policy.every_s
    every_steps = 0 if terms.applied else terms.policy.every_steps
    return Choice(
        held=held,
        every_s=every_s,
        every_steps=every_steps,
        decision=fleet.Decision(
            subject="interval",
            goal=terms.shown,
            value=timers(every_s, every_steps),
            would=timers(held.basis.seconds, 0),
            why=found.why if terms.applied else f"as stated; under auto {found.why}",
            bound=found.bound,
            evidence=evidence,
            unreachable=found.unreachable,
        ),
        cause=cause,
    )


def capped(choice: Choice, terms: GoalTerms, doublings: int) -> Choice:
    """The choice in an attempt that follows attempts without a checkpoint: a minute at first, doubled by each commit.

    What ended them may end this one as early, and the same steps would be lost again and again. Each of them but the
    last halves the minute, down to a second; `doublings` is the commits of this attempt less those. So an attempt keeps
    about half of what it trained, however long it lives.
    """
    every_s = within(terms.policy, max(SOONEST_S, MEASURING_S * 2.0 ** max(-30, min(doublings, 30))))
    if not terms.applied or 0 < choice.every_s <= every_s:
        return choice
    decision = fleet.Decision()
    decision.CopyFrom(choice.decision)
    decision.value = timers(every_s, choice.every_steps)
    decision.would = timers(choice.every_s, choice.every_steps)
    decision.bound = "attempts before ended without a checkpoint: twice as long with each commit"
    return replace(choice, every_s=every_s, decision=decision)


def timers(every_s: float, every_steps: int) -> str:
    said = [f"{every_s:.4g} s"] if every_s > 0 else []
    if every_steps > 0:
        said.append(f"{every_steps} steps")
    return f"every {' or '.join(said)}" if said else "on demand"
