"""Choice of the save interval from the cost of a save and the rate of lossy failures. Pure.

With c the trainer seconds per save, M the trained seconds between lossy failures, d the seconds from trigger to
durable, an interval T costs the share

    J(T) = c / T + T / (2 M)        smallest at T = sqrt(2 c M) (Young 1974), where J* = sqrt(2 c / M)

**auto** takes the fewest saves within `SLACK` of that optimum: if a save costs milliseconds, Young's interval would be
seconds, with a negligible gain. The larger root of J(T) = J* + eps is

    T = M ((J* + eps) + sqrt((J* + eps)^2 - 2 c / M))

Special cases: eps = 0 gives Young's interval; c -> 0 gives 2 eps M.
**overhead** is CheckFreq's (FAST'21): k = max(ceil(d / step), ceil(c / (p step)), 1) steps.
**lost-work** bounds the worst case: a failure right before an interval's checkpoint is durable loses T + d.
**pls** is CPR's (MLSys'21): T = 2 PLS N M for N shards, under partial recovery.

Every choice reports its binding bound and its reason. If bounds contradict each other, the lower bound wins: a save
begins only when the previous one is durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from deltashard_checkpoint.deciding.cost import Measure
from deltashard_checkpoint.deciding.goal import Goal, duration

SLACK = 0.001
"""Additional share of training time that is accepted for fewer saves."""
SHORTEST_S = 60.0
LONGEST_S = 30 * 60.0
IN_FLIGHT_SHARE = 0.2
"""Maximum share of an interval during which a save is in flight."""
FEWEST_STEPS = 10
PLS_SHARE = 0.1
"""Maximum share of the remaining time for an interval chosen for a PLS."""
MIN_SAVES = 8
"""Minimum number of saves before a choice, and between two choices."""
BAND = (0.8, 1.25)
STANDARD_ERRORS = 3.0
EVIDENCE_RATIO = 2.0
"""Ratio by which the failure rate must change to justify another choice."""


class Bounds(Protocol):
    """The user's bounds of an interval, from a policy. Seconds; 0: none."""

    min_interval_s: float
    max_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalInputs:
    """Inputs of a choice. Seconds."""

    cost_s: float
    """Cost of a save to the trainer."""
    durable_s: float
    """From trigger to durable, 95th percentile."""
    step_s: float
    """0: unknown."""
    mtbf_s: float
    shards: int = 1
    """Shards of the rows, lost one at a time (`failure_shards`); for `pls`."""
    partial: bool = False
    """Whether recovery is partial."""
    left_s: float = math.inf
    """Remaining planned training."""
    user: Bounds | None = None
    """The user's bounds, if any."""

    @property
    def min_interval_s(self) -> float:
        return 0.0 if self.user is None else self.user.min_interval_s

    @property
    def max_interval_s(self) -> float:
        return math.inf if self.user is None else self.user.max_interval_s or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval and its reason."""

    seconds: float
    bound: str = ""
    """The binding bound; empty: none."""
    why: str = ""
    """Explanation for display."""
    unreachable: str = ""
    """Why the goal cannot be reached; empty: it can."""


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval of least overhead, first order (Young 1974)."""
    return math.sqrt(2 * max(cost_s, 0.0) * mtbf_s)


def overhead_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return J(T): the share of training time that saves and lost work cost, first order."""
    return cost_s / interval_s + interval_s / (2 * mtbf_s)


def fewest_saves(cost_s: float, mtbf_s: float, slack: float = SLACK) -> float:
    """Return the longest interval whose share is within `slack` of the optimum."""
    cost_s = max(cost_s, 0.0)
    allowed = math.sqrt(2 * cost_s / mtbf_s) + slack
    return mtbf_s * (allowed + math.sqrt(max(allowed**2 - 2 * cost_s / mtbf_s, 0.0)))


def checkfreq_steps(cost_s: float, durable_s: float, step_s: float, overhead: float) -> int:
    """Return CheckFreq's k: a save is durable before the next begins, and costs at most `overhead` of k steps."""
    return max(math.ceil(durable_s / step_s), math.ceil(max(cost_s, 0.0) / (overhead * step_s)), 1)


def failure_shards(ranks: int, pods: int) -> int:
    """Return CPR's N: the number of shards into which failures divide the rows.

    A pod's failure takes all its ranks. In a run of one pod only the loss of a single rank is partial.
    """
    return min(pods, ranks) if pods > 1 else ranks


def pls_interval_s(pls: float, mtbf_s: float, shards: int) -> float:
    """Return the interval with this expected PLS (CPR)."""
    return 2 * pls * shards * mtbf_s


def clamp(bounds: Bounds, seconds: float) -> float:
    return min(max(seconds, bounds.min_interval_s), bounds.max_interval_s or math.inf)


def choice_key(goal: Goal, bounds: Bounds) -> str:
    """Return the key of goal and bounds; an interval chosen under another key is chosen again."""
    return f"{goal} {bounds.min_interval_s:g} {bounds.max_interval_s or math.inf:g}"


def choose_interval(goal: Goal, now: IntervalInputs) -> Interval:
    """Choose the interval for a goal; raises `ValueError` for `fixed`."""
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
        # A default preference, unlike the others: the user's own bounds replace it.
        (0.0 if now.min_interval_s else min(SHORTEST_S, now.max_interval_s), "a minute"),
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
        # Whole steps; CheckFreq's k is the larger of the two numbers.
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
        why = f"a failure must lose at most {most}, but a save alone takes {lag} to be durable"
    found = _bounded(asked_s, now, why, floors=_floors(now))
    worst_s = found.seconds + now.durable_s
    if worst_s <= goal.amount * (1 + 1e-9):
        return found
    return Interval(
        seconds=found.seconds,
        bound=found.bound,
        why=found.why,
        unreachable=f"a lost work of at most {most} cannot be reached: up to {duration(worst_s)} may be lost, with an "
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
        unreachable="a goal of PLS needs partial recovery, which this run does not use: chosen as auto",
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
    """Bound `asked_s`: by the highest floor and the lowest ceiling; floors take precedence over ceilings."""
    low_s, low = max(
        [*floors, (now.min_interval_s, "the shortest that the user allows")], key=lambda each: each[0]
    )
    high_s, high = min(
        [ceiling, (now.max_interval_s, "the longest that the user allows")], key=lambda each: each[0]
    )
    if asked_s < low_s or high_s < low_s:
        return Interval(seconds=low_s, bound=f"not below {duration(low_s)} ({low})", why=why)
    if asked_s > high_s:
        return Interval(seconds=high_s, bound=f"not above {duration(high_s)} ({high})", why=why)
    return Interval(seconds=asked_s, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The inputs from which the current interval was chosen."""

    seconds: float
    cost_s: float
    mtbf_s: float


def should_replace(basis: Basis, found: Interval, costs: Measure, now: IntervalInputs) -> bool:
    """Whether the choice `found` should replace the current one.

    Requires `MIN_SAVES` saves, a difference of more than a fifth, and a significant cause: the mean cost differs from
    the basis by more than three standard errors, the failure rate has doubled or halved, or the interval is shorter
    than a save needs. A threshold alone flaps a hundred times a day (simulated).
    """
    if costs.n < MIN_SAVES:
        return False
    ratio = found.seconds / basis.seconds
    if BAND[0] <= ratio <= BAND[1]:
        return False
    costly = abs(costs.mean - basis.cost_s) > STANDARD_ERRORS * costs.error
    rate_ratio = now.mtbf_s / basis.mtbf_s
    return costly or not 1 / EVIDENCE_RATIO < rate_ratio < EVIDENCE_RATIO or basis.seconds < now.durable_s
