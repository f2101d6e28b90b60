"""CPR's comparison of full and partial recovery (MLSys'21). Pure.

Full recovery rolls all shards back, partial only the lost one; with M the time between failures,

    full     O_save T_tot / T_save + (O_load + T_save / 2 + O_res) T_tot / M        best at T_save = sqrt(2 O_save M)
    partial  O_save T_tot / T_save + (O_load + O_res) T_tot / M                     as long as the PLS allows

and E[PLS] = T_save / (2 M N) for N shards. These are first order: `simulation` has the exact forms and draws failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.deciding.interval import overhead_share, pls_interval_s, young_interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one event of each kind."""

    save_s: float
    recover_s: float
    """Loading and rescheduling."""
    mtbf_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The chosen kind of recovery and the reason."""

    kind: Literal["full", "partial"]
    full: float
    """Share of training time that saves and failures cost under full recovery."""
    partial: float
    interval_s: float


def full_overhead(costs: Costs, interval_s: float | None = None) -> float:
    """Return the share of training time under full recovery; without an interval, at the best one."""
    interval_s = young_interval_s(costs.save_s, costs.mtbf_s) if interval_s is None else interval_s
    return overhead_share(interval_s, costs.save_s, costs.mtbf_s) + costs.recover_s / costs.mtbf_s


def partial_overhead(costs: Costs, interval_s: float) -> float:
    return costs.save_s / interval_s + costs.recover_s / costs.mtbf_s


def expected_pls(interval_s: float, mtbf_s: float, shards: int) -> float:
    """Return E[PLS] of a whole training, which does not depend on its length."""
    return interval_s / (2 * mtbf_s * shards)


def cheaper(costs: Costs, *, pls: float, shards: int) -> Recovery:
    partial_s = pls_interval_s(pls, costs.mtbf_s, shards)
    full, partial = full_overhead(costs), partial_overhead(costs, partial_s)
    if partial < full:
        return Recovery(kind="partial", full=full, partial=partial, interval_s=partial_s)
    return Recovery(
        kind="full", full=full, partial=partial, interval_s=young_interval_s(costs.save_s, costs.mtbf_s)
    )
