"""CPR (Maeng et al., MLSys 2021): what partial recovery saves, what it loses, and how certain both figures are.

The intervals are the product's own (`deltashard_checkpoint.deciding`); `recovery` has the paper's comparison,
`simulation` draws failures. CPR published neither its code nor the seconds of its events, only that full recovery
costs 8.2 to 8.5 % and partial 0.53 to 0.68 %. For a failure in 20 h, PLS 0.1 and 18 shards there is one pair of
events for each pair of such figures: `corners` solves for it. `cpr_quality` measures the quality cost of a PLS.
"""

from __future__ import annotations

import importlib
import math
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
    found: dict[str, Any] = {
        "corners": corners(),
        "sensitivities": sensitivities(),
        "pls": portions(generator, runs=2_000 if quick else 50_000),
        "renewal": renewal(generator, failures=100_000 if quick else 2_000_000),
        "spread": spread(generator, repeats=100 if quick else 2_000),
        "gaps": other_gaps(generator, failures=100_000 if quick else 1_000_000),
        "quality": _quality().measure_quality(quick),
    }
    found["headlines"] = headlines(found)
    return found


def costs(
    save_min: float = SAVE_MIN, recover_min: float = RECOVER_MIN, mtbf_s: float = MTBF_S
) -> recovery.Costs:
    return recovery.Costs(save_s=save_min * MINUTE, recover_s=recover_min * MINUTE, mtbf_s=mtbf_s)


def overheads(of: recovery.Costs, pls: float = PLS, shards: int = SHARDS) -> dict[str, Any]:
    judged = recovery.cheaper(of, pls=pls, shards=shards)
    return {
        "full": 100 * judged.full,
        "partial": 100 * judged.partial,
        "kind": judged.kind,
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
    inferred = "agrees by construction: what its saves and recoveries took is inferred from the two figures"
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
            "ours": f"{last['drawn']:.4f} +- {last['error']:.4f}, drawn",
            "met": portions_met,
            "why": "the drawn mean lies further from it than chance",
        },
        *found["quality"].get("headlines", ()),
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
        f"{row['kind']} recovery every {row['interval_h']:.1f} h: drawn {row['drawn']:.3f} +- {row['error']:.3f} %, "
        f"exactly {row['exact']:.3f}"
        for row in found["renewal"]
        if not _near(row["drawn"], row["exact"], row["error"])
    ]
    violated += [
        f"E[PLS] every {row['interval_h']:.1f} h: drawn {row['drawn']:.5f} +- {row['error']:.5f}, "
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
    sections = [
        "## CPR: partial recovery",
        f"""Full recovery rolls all shards back to the last checkpoint; partial recovery rolls back the lost one alone,
trains nothing again, and saves as rarely as the portion of lost samples (PLS) allows. The paper says {PAPER_FULL[0]} to
{PAPER_FULL[1]} % of training time for the first and {PAPER_PARTIAL[0]} to {PAPER_PARTIAL[1]} % for the second.

**How measured.** The paper's formulas, as `bench/papers/recovery.py` has them, with a failure in 20 h, PLS {PLS} and
{SHARDS} shards. The paper does not print what a save and a recovery took.
For each pair of its figures there is one pair of events that gives both; these lie close together (O_save
{min(saves):.1f} to {max(saves):.1f} min, O_load + O_res {min(recovers):.1f} to {max(recovers):.1f} min), so its two
claims go together. But **the figures agree by construction**, and prove nothing of a system. The first row is the base
of what follows:""",
        table(
            ["O_save", "O_load + O_res", "full", "every", "partial", "every"],
            [
                [
                    f"{row['save_min']:.1f} min",
                    f"{row['recover_min']:.1f} min",
                    f"{row['full']:.2f} %",
                    f"{row['full_every_h']:.1f} h",
                    f"{row['partial']:.3f} %",
                    f"{row['partial_every_h']:.0f} h",
                ]
                for row in found["corners"]
            ],
        ),
        "What each quantity does to it, halved and doubled (the others as in the first row above):",
        table(
            ["", "halved: full", "partial", "as is: full", "partial", "doubled: full", "partial"],
            _sensitivity_rows(found["sensitivities"]),
        ),
        f"""All this is of a save that stops training for minutes. Where it costs 0.2 s, as ours of 4 GB
([how fast it is](speed.md)), full recovery's formula gives {quick:.2f} % under the same failures, all but
{quick - recovering:.2f} of it load and reschedule, which partial recovery has, too: there is little left for it to
gain.""",
        f"""**The simulator.** `bench/papers/simulation.py` draws gaps between failures. Against the exact renewal
forms, by {exact["failures"]:,} failures each; the paper's formula is their first order, and low by
{exact["exact"] - exact["first_order"]:.2f} points in its own case:""",
        table(
            ["recovery", "save every", "drawn", "exact", "first order"],
            [
                [
                    row["kind"],
                    f"{row['interval_h']:.2f} h",
                    f"{row['drawn']:.3f} +- {row['error']:.3f} %",
                    f"{row['exact']:.3f} %",
                    f"{row['first_order']:.3f} %",
                ]
                for row in found["renewal"]
            ],
        ),
        (
            "How far one measurement of full recovery's overhead may lie from its mean (standard deviation over "
            f"{spreads[0]['repeats']:,} repetitions):"
        ),
        table(
            ["failures seen", "mean", "relative sd"],
            [
                [f"{row['failures']:,}", f"{row['mean']:.2f} %", f"{row['relative_sd']:.1f} %"]
                for row in spreads
            ],
        ),
        (
            f"One job of {jobs['hours']:.0f} h has {jobs['low']:.1f} to {jobs['high']:.1f} % (90 of 100 such jobs; "
            f"median {jobs['median']:.1f} %): a range of 0.3 points, as the paper's, is none that single jobs show."
        ),
        (
            "Failures that cluster, or come regularly, at the same rate (the formulas take them for exponential: "
            f"{exact['exact']:.2f} %):"
        ),
        table(
            ["gaps", "shape", "full recovery"],
            [
                [row["gaps"], f"{row['shape']:g}", f"{row['drawn']:.2f} +- {row['error']:.2f} %"]
                for row in found["gaps"]
            ],
        ),
        "**E[PLS]**, drawn, against T_save / (2 T_fail N):",
        table(
            ["save every", "trained", "runs", "drawn", "closed form", ""],
            [
                [
                    f"{row['interval_h']:g} h",
                    f"{row['total_h']:g} h",
                    f"{row['runs']:,}",
                    f"{row['drawn']:.6f} +- {row['error']:.6f}",
                    f"{row['exact']:.6f}",
                    _format_met(_near(row["drawn"], row["exact"], row["error"])),
                ]
                for row in found["pls"]
            ],
        ),
        _quality().quality_page(found["quality"]),
    ]
    return "\n\n".join(sections)


def plot(found: dict[str, Any], folder: Path) -> None:
    _quality().plot_quality(found["quality"], folder)


def _quality() -> ModuleType:
    """Import `cpr_quality` lazily, as the rest of this module does not need torch."""
    return importlib.import_module("cpr_quality")


def _format_met(met: bool) -> str:
    return "met" if met else "**missed**"


def _sensitivity_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    names = list(dict.fromkeys(row["what"] for row in rows))
    return [
        [
            name,
            *(
                f"{row[kind]:.{2 if kind == 'full' else 3}f} %"
                for row in sorted((r for r in rows if r["what"] == name), key=lambda r: r["by"])
                for kind in ("full", "partial")
            ),
        ]
        for name in names
    ]
