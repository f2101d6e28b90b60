"""How often to save: from what a save costs and how often steps are lost. Pure.

With c the trainer seconds that a save costs, M the trained seconds between lossy failures, d the seconds from trigger
to durable, an interval of T costs the share

    J(T) = c / T + T / (2 M)        smallest at T = sqrt(2 c M) (Young 1974), where J* = sqrt(2 c / M)

**auto** takes the fewest saves within `SLACK` of that optimum: where a save costs milliseconds, Young's interval would
be seconds, and its gain nothing. The larger root of J(T) = J* + eps is

    T = M ((J* + eps) + sqrt((J* + eps)^2 - 2 c / M))

Its special cases: eps = 0 is Young's; c -> 0 gives 2 eps M.
**overhead** is CheckFreq's (FAST'21): k = max(ceil(d / step), ceil(c / (p step)), 1) steps.
**lost-work** is the worst case: a failure right before an interval's checkpoint is durable loses T + d.
**pls** is CPR's (MLSys'21): T = 2 PLS N M for N shards, under partial recovery.

Every choice says which bound binds, and why it is what it is. Where bounds contradict one another the lower one wins: a
save begins when the one before is durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from deltashard_checkpoint.deciding.cost import Measure
from deltashard_checkpoint.deciding.goal import Goal, duration

SLACK = 0.001
"""Share of training time that fewer saves may cost."""
SHORTEST_S = 60.0
LONGEST_S = 30 * 60.0
IN_FLIGHT_SHARE = 0.2
"""Of an interval that a save may be in flight."""
FEWEST_STEPS = 10
PLS_SHARE = 0.1
"""Of the time that is left, which an interval chosen for a PLS may be."""
MIN_SAVES = 8
"""Saves before a choice, and between two."""
BAND = (0.8, 1.25)
STANDARD_ERRORS = 3.0
EVIDENCE_RATIO = 2.0
"""By so much failures' rate must have changed to count as news."""


class Bounds(Protocol):
    """The user's own bounds of an interval, as a policy has them. Seconds; 0: none."""

    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalInputs:
    """What an interval is chosen from. Seconds."""

    cost_s: float
    """Of a save, to the trainer."""
    durable_s: float
    """From trigger to durable, 95 of 100 times."""
    step_s: float
    """0: not known."""
    mtbf_s: float
    shards: int = 1
    """Of the rows, lost one at a time (`failure_shards`); for `pls`."""
    partial: bool = False
    """Whether recovery is partial."""
    left_s: float = math.inf
    """Of planned training."""
    user: Bounds | None = None
    """The user's bounds; None: there are none."""

    @property
    def least_s(self) -> float:
        return 0.0 if self.user is None else self.user.least_s

    @property
    def most_s(self) -> float:
        return math.inf if self.user is None else self.user.most_s or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A choice and its reason."""

    seconds: float
    bound: str = ""
    """Which bound binds; empty: none."""
    why: str = ""
    """A sentence for people."""
    unreachable: str = ""
    """Why the goal cannot be had; empty: it can."""


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval of least overhead, first order (Young 1974)."""
    return math.sqrt(2 * max(cost_s, 0.0) * mtbf_s)


def overhead_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """J(T): the share of training time that saves and lost work cost, first order."""
    return cost_s / interval_s + interval_s / (2 * mtbf_s)


def fewest_saves(cost_s: float, mtbf_s: float, slack: float = SLACK) -> float:
    """The longest interval whose share is within `slack` of the best."""
    cost_s = max(cost_s, 0.0)
    allowed = math.sqrt(2 * cost_s / mtbf_s) + slack
    return mtbf_s * (allowed + math.sqrt(max(allowed**2 - 2 * cost_s / mtbf_s, 0.0)))


def checkfreq_steps(cost_s: float, durable_s: float, step_s: float, overhead: float) -> int:
    """CheckFreq's k: a save is durable before the next begins, and costs at most `overhead` of k steps."""
    return max(math.ceil(durable_s / step_s), math.ceil(max(cost_s, 0.0) / (overhead * step_s)), 1)


def failure_shards(ranks: int, pods: int) -> int:
    """CPR's N: into how many shards failures divide the rows.

    A pod takes all its ranks along. In a run of one pod there is only a rank to lose: with the pod goes all.
    """
    return min(pods, ranks) if pods > 1 else ranks


def pls_interval_s(pls: float, mtbf_s: float, shards: int) -> float:
    """The interval whose expected PLS is this (CPR)."""
    return 2 * pls * shards * mtbf_s


def clamp(bounds: Bounds, seconds: float) -> float:
    return min(max(seconds, bounds.least_s), bounds.most_s or math.inf)


def choice_key(goal: Goal, bounds: Bounds) -> str:
    """Name of goal and bounds: an interval that was chosen under others is chosen again."""
    return f"{goal} {bounds.least_s:g} {bounds.most_s or math.inf:g}"


def choose_interval(goal: Goal, now: IntervalInputs) -> Interval:
    """The interval for a goal; `fixed` has none to choose, and raises `ValueError`."""
    match goal.aim:
        case "auto":
            return _auto(now)
        case "overhead":
            return _overhead(goal, now)
        case "lost-work":
            return _lost_work(goal, now)
        case "pls":
            return _pls(goal, now)
    raise ValueError(goal)


def _auto(now: IntervalInputs) -> Interval:
    free_s = fewest_saves(now.cost_s, now.mtbf_s)
    best_s = young_interval_s(now.cost_s, now.mtbf_s)
    why = (
        f"a save costs {duration(max(now.cost_s, 0.0))} and steps are lost once in {duration(now.mtbf_s)}: the fewest "
        f"saves within {100 * SLACK:g} % of training of the best (every {duration(best_s)})"
    )
    floors = [
        # A taste, unlike the others: the user's own bounds take its place.
        (0.0 if now.least_s else min(SHORTEST_S, now.most_s), "a minute"),
        (now.durable_s / IN_FLIGHT_SHARE, _in_flight(now)),
        (FEWEST_STEPS * now.step_s, f"{FEWEST_STEPS} steps"),
    ]
    return _bounded(
        free_s,
        now,
        why,
        floors=floors,
        ceiling=max((LONGEST_S, "30 minutes"), (best_s, "the best interval")),
    )


def _overhead(goal: Goal, now: IntervalInputs) -> Interval:
    if now.step_s <= 0:
        asked_s, durable_s = max(now.cost_s, 0.0) / goal.amount, now.durable_s
    else:
        # Whole steps, of which CheckFreq's k is the larger number.
        asked_s = now.step_s * checkfreq_steps(now.cost_s, 0.0, now.step_s, goal.amount)
        durable_s = now.step_s * checkfreq_steps(0.0, now.durable_s, now.step_s, goal.amount)
    why = (
        f"a save costs {duration(max(now.cost_s, 0.0))} and is durable after {duration(now.durable_s)}: as often as "
        f"{100 * goal.amount:g} % of training allow"
    )
    return _bounded(asked_s, now, why, floors=[(durable_s, _in_flight(now)), *_floors(now)])


def _lost_work(goal: Goal, now: IntervalInputs) -> Interval:
    asked_s = goal.amount - now.durable_s
    most, lag = duration(goal.amount), duration(now.durable_s)
    why = f"a failure loses at most {most}, {lag} of them until a save is durable"
    if asked_s <= 0:
        why = f"a failure is to lose at most {most}, but a save alone takes {lag} to be durable"
    found = _bounded(asked_s, now, why, floors=_floors(now))
    worst_s = found.seconds + now.durable_s
    if worst_s <= goal.amount * (1 + 1e-9):
        return found
    return Interval(
        seconds=found.seconds,
        bound=found.bound,
        why=found.why,
        unreachable=f"at most {most} of lost work cannot be had: up to {duration(worst_s)} may be lost, with an "
        f"interval {found.bound or 'that is the shortest'}",
    )


def _pls(goal: Goal, now: IntervalInputs) -> Interval:
    asked_s = pls_interval_s(goal.amount, now.mtbf_s, now.shards)
    shards = f"{now.shards} shard{'s' * (now.shards != 1)}"
    why = f"expected PLS {goal.amount:g} with {shards} and a failure in {duration(now.mtbf_s)}"
    found = _bounded(
        asked_s,
        now,
        why,
        floors=_floors(now),
        ceiling=(PLS_SHARE * now.left_s, "a tenth of the training that is left"),
    )
    if now.partial:
        return found
    auto = _auto(now)
    return Interval(
        seconds=auto.seconds,
        bound=auto.bound,
        why=auto.why,
        unreachable="a goal of PLS needs partial recovery, which this run has not: chosen as auto",
    )


def _in_flight(now: IntervalInputs) -> str:
    return f"a save takes {duration(now.durable_s)} to be durable"


def _floors(now: IntervalInputs) -> list[tuple[float, str]]:
    return [
        (now.durable_s, _in_flight(now)),
        (now.step_s, "one step"),
        (0.001, "a millisecond"),
    ]


def _bounded(
    asked_s: float,
    now: IntervalInputs,
    why: str,
    *,
    floors: list[tuple[float, str]],
    ceiling: tuple[float, str] = (math.inf, ""),
) -> Interval:
    """`asked_s` between the bounds; of floors the highest, of ceilings the lowest, and floors above ceilings."""
    low_s, low = max([*floors, (now.least_s, "the shortest that the user allows")], key=lambda each: each[0])
    high_s, high = min([ceiling, (now.most_s, "the longest that the user allows")], key=lambda each: each[0])
    if asked_s < low_s or high_s < low_s:
        return Interval(seconds=low_s, bound=f"not below {duration(low_s)} ({low})", why=why)
    if asked_s > high_s:
        return Interval(seconds=high_s, bound=f"not above {duration(high_s)} ({high})", why=why)
    return Interval(seconds=asked_s, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the interval in force was chosen from."""

    seconds: float
    cost_s: float
    mtbf_s: float


def should_replace(basis: Basis, found: Interval, costs: Measure, now: IntervalInputs) -> bool:
    """Whether the choice `found` is to replace the one in force.

    Only after `MIN_SAVES` saves, when it differs by more than a fifth, and when what it follows from is no chance: the
    mean cost differs from the one it was chosen by, by more than three standard errors, or failures' rate has doubled
    or halved, or the interval is shorter than a save needs. A mere threshold flaps a hundred times a day (simulated).
    """
    if costs.n < MIN_SAVES:
        return False
    ratio = found.seconds / basis.seconds
    if BAND[0] <= ratio <= BAND[1]:
        return False
    costly = abs(costs.mean - basis.cost_s) > STANDARD_ERRORS * costs.error
    news = now.mtbf_s / basis.mtbf_s
    return costly or not 1 / EVIDENCE_RATIO < news < EVIDENCE_RATIO or basis.seconds < now.durable_s
