"""The choice of the goal `auto` for a model of a given size, or for a run described by its log. Pure.

The rules are those of a live run (`deltashard_checkpoint.deciding`); this module supplies assumptions for the values
that a live run measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_checkpoint.deciding.evidence import NONE, POD_MTBF_S, Gamma, Rates, rates
from deltashard_checkpoint.deciding.goal import AUTO, duration
from deltashard_checkpoint.deciding.interval import IntervalInputs, choose_interval, overhead_share
from deltashard_checkpoint.deciding.precision import GAUSSIAN_ERRORS, RestoreForecast, TableStats, choose_bits
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import ENCODINGS

from deltashard_cli.planning.recorded_run import RecordedRun

COLUMNS, STATE_BYTES = 64, 4
"""Assumed row: number of float32 values, and bytes of optimizer state."""
BANDWIDTH = 400e6
PLANNED_S = 7 * 86400.0
SAVE_S, SAVE_S_PER_GB = 0.005, 0.524
"""Stall and slowdown of a save: a constant, and seconds per GB of a pod (docs/speed.md, measured on two cores)."""
KNOWN_RATE = 1e6
DAY_S = 86400.0
_TABLE = "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The user's inputs, in bytes and seconds; None if not given."""

    raw_bytes: float | None = None
    """Size of the tables and their optimizer state in memory."""
    pods: int = 1
    mtbf_s: float | None = None
    save_s: float | None = None
    bandwidth: float | None = None
    step_s: float | None = None
    planned_s: float = PLANNED_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An input of the plan, and its source."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The chosen interval and encoding, and their cost, in seconds and bytes."""

    interval_s: float
    bound: str
    why: str
    overhead: float
    """Share of training time that saves and lost work cost, to first order."""
    save_share: float
    mean_lost_s: float
    worst_lost_s: float
    save_s: float
    durable_s: float
    mtbf_s: float
    encoding: str
    bits_why: str
    restores: int
    """95 % quantile over the planned time."""
    expected_restores: float
    stored_bytes: float
    """Stored size of a save: a full one, or the mean of the saves in the log."""
    bytes_per_day: float
    now_s: float | None
    overhead_now: float | None
    figures: tuple[Figure, ...]


def plan(given: PlanInputs, run: RecordedRun | None) -> SavePlan:
    """Return the plan; a given value overrides the run's log, which overrides an assumption.

    Raises `UserError` if neither `given` nor `run` has the size of the model.
    """
    figures: list[Figure] = []

    def pick(name: str, asked: float | None, seen: float | None, otherwise: float, why: str) -> float:
        value, source = (
            (asked, "given")
            if asked is not None
            else (seen, "the run's log")
            if seen is not None
            else (otherwise, f"assumed: {why}")
        )
        figures.append(Figure(name=name, value=duration(value) if value else "not known", source=source))
        return value

    believed, source = _rates(given, run)
    figures.append(
        Figure(name="failures", value=f"one in {duration(believed.mtbf_s)} loses steps", source=source)
    )
    bits = choose_bits(
        "budget",
        {_TABLE: TableStats(raw_bytes=1, errors=GAUSSIAN_ERRORS)},
        RestoreForecast(
            restores=believed.restores.quantile(given.planned_s),
            expected=given.planned_s / believed.restores.mean_between_s,
        ),
        {},
    )
    encoding = bits.encodings[_TABLE]
    raw_bytes, stored_bytes = _sizes(given, run, encoding)
    profile = None if run is None else run.profile
    pod_gb = raw_bytes / given.pods / 1e9
    save_s = pick(
        "a save costs",
        given.save_s,
        None if run is None else run.cost_s,
        SAVE_S + SAVE_S_PER_GB * pod_gb,
        f"{pod_gb:.3g} GB a pod, as measured in docs/speed.md; --save-cost sets it",
    )
    durable_s = pick(
        "a save is durable after",
        None if given.bandwidth is None else stored_bytes / given.bandwidth / given.pods,
        profile.durable.p95 if profile is not None and profile.durable.n else None,
        stored_bytes / BANDWIDTH / given.pods,
        f"{BANDWIDTH / 1e6:.0f} MB/s a pod; --bandwidth sets it",
    )
    step_s = pick("a step", given.step_s, None if run is None else run.step_s, 0.0, "--step sets it")
    found = choose_interval(
        AUTO, IntervalInputs(cost_s=save_s, durable_s=durable_s, step_s=step_s, mtbf_s=believed.mtbf_s)
    )
    now_s = None if run is None else run.now_s
    return SavePlan(
        interval_s=found.seconds,
        bound=found.bound,
        why=found.why,
        overhead=overhead_share(found.seconds, save_s, believed.mtbf_s),
        save_share=save_s / found.seconds,
        mean_lost_s=found.seconds / 2 + durable_s,
        worst_lost_s=found.seconds + durable_s,
        save_s=save_s,
        durable_s=durable_s,
        mtbf_s=believed.mtbf_s,
        encoding=encoding,
        bits_why=bits.why,
        restores=believed.restores.quantile(given.planned_s),
        expected_restores=given.planned_s / believed.restores.mean_between_s,
        stored_bytes=stored_bytes,
        bytes_per_day=stored_bytes * DAY_S / found.seconds,
        now_s=now_s,
        overhead_now=None if now_s is None else overhead_share(now_s, save_s, believed.mtbf_s),
        figures=tuple(figures),
    )


def _sizes(given: PlanInputs, run: RecordedRun | None, encoding: str) -> tuple[float, float]:
    """Return (bytes of the model in memory, bytes of a save)."""
    if given.raw_bytes is not None:
        stored = ENCODINGS[encoding]
        row_bytes = stored.row_code_bytes(COLUMNS) + 2 * stored.scale_bytes + STATE_BYTES
        return given.raw_bytes, given.raw_bytes * row_bytes / (4 * COLUMNS + STATE_BYTES)
    if run is not None:
        return run.raw_bytes, run.stored_bytes
    raise UserError(
        "the size of the model is unknown", where="plan", remedy="give --bytes 400GiB, or the URL of a run"
    )


def _rates(given: PlanInputs, run: RecordedRun | None) -> tuple[Rates, str]:
    if given.mtbf_s is not None:
        known = Gamma(shape=KNOWN_RATE, rate_s=KNOWN_RATE * given.mtbf_s)
        return Rates(lossy=known, restores=known), "given; each is a restore"
    seen = NONE if run is None else run.evidence
    believed = rates(seen, pods=given.pods)
    if believed.restores.mean_between_s > believed.mtbf_s:
        believed = Rates(lossy=believed.lossy, restores=believed.lossy)
    prior = f"assumed: a pod fails once in {duration(POD_MTBF_S)}, --mtbf sets it"
    if run is None:
        return believed, prior
    return believed, f"the run's log: {seen.lossy:.3g} in {duration(seen.exposure_s)} of training; {prior}"
