"""From what is known of a run to what its checkpoints will cost and save, for any interval and each goal. Pure.

All rules are those that a run follows by itself (`deltashard_checkpoint.deciding`, `write.differential`); here stands
what only a plan needs: sizes of a model that does not train yet, and prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from deltashard_checkpoint.cache.pack_spool import PACK_BYTES
from deltashard_checkpoint.deciding import simulation
from deltashard_checkpoint.deciding.decision import Decision
from deltashard_checkpoint.deciding.evidence import LONGEST_COUNT, Rates
from deltashard_checkpoint.deciding.goal import AUTO, Goal, duration
from deltashard_checkpoint.deciding.interval import Interval, Situation, chosen, failing_apart, young
from deltashard_checkpoint.deciding.precision import (
    GAUSSIAN_ERRORS,
    Outlook,
    Precision,
    TableFacts,
    by_budget,
    by_paper,
)
from deltashard_checkpoint.deciding.recovery import advised, expected_pls
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.differential import baseline_pays

from deltashard_cli.planning.growth import Growth

DAY_S = 86400.0
MONTH_DAYS = 30.44
RANGE_BYTES = 8 << 20
"""Of one request of a restore, at most."""
FAILURES = 100_000
"""That are drawn for a simulated overhead."""
HOPELESS = 10.0
"""Overhead beyond which training does not get on: how much more it would be is no number for anybody."""
FEWEST_GAPS = 8
"""Below, a trace's gaps are too few to be drawn from, and failures are taken for exponential."""
_LONGEST_CYCLE = 1000
_TABLES = "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In whatever money; 0: not asked for."""

    gb_month: float = 0.0
    """Of 10^9 bytes held for a month."""
    put: float = 0.0
    """Of a thousand writing requests."""
    get: float = 0.0
    """Of a thousand reading ones."""
    pod_hour: float = 0.0

    @property
    def any(self) -> bool:
        """Whether money is asked for at all."""
        return any((self.gb_month, self.put, self.get, self.pod_hour))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a plan is made from. Bytes and seconds."""

    rows: int
    columns: int
    state_bytes: int
    """Of optimizer state, a row."""
    dense_bytes: float
    """What every save holds whole."""
    pods: int
    ranks: int
    bandwidth: float
    """Bytes a second, of one pod to the store."""
    stall_s: float
    slowdown_s: float
    step_s: float
    """0: not known."""
    restart_s: float
    """From a failure until a trainer begins to load."""
    planned_s: float
    growth: Growth
    rates: Rates
    gaps: tuple[float, ...] = ()
    """Trained seconds between lossy failures that were seen."""
    pls: float = 0.0
    """Portion of lost samples that is allowed; 0: recovery is full."""
    bits: str = "budget"
    """budget, check-n-run, or the encoding of all tables."""
    prices: Prices = Prices()

    @property
    def raw_row_bytes(self) -> int:
        """Of a row with its state, as it is in memory."""
        return 4 * self.columns + self.state_bytes

    @property
    def raw_bytes(self) -> float:
        """Of the model."""
        return self.rows * self.raw_row_bytes + self.dense_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What saves of one interval hold, from a baseline to the next."""

    baseline_bytes: float
    increments: tuple[float, ...]
    """Bytes of each increment until the predictor takes a new baseline."""

    @property
    def mean_bytes(self) -> float:
        """Of a save."""
        return (self.baseline_bytes + sum(self.increments)) / (1 + len(self.increments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one interval comes to."""

    name: str
    goal: str
    interval_s: float
    bound: str
    unreachable: str
    overhead: float
    """Share of useful training: saves, lost work and recoveries; exact for exponential failures.

    Of full recovery, except for a goal of PLS."""
    simulated: float
    simulated_error: float
    save_share: float
    """Of training, that saves alone cost."""
    mean_lost_s: float
    """Trained again after a failure; nothing under partial recovery."""
    worst_lost_s: float
    pls: float
    """Expected under partial recovery."""
    increments: int
    """Between two baselines."""
    saves_per_day: float
    bytes_per_day: float
    held_bytes: float
    puts_per_day: float
    gets_per_day: float
    durable_s: float
    """A mean save's; a baseline's is the longest."""
    money_per_day: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer."""

    chosen: Forecast
    goals: tuple[Forecast, ...]
    why: str
    """Of the interval; where requests have a price, with what they add to a save's cost."""
    precision: Precision
    encoding: str
    restores: int
    """N95 over the planned time, counted up to `LONGEST_COUNT`."""
    expected_restores: float
    differential: str
    full_bytes_per_day: float
    consecutive_bytes_per_day: float
    recovery: Decision | None
    """What a run would be advised to, full or partial, by what its saves cost it; None without a PLS."""
    raw_bytes: float
    stored_bytes: float
    """Of a baseline."""
    cost_s: float
    """Of a save, in training."""
    baseline_s: float
    """Until a baseline is durable."""
    restore_s: float
    """Loading, without the restart before it."""
    mtbf_s: float
    curve: tuple[tuple[float, float], ...]
    """(interval, overhead) over the intervals that a chart shows."""


def precision(known: Known) -> tuple[Precision, str, int, float]:
    """(choice, encoding of the large tables, N95 of restores, their mean)."""
    restores = known.rates.restores.quantile(known.planned_s)
    expected = known.planned_s / known.rates.restores.mean_between_s
    outlook = Outlook(restores=restores, expected=expected)
    tables = {_TABLES: TableFacts(raw_bytes=max(4 * known.rows * known.columns, 1), errors=GAUSSIAN_ERRORS)}
    if known.bits == "budget":
        found = by_budget(tables, outlook, {})
        if restores >= LONGEST_COUNT:
            found = replace(found, why="no budget bears so many restores")
    elif known.bits == "check-n-run":
        found = by_paper(tables, outlook, {})
    else:
        found = Precision(encodings={_TABLES: known.bits}, why="as asked for")
    return found, found.encodings[_TABLES], restores, expected


def cycle(known: Known, encoding: str, interval_s: float) -> Cycle:
    """Of intermittent saves."""
    row_bytes = _row_bytes(known, encoding)
    whole = known.rows * row_bytes + known.dense_bytes
    increments: list[float] = []
    while len(increments) < _LONGEST_CYCLE and not baseline_pays(
        tuple(size / max(whole, 1) for size in increments)
    ):
        increments.append(_increment(known, row_bytes, interval_s * (len(increments) + 1)))
    return Cycle(baseline_bytes=whole, increments=tuple(increments))


def _row_bytes(known: Known, encoding: str) -> float:
    stored = ENCODINGS[encoding]
    return stored.row_code_bytes(known.columns) + 2 * stored.scale_bytes + known.state_bytes


def _increment(known: Known, row_bytes: float, since_s: float) -> float:
    """Rows touched since then, which rows they are (a bit each), and what every save holds."""
    return known.rows * (known.growth.touched(since_s) * row_bytes + 1 / 8) + known.dense_bytes


class Planner:
    """Forecasts from what is known, all on the same drawn failures: differences between goals are no chance."""

    def __init__(self, known: Known, *, seed: int = 0) -> None:
        self.known = known
        self.precision, self.encoding, self.restores, self.expected = precision(known)
        self.mtbf_s = known.rates.mtbf_s
        whole = cycle(known, self.encoding, 1.0).baseline_bytes
        self.stored_bytes = whole
        self.baseline_s = self._sent_s(whole)
        self.cost_s = known.stall_s + known.slowdown_s
        # Of the mean save, every so often as it would be chosen if requests were free.
        usual = cycle(known, self.encoding, chosen(AUTO, self._situation(self.cost_s)).seconds)
        self.request_s = self._request_s(usual.mean_bytes)
        generator = np.random.default_rng(seed)
        self.gaps = (
            simulation.trace_gaps(generator, np.asarray(known.gaps), self.mtbf_s, FAILURES)
            if len(known.gaps) >= FEWEST_GAPS
            else simulation.exponential_gaps(generator, self.mtbf_s, FAILURES)
        )

    @property
    def situation(self) -> Situation:
        """What the rules choose from: there, and nowhere else, the price of requests counts as training."""
        return self._situation(self.cost_s + self.request_s)

    def _situation(self, cost_s: float) -> Situation:
        known = self.known
        return Situation(
            cost_s=cost_s,
            durable_s=self.baseline_s,
            step_s=known.step_s,
            mtbf_s=self.mtbf_s,
            shards=failing_apart(known.ranks, known.pods),
            partial=known.pls > 0,
            left_s=known.planned_s,
        )

    def _sent_s(self, count: float) -> float:
        return count / (self.known.pods * self.known.bandwidth)

    def _load_s(self, cycle: Cycle) -> float:
        return self._sent_s(cycle.baseline_bytes + _mean(cycle.increments))

    def _puts(self, count: float) -> float:
        """Requests of one save: a PUT a pack, an index a rank, and the entry; of several ranks a report each, too."""
        ranks = self.known.ranks
        packs = ranks * max(1, math.ceil(count / ranks / PACK_BYTES))
        return packs + (ranks + 1 if ranks == 1 else 2 * ranks + 4)

    def _request_s(self, count: float) -> float:
        """What a save's requests cost, in trainer seconds of the same money; 0 without prices."""
        prices = self.known.prices
        if not prices.pod_hour:
            return 0.0
        return self._puts(count) * prices.put / 1000 / (self.known.pods * prices.pod_hour / 3600)

    def run(self, interval_s: float) -> simulation.Run:
        """As failures are drawn for it."""
        held = cycle(self.known, self.encoding, interval_s)
        return simulation.Run(
            interval_s=interval_s,
            save_s=max(self.cost_s, 0.0),
            recover_s=self.known.restart_s + self._load_s(held),
            durable_s=self._sent_s(held.mean_bytes),
        )

    def forecast(self, name: str, goal: str, found: Interval, *, partial: bool = False) -> Forecast:
        """Of an interval; under `partial` recovery no step is trained again, and samples of one shard are lost."""
        known, interval_s = self.known, found.seconds
        held = cycle(known, self.encoding, interval_s)
        run = self.run(interval_s)
        if partial:
            drawn = simulation.partial_recovery(run, self.gaps)
            overhead = simulation.partial_renewal_overhead(run, self.mtbf_s)
            lost_s = worst_s = 0.0
        else:
            drawn = simulation.full_recovery(run, self.gaps)
            overhead = simulation.renewal_overhead(run, self.mtbf_s)
            lost_s = simulation.lost_work(run, self.gaps).mean
            worst_s = interval_s + self.baseline_s
        saves = DAY_S / interval_s
        increment = _mean(held.increments)
        puts = saves * self._puts(held.mean_bytes)
        gets = (DAY_S / known.rates.restores.mean_between_s) * (
            (held.baseline_bytes + increment) / RANGE_BYTES + 2 * known.ranks + 1
        )
        # Two chains that share nothing, and the newest three checkpoints (the sidecar's own defaults).
        held_bytes = 2 * held.baseline_bytes + 4 * increment
        return Forecast(
            name=name,
            goal=goal,
            interval_s=interval_s,
            bound=found.bound,
            unreachable=found.unreachable,
            overhead=overhead,
            simulated=drawn.mean,
            simulated_error=drawn.error,
            save_share=run.save_s / interval_s,
            mean_lost_s=lost_s,
            worst_lost_s=worst_s,
            pls=expected_pls(interval_s, self.mtbf_s, self.situation.shards),
            increments=len(held.increments),
            saves_per_day=saves,
            bytes_per_day=saves * held.mean_bytes,
            held_bytes=held_bytes,
            puts_per_day=puts,
            gets_per_day=gets,
            durable_s=run.durable_s,
            money_per_day=self._money(held_bytes, puts, gets, overhead),
        )

    def _money(self, held_bytes: float, puts: float, gets: float, overhead: float) -> Mapping[str, float]:
        prices = self.known.prices
        if not prices.any:
            return {}
        return {
            "storage": prices.gb_month * held_bytes / 1e9 / MONTH_DAYS,
            "requests": (prices.put * puts + prices.get * gets) / 1000,
            "overhead": prices.pod_hour * self.known.pods * 24 * overhead,
        }

    def goals(self, wanted: Goal, lost_work: Goal) -> list[Forecast]:
        """The one that is wanted first, and beside it what other rules would do."""
        others = [
            ("auto", AUTO),
            ("overhead 1 %", Goal(aim="overhead", amount=0.01)),
            ("lost work", lost_work),
            *([("PLS, partial", Goal(aim="pls", amount=self.known.pls))] if self.known.pls else []),
            ("Check-N-Run", Goal(aim="check-n-run")),
        ]
        named = [(name, each) for name, each in others if each != wanted]
        first = next((name for name, each in others if each == wanted), wanted.aim)
        found = [
            self.forecast(name, str(each), chosen(each, self.situation), partial=each.aim == "pls")
            for name, each in [(first, wanted), *named]
        ]
        return [*found, self.forecast("Young/Daly", "", self._young())]

    def _young(self) -> Interval:
        free_s = young(self.situation.cost_s, self.mtbf_s)
        low_s = max(self.baseline_s, self.known.step_s, 0.001)
        if free_s < low_s:
            return Interval(seconds=low_s, bound="the shortest that a save allows")
        return Interval(seconds=free_s)

    def _recovery(self) -> Decision | None:
        """The run's own rule, which knows no prices; a load is that of the table's row of partial recovery."""
        known = self.known
        if not known.pls:
            return None
        partial_s = chosen(Goal(aim="pls", amount=known.pls), self.situation).seconds
        return advised(
            self._situation(self.cost_s),
            pls=known.pls,
            load_s=self._load_s(cycle(known, self.encoding, partial_s)),
            reschedule_s=known.restart_s,
        )

    def _priced(self) -> str:
        if not self.request_s:
            return ""
        return f"; {duration(self.request_s)} of the cost are the price of its requests, as training of that price"

    def curve(self, around: Sequence[float], points: int) -> tuple[tuple[float, float], ...]:
        """Overheads of intervals on a logarithmic axis that has all of `around` well inside."""
        low, high = math.log(min(around) / 2), math.log(max(around) * 2)
        intervals = [math.exp(low + (high - low) * at / (points - 1)) for at in range(points)]
        return tuple((each, simulation.renewal_overhead(self.run(each), self.mtbf_s)) for each in intervals)

    def plan(self, wanted: Goal, lost_work: Goal, *, points: int = 61) -> Plan:
        """The whole answer."""
        known = self.known
        goals = self.goals(wanted, lost_work)
        first = goals[0]
        held = cycle(known, self.encoding, first.interval_s)
        row_bytes = _row_bytes(known, self.encoding)
        return Plan(
            chosen=first,
            goals=tuple(goals),
            why=chosen(wanted, self.situation).why + self._priced(),
            precision=self.precision,
            encoding=self.encoding,
            restores=self.restores,
            expected_restores=self.expected,
            differential="intermittent",
            full_bytes_per_day=first.saves_per_day * held.baseline_bytes,
            consecutive_bytes_per_day=first.saves_per_day * _increment(known, row_bytes, first.interval_s),
            recovery=self._recovery(),
            raw_bytes=known.raw_bytes,
            stored_bytes=self.stored_bytes,
            cost_s=self.cost_s,
            baseline_s=self.baseline_s,
            restore_s=self._load_s(held),
            mtbf_s=self.mtbf_s,
            curve=self.curve([each.interval_s for each in goals], points),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def at_interval(planner: Planner, name: str, interval_s: float, *, bits: str) -> Forecast:
    """What a run does now, with the bits that it uses."""
    as_is = Planner(replace(planner.known, bits=bits))
    return as_is.forecast(name, "", Interval(seconds=interval_s))
