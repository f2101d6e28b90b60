"""CPR (Maeng et al., MLSys 2021): what partial recovery saves, what it loses, and how certain both figures are.

The intervals are the product's own (`deltashard_checkpoint.deciding`); `recovery` has the paper's comparison,
`simulation` draws failures. CPR published neither its code nor the seconds of its events, only that full recovery
costs 8.2 to 8.5 % and partial 0.53 to 0.68 %. For a failure in 20 h, PLS 0.1 and 18 shards there is one pair of
events for each pair of such figures: `corners` solves for it. `cpr_quality` measures the quality cost of a PLS.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import recovery
import simulation
from deltashard_checkpoint.deciding.interval import pls_interval_s, young_interval_s

MINUTE, HOUR = 60.0, 3600.0
MTBF_S = 20 * HOUR
SHARDS = 18
PLS = 0.1
SAVE_MIN, RECOVER_MIN = 3.7, 6.6
"""The base: O_save, and O_load + O_res, in minutes; between those of the corners."""
PAPER_FULL = (8.2, 8.5)
PAPER_PARTIAL = (0.53, 0.68)
SIGMAS = 4.0
SEED = 2021


def measure(quick: bool) -> dict[str, Any]:
    generator = np.random.default_rng(SEED)
    return {
        "corners": corners(),
        "sensitivities": sensitivities(),
        "pls": portions(generator, runs=2_000 if quick else 50_000),
        "renewal": renewal(generator, failures=100_000 if quick else 2_000_000),
        "spread": spread(generator, repeats=100 if quick else 2_000),
        "gaps": other_gaps(generator, failures=100_000 if quick else 1_000_000),
        "quality": _quality().measure_quality(quick),
    }


def costs(
    save_min: float = SAVE_MIN, recover_min: float = RECOVER_MIN, mtbf_s: float = MTBF_S
) -> recovery.Costs:
    return recovery.Costs(save_s=save_min * MINUTE, recover_s=recover_min * MINUTE, mtbf_s=mtbf_s)


def overheads(of: recovery.Costs, pls: float = PLS, shards: int = SHARDS) -> dict[str, Any]:
    chosen = recovery.cheaper(of, pls=pls, shards=shards)
    return {
        "full": 100 * chosen.full,
        "partial": 100 * chosen.partial,
        "kind": chosen.kind,
        "full_every_h": young_interval_s(of.save_s, of.mtbf_s) / HOUR,
        "partial_every_h": pls_interval_s(pls, of.mtbf_s, shards) / HOUR,
    }


def corners() -> list[dict[str, Any]]:
    """Return the base, and for each pair of the paper's figures the events that give it."""
    pairs = [
        (SAVE_MIN, RECOVER_MIN),
        *(events(full, partial) for full in PAPER_FULL for partial in PAPER_PARTIAL),
    ]
    return [{"save_min": s, "recover_min": r, **overheads(costs(s, r))} for s, r in pairs]


def events(full: float, partial: float) -> tuple[float, float]:
    """Return the (O_save, O_load + O_res) in minutes for which the two kinds cost these percentages.

    With x = O_save / T_fail and R = (O_load + O_res) / T_fail: full = sqrt(2 x) + R, partial = x / (2 PLS N) + R, so
    sqrt(2 x) - x / (2 PLS N) is their difference, a quadratic in sqrt(x).
    """
    difference, portion = (full - partial) / 100, 2 * PLS * SHARDS
    root = portion * (math.sqrt(2) - math.sqrt(2 - 4 * difference / portion)) / 2
    return root**2 * MTBF_S / MINUTE, (partial / 100 - root**2 / portion) * MTBF_S / MINUTE


def sensitivities() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for by in (0.5, 1.0, 2.0):
        rows += [
            {"what": "O_save", "by": by, "value": by * SAVE_MIN, **overheads(costs(save_min=by * SAVE_MIN))},
            {
                "what": "O_load + O_res",
                "by": by,
                "value": by * RECOVER_MIN,
                **overheads(costs(recover_min=by * RECOVER_MIN)),
            },
            {"what": "T_fail", "by": by, "value": by * 20, **overheads(costs(mtbf_s=by * MTBF_S))},
            {"what": "PLS", "by": by, "value": by * PLS, **overheads(costs(), pls=by * PLS)},
            {"what": "N", "by": by, "value": by * SHARDS, **overheads(costs(), shards=round(by * SHARDS))},
        ]
    return sorted(rows, key=lambda row: [each["what"] for each in rows].index(row["what"]))


def portions(generator: np.random.Generator, runs: int) -> list[dict[str, Any]]:
    """Compare the drawn E[PLS] with T_save / (2 T_fail N): the cases of the notes, and the base at PLS 0.02 and 0.1."""
    found = []
    for interval_h, total_h in ((4.0, 1000.0), (14.4, 14.4 * 50), (72.0, 72.0 * 50)):
        drawn = simulation.portions_lost(
            generator,
            interval_s=interval_h * HOUR,
            mtbf_s=MTBF_S,
            shards=SHARDS,
            total_s=total_h * HOUR,
            runs=runs,
        )
        exact = recovery.expected_pls(interval_h * HOUR, MTBF_S, SHARDS)
        found.append(
            {
                "interval_h": interval_h,
                "total_h": total_h,
                "runs": runs,
                "drawn": drawn.mean,
                "error": drawn.error,
                "exact": exact,
            }
        )
    return found


def renewal(generator: np.random.Generator, failures: int) -> list[dict[str, Any]]:
    """Compare the simulator with the exact forms and the first order, in percent."""
    base = costs()
    full_s = young_interval_s(base.save_s, MTBF_S)
    partial_s = pls_interval_s(PLS, MTBF_S, SHARDS)
    found = []
    for kind, interval_s in (
        ("full", full_s),
        ("full", full_s / 4),
        ("full", 4 * full_s),
        ("partial", partial_s),
    ):
        run = simulation.SimulatedRun(interval_s=interval_s, save_s=base.save_s, recover_s=base.recover_s)
        gaps = simulation.exponential_gaps(generator, MTBF_S, failures)
        if kind == "full":
            drawn = simulation.full_recovery(run, gaps)
            exact = simulation.renewal_overhead(run, MTBF_S)
            first = recovery.full_overhead(base, interval_s)
        else:
            drawn = simulation.partial_recovery(run, gaps)
            exact = simulation.partial_renewal_overhead(run, MTBF_S)
            first = recovery.partial_overhead(base, interval_s)
        found.append(
            {
                "kind": kind,
                "interval_h": interval_s / HOUR,
                "failures": failures,
                "drawn": 100 * drawn.mean,
                "error": 100 * drawn.error,
                "exact": 100 * exact,
                "first_order": 100 * first,
            }
        )
    return found


def spread(generator: np.random.Generator, repeats: int) -> list[dict[str, Any]]:
    """Return the deviation from the mean of full recovery's overhead with a given number of failures."""
    base = costs()
    run = simulation.SimulatedRun(
        interval_s=young_interval_s(base.save_s, MTBF_S), save_s=base.save_s, recover_s=base.recover_s
    )
    found = []
    for failures in (10, 100, 1_000, 10_000):
        # Each has a fixed number of failures; the spread of a job of fixed length, as in CPR, is larger.
        drawn = np.array(
            [
                simulation.full_recovery(run, simulation.exponential_gaps(generator, MTBF_S, failures)).mean
                for _ in range(repeats)
            ]
        )
        drawn = drawn[np.isfinite(drawn)]
        found.append(
            {
                "failures": failures,
                "repeats": len(drawn),
                "mean": 100 * float(drawn.mean()),
                "relative_sd": 100 * float(drawn.std(ddof=1) / drawn.mean()),
            }
        )
    jobs = one_job(generator, run, hours=56.0, repeats=10 * repeats)
    found.append({"hours": 56.0, "low": 100 * jobs[0], "median": 100 * jobs[1], "high": 100 * jobs[2]})
    return found


def one_job(
    generator: np.random.Generator, run: simulation.SimulatedRun, *, hours: float, repeats: int
) -> tuple[float, float, float]:
    """Return 5 %, 50 % and 95 % of one job's overhead over a given useful time (without saves and failures)."""
    work_s = hours * HOUR
    overhead = np.empty(repeats)
    for at in range(repeats):
        done_s = spent_s = 0.0
        while True:
            gap_s = generator.exponential(MTBF_S)
            left_s = work_s - done_s
            need_s = left_s + run.save_s * (np.ceil(left_s / run.interval_s) - 1)
            if gap_s >= need_s:
                spent_s += need_s
                break
            done_s += np.floor(gap_s / (run.interval_s + run.save_s)) * run.interval_s
            spent_s += gap_s + run.recover_s
        overhead[at] = spent_s / work_s - 1
    low, median, high = np.quantile(overhead, (0.05, 0.5, 0.95))
    return float(low), float(median), float(high)


def other_gaps(generator: np.random.Generator, failures: int) -> list[dict[str, Any]]:
    """Simulate full recovery where failures cluster or are regular, at the same rate."""
    base = costs()
    run = simulation.SimulatedRun(
        interval_s=young_interval_s(base.save_s, MTBF_S), save_s=base.save_s, recover_s=base.recover_s
    )
    found = []
    for name, draw in (("Gamma", simulation.gamma_gaps), ("Weibull", simulation.weibull_gaps)):
        for shape in (0.5, 0.7, 1.0, 2.0):
            drawn = simulation.full_recovery(run, draw(generator, MTBF_S, shape, failures))
            found.append(
                {"gaps": name, "shape": shape, "drawn": 100 * drawn.mean, "error": 100 * drawn.error}
            )
    return found


def headlines(found: dict[str, Any]) -> list[dict[str, Any]]:
    base, reached = found["corners"][0], found["renewal"]
    portions_met = all(_near(each["drawn"], each["exact"], each["error"]) for each in found["pls"])
    last = found["pls"][-1]
    inferred = "the costs of a save and of a recovery are derived from the two claims"
    return [
        {
            "what": "CPR: overhead of full recovery",
            "paper": f"{PAPER_FULL[0]} to {PAPER_FULL[1]} %",
            "ours": f"{base['full']:.2f} % by its formula, {reached[0]['exact']:.2f} % exactly",
            "met": None,
            "why": inferred,
        },
        {
            "what": "CPR: overhead of partial recovery at PLS 0.1",
            "paper": f"{PAPER_PARTIAL[0]} to {PAPER_PARTIAL[1]} %",
            "ours": f"{base['partial']:.3f} %",
            "met": None,
            "why": inferred,
        },
        {
            "what": "CPR: E[PLS] = T_save / (2 T_fail N)",
            "paper": f"{last['exact']:.4f} at 72 h",
            "ours": f"{last['drawn']:.4f} ± {last['error']:.4f}, simulated",
            "met": portions_met,
            "why": f"the simulated mean differs by more than {SIGMAS:g} standard errors",
        },
        *_quality().headlines(found["quality"]),
    ]


def _near(drawn: float, exact: float, error: float) -> bool:
    return abs(drawn - exact) <= SIGMAS * error


def check(found: dict[str, Any]) -> list[str]:
    violated = []
    base, *solved = found["corners"]
    pairs = [(full, partial) for full in PAPER_FULL for partial in PAPER_PARTIAL]
    violated += [
        f"the events of {pair} give {row['full']:.3f} and {row['partial']:.3f} %"
        for row, pair in zip(solved, pairs, strict=True)
        if abs(row["full"] - pair[0]) > 1e-6 or abs(row["partial"] - pair[1]) > 1e-6
    ]
    for kind, (least, most) in (("full", PAPER_FULL), ("partial", PAPER_PARTIAL)):
        if not least <= base[kind] <= most:
            violated.append(f"{kind} recovery costs {base[kind]:.3f} % in the base, not {least} to {most}")
    if any(row["kind"] != "partial" for row in found["corners"]):
        violated.append("CPR's own case is not recovered partially")
    violated += [
        f"{row['kind']} recovery every {row['interval_h']:.1f} h: simulated {row['drawn']:.3f} ± {row['error']:.3f} %, "
        f"exactly {row['exact']:.3f}"
        for row in found["renewal"]
        if not _near(row["drawn"], row["exact"], row["error"])
    ]
    violated += [
        f"E[PLS] every {row['interval_h']:.1f} h: simulated {row['drawn']:.5f} ± {row['error']:.5f}, "
        f"exactly {row['exact']:.5f}"
        for row in found["pls"]
        if not _near(row["drawn"], row["exact"], row["error"])
    ]
    sds = [row["relative_sd"] for row in found["spread"] if "failures" in row]
    if sds != sorted(sds, reverse=True):
        violated.append(f"more failures do not lessen the spread: {sds}")
    return [*violated, *_quality().check_quality(found["quality"])]


def page(found: dict[str, Any]) -> str:
    from report import table

    (_, *solved), exact = found["corners"], found["renewal"][0]
    saves, recovers = ([row[name] for row in solved] for name in ("save_min", "recover_min"))
    jobs = found["spread"][-1]
    quick, recovering = (
        100 * recovery.full_overhead(costs(save_min=0.2 / 60)),
        100 * RECOVER_MIN * MINUTE / MTBF_S,
    )
    spreads = [row for row in found["spread"] if "failures" in row]
    gaps = [row["drawn"] for row in found["gaps"]]
    base = found["corners"][0]
    sections = [
        "## CPR",
        """After a failure, full recovery rolls all shards back to the last checkpoint. Partial recovery rolls back
only the lost shard and repeats no training. The portion of lost samples (PLS) that it accepts determines how rarely
it saves. Overhead is a share of training time.""",
        "### Overhead",
        f"""The bench evaluates the paper's formulas (`bench/papers/recovery.py`) with one failure in 20 h, PLS {PLS}
and {SHARDS} shards. The paper does not publish the cost of a save (O_save) or of loading and rescheduling (O_load +
O_res). Each pair of overheads in the paper's two ranges determines one pair of costs: {min(saves):.1f} to
{max(saves):.1f} min and {min(recovers):.1f} to {max(recovers):.1f} min. These are close together, so the two claims
are consistent. **The figures agree by construction** and do not show how a real system performs. With {SAVE_MIN} and
{RECOVER_MIN} min, full recovery saves every {base["full_every_h"]:.1f} h and costs {base["full"]:.2f} %; partial
recovery saves every {base["partial_every_h"]:.0f} h and costs {base["partial"]:.3f} %.""",
        f"""These saves stop training for minutes. A save of deltashard costs 0.2 s for 4 GB
([how fast it is](speed.md)). With that cost and the same failures, full recovery costs {quick:.2f} %. Loading and
rescheduling, which partial recovery needs too, take all but {quick - recovering:.2f} points of it, so partial recovery
gains little.""",
        "### Simulation",
        f"""`bench/papers/simulation.py` draws {exact["failures"]:,} failures per row. The table compares the overhead
with the exact renewal formula. The paper's formula is its first order; in the paper's own case it is
{exact["exact"] - exact["first_order"]:.2f} points too low:""",
        table(
            ["recovery", "save every", "simulated, %", "exact, %", "first order, %"],
            [
                [
                    row["kind"],
                    f"{row['interval_h']:.2f} h",
                    f"{row['drawn']:.3f} ± {row['error']:.3f}",
                    f"{row['exact']:.3f}",
                    f"{row['first_order']:.3f}",
                ]
                for row in found["renewal"]
            ],
        ),
        (
            "One measurement is imprecise: the relative standard deviation of the overhead of full recovery is "
            f"{spreads[0]['relative_sd']:.1f} % after {spreads[0]['failures']:,} failures and "
            f"{spreads[-1]['relative_sd']:.1f} % after {spreads[-1]['failures']:,}. 90 of 100 jobs of "
            f"{jobs['hours']:.0f} h cost {jobs['low']:.1f} to {jobs['high']:.1f} % (median {jobs['median']:.1f} %), so "
            "single jobs cannot show a range of 0.3 points. With Gamma or Weibull gaps between failures at the same "
            f"rate (shapes 0.5 to 2), full recovery costs {min(gaps):.2f} to {max(gaps):.2f} %."
        ),
        (
            "The expected PLS is T_save / (2 T_fail N). In a simulation with saves every "
            f"{_listed(format(row['interval_h'], 'g') for row in found['pls'])} h, the mean differs by at most "
            f"{max(abs(row['drawn'] - row['exact']) / row['error'] for row in found['pls']):.1f} standard errors."
        ),
        _quality().quality_page(found["quality"]),
    ]
    return "\n\n".join(sections)


def plot(found: dict[str, Any], folder: Path) -> None:
    _quality().plot_quality(found["quality"], folder)


def _quality() -> ModuleType:
    """Import `cpr_quality` lazily, as the rest of this module does not need torch."""
    return importlib.import_module("cpr_quality")


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"
