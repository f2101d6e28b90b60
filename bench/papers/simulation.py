"""What failures cost a run, exactly and by drawing them: a check of the first-order formulas. Pure.

A run trains T seconds, saves for c, and repeats; failures occur after gaps of trained time, and each costs R seconds
until training continues. No failure occurs during those R.

**Full recovery** returns to the newest durable checkpoint. For exponential gaps of mean M its overhead is

    M (e^{(T+c)/M} - 1) (1 + R/M) / T - 1

where a save is durable when training continues. **Partial recovery** loses no time but R: (1 + c/T) (1 + R/M) - 1; it
loses samples of one shard of N, as CPR (MLSys'21) counts them: PLS += (trained since the last save) / (total N),
so E[PLS] = T / (2 M N).

The simulation draws from any gaps: exponential, Gamma or Weibull. The caller passes the random generator, so the
same seed gives the same figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Gaps: TypeAlias = npt.NDArray[np.float64]
"""Draws trained seconds from the start, or from one failure, to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The simulated settings in seconds."""

    interval_s: float
    save_s: float
    recover_s: float
    """R: from a failure until training continues, without the repeated steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float


def renewal_overhead(run: SimulatedRun, mtbf_s: float) -> float:
    """Return full recovery's exact overhead for exponential gaps, a share of useful training; inf without progress."""
    try:
        grown = math.expm1((run.interval_s + run.save_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return mtbf_s * grown * (1 + run.recover_s / mtbf_s) / run.interval_s - 1


def partial_renewal_overhead(run: SimulatedRun, mtbf_s: float) -> float:
    """Return partial recovery's exact overhead for any distribution of gaps."""
    return (1 + run.save_s / run.interval_s) * (1 + run.recover_s / mtbf_s) - 1


def exponential_gaps(generator: np.random.Generator, mean_s: float, count: int) -> Gaps:
    return generator.exponential(mean_s, count)


def gamma_gaps(generator: np.random.Generator, mean_s: float, shape: float, count: int) -> Gaps:
    """Draw Gamma gaps, as CPR fitted; shape 1 is exponential, a smaller one clusters failures."""
    return generator.gamma(shape, mean_s / shape, count)


def weibull_gaps(generator: np.random.Generator, mean_s: float, shape: float, count: int) -> Gaps:
    """Draw Weibull gaps; shape 1 is exponential, a smaller one clusters failures."""
    return generator.weibull(shape, count) * (mean_s / math.gamma(1 + 1 / shape))


def full_recovery(run: SimulatedRun, gaps: Gaps) -> Estimate:
    """Return the overhead of full recovery over these gaps; infinite if no checkpoint was reached."""
    reached = np.floor(gaps / (run.interval_s + run.save_s))
    return _ratio(gaps + run.recover_s, reached * run.interval_s)


def partial_recovery(run: SimulatedRun, gaps: Gaps) -> Estimate:
    """Return the overhead of partial recovery over these gaps: all training counts, at its pace with saves."""
    return _ratio(gaps + run.recover_s, gaps * (run.interval_s / (run.interval_s + run.save_s)))


def portions_lost(
    generator: np.random.Generator,
    *,
    interval_s: float,
    mtbf_s: float,
    shards: int,
    total_s: float,
    runs: int,
) -> Estimate:
    """Return the PLS of several runs of `total_s` trained seconds under partial recovery, with exponential gaps."""
    counts = generator.poisson(total_s / mtbf_s, runs)
    # Given their number, memoryless failures are uniform over the run; saves are independent of them.
    since_s = generator.uniform(0.0, total_s, int(counts.sum())) % interval_s
    run_of = np.repeat(np.arange(runs), counts)
    return _mean(np.bincount(run_of, since_s, runs) / (total_s * shards))


def _mean(values: npt.NDArray[np.float64]) -> Estimate:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(mean=float(np.mean(values)), error=error)


def _ratio(spent_s: Gaps, useful_s: Gaps) -> Estimate:
    """Return the overhead of all together, with the error of a ratio of means (to first order)."""
    useful = float(useful_s.sum())
    if useful <= 0:
        return Estimate(mean=math.inf, error=math.inf)
    ratio = float(spent_s.sum()) / useful
    count = len(spent_s)
    off = spent_s - ratio * useful_s
    error = math.sqrt(float((off**2).sum()) * count / max(count - 1, 1)) / useful
    return Estimate(mean=ratio - 1, error=error if count > 1 else math.inf)
