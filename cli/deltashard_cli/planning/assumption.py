"""What a plan is made from, and where each number comes from: said, read from a run or a trace, or assumed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltashard_checkpoint.deciding.evidence import NONE, POD_MTBF_S, Evidence, Gamma, Rates, rates
from deltashard_checkpoint.deciding.goal import duration
from deltashard_checkpoint.errors import UserError

from deltashard_cli.planning.failure_trace import FailureTrace
from deltashard_cli.planning.forecast import Known, Prices
from deltashard_cli.planning.growth import PAPER, Growth, fitted
from deltashard_cli.planning.quantity import Model
from deltashard_cli.planning.recorded_run import RecordedRun

COLUMNS, STATE_BYTES = 64, 4
BANDWIDTH = 400e6
RESTART_S = 180.0
PLANNED_S = 7 * 86400.0
STALL_S, STALL_S_PER_GB = 0.005, 0.024
SLOWDOWN_S_PER_GB = 0.5
"""Of what a pod holds: docs/speed.md, measured on two cores, which is a pessimist's machine."""
KNOWN_RATE = 1e6
"""Shape of a rate that is said rather than seen: as if so many failures had been counted."""
_EACH = "as often as failures, each of which is one"


class NotEnough(UserError):
    """Something that cannot be assumed was not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a user says; None: nothing. Seconds and bytes."""

    model: Model | None = None
    raw_bytes: float | None = None
    """Of tables and their state alone."""
    dense_bytes: float | None = None
    pods: int | None = None
    ranks: int | None = None
    bandwidth: float | None = None
    stall_s: float | None = None
    slowdown_s: float | None = None
    step_s: float | None = None
    restart_s: float | None = None
    planned_s: float | None = None
    dirty: tuple[tuple[float, float], ...] = ()
    mtbf_s: float | None = None
    trace: FailureTrace | None = None
    trace_pods: int | None = None
    pls: float = 0.0
    bits: str = "budget"
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One number, and where it comes from."""

    name: str
    value: str
    source: str


def settled(said: Said, run: RecordedRun | None) -> tuple[Known, tuple[Assumption, ...]]:
    """Everything that a plan needs. What is said comes first, then what a run or trace shows.

    Raises `NotEnough` when nothing says how large the model is.
    """
    notes: list[Assumption] = []

    def note(name: str, value: str, source: str) -> None:
        notes.append(Assumption(name=name, value=value, source=source))

    def pick(name: str, asked: float | None, seen: float | None, otherwise: float, why: str) -> float:
        value, source = (
            (asked, "said")
            if asked is not None
            else (seen, "the run's log")
            if seen is not None
            else (otherwise, f"assumed: {why}")
        )
        note(name, duration(value), source)
        return value

    model, dense_bytes, source = _model(said, run)
    of_state = f" and {model.state_bytes} B of optimizer state"
    note("model", f"{model.rows:,} rows of {model.columns} float32{of_state}", source)
    pods = said.pods or 1
    note("pods", f"{pods:,}", "said" if said.pods else "assumed: say --pods")
    ranks = said.ranks or (run.ranks if run is not None else pods)
    note("ranks", f"{ranks:,}", "said" if said.ranks else "the run's log" if run is not None else "one a pod")

    gaps, believed, how, of_restores = _rates(said, run, pods)
    note("lossy failures", f"one in {duration(believed.mtbf_s)}", how)
    note("restores", f"one in {duration(believed.restores.mean_between_s)}", of_restores)
    growth, share, how = _growth(said, run)
    note("rows touched", share, how)

    profile = run.profile if run is not None else None
    pod_gb = (model.rows * (4 * model.columns + model.state_bytes) + dense_bytes) / pods / 1e9
    seen = (
        profile.stall.mean
        if profile is not None and profile.stall.n
        else run.stall_s
        if run is not None
        else None
    )
    stall_s = pick(
        "a save's stall",
        said.stall_s,
        seen,
        STALL_S + STALL_S_PER_GB * pod_gb,
        f"{pod_gb:.3g} GB a pod, as measured in docs/speed.md; say --stall",
    )
    seen = (
        max(run.cost_s - profile.stall.mean, 0.0)
        if run is not None and run.cost_s is not None and profile is not None and profile.stall.n
        else None
    )
    slowdown_s = pick(
        "a save's slowdown",
        said.slowdown_s,
        seen,
        SLOWDOWN_S_PER_GB * pod_gb,
        "as measured on two cores in docs/speed.md; say --slowdown",
    )
    bandwidth, how = BANDWIDTH, "assumed: say --bandwidth"
    if said.bandwidth is not None:
        bandwidth, how = said.bandwidth, "said"
    elif run is not None and profile is not None and profile.durable.mean > 0:
        bandwidth = run.stored_bytes / profile.durable.mean / pods
        how = "the run's log: bytes of a save over the time until it is durable"
    note(
        "bandwidth of a pod",
        f"{bandwidth / 1e6:,.0f} MB/s" if bandwidth >= 1e7 else f"{bandwidth / 1e6:.2g} MB/s",
        how,
    )
    step_s = said.step_s if said.step_s is not None else 0.0
    if said.step_s is None and run is not None:
        step_s = (profile.step_s if profile is not None else 0.0) or run.step_s or 0.0
    note("a step", duration(step_s) if step_s else "not known", _origin(said.step_s, step_s, run))
    downs = said.trace.down_s if said.trace is not None else None
    if said.restart_s is None and downs is not None:
        restart_s = downs
        note(
            "restart after a failure",
            duration(downs),
            "the trace: its mean from start to end; loading is added",
        )
    else:
        seen = profile.reschedule.mean if profile is not None and profile.reschedule.n else None
        restart_s = pick("restart after a failure", said.restart_s, seen, RESTART_S, "say --restart")
    planned_s = pick("training planned", said.planned_s, None, PLANNED_S, "say --hours")
    known = Known(
        rows=model.rows,
        columns=model.columns,
        state_bytes=model.state_bytes,
        dense_bytes=dense_bytes,
        pods=pods,
        ranks=ranks,
        bandwidth=bandwidth,
        stall_s=stall_s,
        slowdown_s=slowdown_s,
        step_s=step_s,
        restart_s=restart_s,
        planned_s=planned_s,
        growth=growth,
        rates=believed,
        gaps=gaps,
        pls=said.pls,
        bits=said.bits,
        prices=said.prices,
    )
    return known, tuple(notes)


def _model(said: Said, run: RecordedRun | None) -> tuple[Model, float, str]:
    dense_bytes = said.dense_bytes or 0.0
    if said.model is not None:
        return said.model, dense_bytes, "said"
    if said.raw_bytes is not None:
        rows = max(round(said.raw_bytes / (4 * COLUMNS + STATE_BYTES)), 1)
        return (
            Model(rows=rows, columns=COLUMNS, state_bytes=STATE_BYTES),
            dense_bytes,
            f"of --bytes, assumed: {COLUMNS} columns and {STATE_BYTES} B of state a row; --model says them",
        )
    if run is not None:
        dense_bytes = run.dense_bytes if said.dense_bytes is None else dense_bytes
        return (
            Model(rows=run.rows, columns=run.columns, state_bytes=run.state_bytes),
            dense_bytes,
            "the run's log",
        )
    raise NotEnough(
        "how large is the model?",
        where="plan",
        remedy="--bytes 400GiB, or --model 1e9x64x4 (rows x columns x bytes of state), or the URL of a run",
    )


def _growth(said: Said, run: RecordedRun | None) -> tuple[Growth, str, str]:
    points, how = said.dirty, "said"
    if not points and run is not None and run.touched:
        points, how = run.touched, f"the run's log: {len(run.touched)} increments"
    if not points:
        points, how = (PAPER,), "assumed: as Check-N-Run reports; say --dirty"
    growth = fitted(points)
    at_s = min(seconds for seconds, _ in points)
    first, later = (
        f"{100 * growth.touched(seconds):.3g} % within {duration(seconds)}" for seconds in (at_s, 10 * at_s)
    )
    return growth, f"{first}, {later} (1 - exp(-k t^{growth.exponent:.2g}))", how


def _rates(said: Said, run: RecordedRun | None, pods: int) -> tuple[tuple[float, ...], Rates, str, str]:
    """(gaps that were seen, what is believed, where failures come from, where restores do)."""
    if said.mtbf_s is not None:
        known = Gamma(shape=KNOWN_RATE, rate_s=KNOWN_RATE * said.mtbf_s)
        return (), Rates(lossy=known, restores=known), "said", _EACH
    gaps: tuple[float, ...] = ()
    seen = NONE
    how = f"assumed: a pod fails once in {duration(POD_MTBF_S)}; say --trace, --mtbf or --failures-per-day"
    restores = "assumed, and bits follow from them; say --trace or --mtbf"
    if (trace := said.trace) is not None:
        scale = (said.trace_pods or pods) / pods
        gaps = trace.gaps
        seen = Evidence(exposure_s=trace.exposure_s * scale, lossy=trace.lossy, restores=trace.restores)
        of_pods = f" of {said.trace_pods} pods" if scale != 1 else ""
        span = f"in {duration(trace.exposure_s)} of training{of_pods}, and what is assumed of any run"
        how, restores = f"the trace: {trace.lossy} {span}", f"the trace: {trace.restores} {span}"
    elif run is not None:
        gaps, seen = run.gaps, run.evidence
        span = f"in {duration(seen.exposure_s)} of training (older ones count less), and what is assumed of any run"
        how, restores = (
            f"the run's log: {seen.lossy:.3g} {span}",
            f"the run's log: {seen.restores:.3g}, and one a day as assumed of any run",
        )
    believed = rates(seen, pods=pods)
    if believed.restores.mean_between_s > believed.mtbf_s:
        believed, restores = Rates(lossy=believed.lossy, restores=believed.lossy), _EACH
    return gaps, believed, how, restores


def _origin(said: float | None, found: float, run: RecordedRun | None) -> str:
    if said is not None:
        return "said"
    return "the run's log" if run is not None and found else "say --step"
