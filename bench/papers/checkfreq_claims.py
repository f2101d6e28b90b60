"""Part 3, CheckFreq: the claims about its figures, checks that hold on any machine, the page and its picture."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import data_order
from report import picture, table

Found = dict[str, Any]
BUDGETS = {"1 %": 0.01, "3.5 %": 0.035}
PAPER_OVERHEAD, PAPER_STATIC, PAPER_ADAPTED = 0.035, 0.35, 0.05


def headlines(found: Found) -> list[Found]:
    rows = [
        {
            "what": "CheckFreq: overhead of saving with a goal of 1 %, against the paper's overhead",
            "paper": f"at most {PAPER_OVERHEAD:.1%}",
        }
        | verdict(found["overhead"]["1 %"], PAPER_OVERHEAD)
    ]
    rows += [
        {
            "what": f"CheckFreq: overhead of saving with a goal of {budget}",
            "paper": f"at most the goal, {share:.1%}",
        }
        | verdict(found["overhead"][budget], share)
        for budget, share in BUDGETS.items()
    ]
    adaptive, static = found["neighbour"]["adaptive"], found["neighbour"]["static"]
    rows.append(
        {
            "what": "CheckFreq: overhead next to a busy process, fixed and adaptive interval",
            "paper": f"{PAPER_STATIC:.0%} fixed, {PAPER_ADAPTED:.0%} adaptive",
        }
        | _adapted(adaptive, static)
    )
    lives = found["kills"]["lives"]
    kept = [each for each in lives if 0 <= each["lost"] <= each["promise"]]
    every = found["kills"]["every_steps"]
    rows.append(
        {
            "what": f"CheckFreq: steps lost by a SIGKILL with a save every {every} steps",
            "paper": f"at most two intervals ({2 * every})",
            "ours": f"at most {max(each['lost'] for each in lives)} in {len(lives)} kills, "
            f"{fmean(each['lost'] for each in lives):.0f} on average",
            "met": len(kept) == len(lives) and all(each["lost"] <= 2 * every for each in lives),
            "why": "a save took longer than an interval",
        }
    )
    return rows + data_order.headlines(found["order"])


def verdict(arm: Found, budget: float) -> Found:
    """Compare our value with a budget: None where twice the standard error leaves it open."""
    if "not_run" in arm:
        return {"ours": "not measured", "met": None, "why": arm["not_run"]}
    overhead, error = arm["overhead"], arm["error"]
    if overhead is None or error is None:
        return {"ours": "unknown", "met": None, "why": f"{arm['saves']} saves do not give a standard error"}
    met, why = None, f"{budget:.1%} is within two standard errors"
    if overhead - 2 * error > budget:
        met, why = False, f"more than two standard errors above {budget:.1%}"
    elif overhead + 2 * error <= budget:
        met = True
    return {"ours": f"{_percent(arm)}, {_every(arm)}", "met": met, "why": why}


def _adapted(adaptive: Found, static: Found) -> Found:
    if "not_run" in adaptive:
        return {"ours": "not measured", "met": None, "why": adaptive["not_run"]}
    busy, fixed = _phase(adaptive, "busy")["later"], _phase(static, "busy")
    return verdict(busy, PAPER_ADAPTED) | {"ours": f"{_percent(fixed)} fixed, {_percent(busy)} adaptive"}


def _phase(run: Found, name: str) -> Found:
    found: Found = next(each for each in run["phases"] if each["name"] == name)
    return found


def check(found: Found) -> list[str]:
    """Check what a failure may lose and the order of the data; speed is not checked."""
    wrong = []
    for number, each in enumerate(found["kills"]["lives"], 1):
        where = f"kill {number} ({each['instant']})"
        if each["restored"] < each["durable"]:
            wrong.append(
                f"{where}: step {each['durable']} was known durable, step {each['restored']} was restored"
            )
        if each["restored"] > each["last"]:
            wrong.append(f"{where}: step {each['restored']} was restored, {each['last']} was the last one")
        if each["lost"] > each["promise"]:
            wrong.append(
                f"{where}: {each['lost']} steps were lost, with an interval of {each['interval']} and "
                f"{each['flight']} more until a save was durable"
            )
        if each["commits"] < 2:
            wrong.append(f"{where}: only {each['commits']} saves were durable in that life")
    return wrong + data_order.check(found["order"])


# The page


def page(found: Found) -> str:
    model, machine = found["model"], found["machine"]
    return "\n\n".join(
        [
            "## CheckFreq",
            "CheckFreq chooses how often to save from measured costs, and resumes the data loader at its position.",
            "### How often to save",
            _method(model, machine),
            _overhead_table(found),
            _of_overhead(found),
            "### A busy neighbour",
            *_of_neighbour(found["neighbour"]),
            "### Steps lost by a failure",
            _of_kills(found["kills"]),
            _kills_table(found["kills"]["lives"]),
            data_order.page(found["order"]),
        ]
    )


def _method(model: Found, machine: Found) -> str:
    return (
        f"The demo's model trains on the baskets in batches of {model['batch']}, with {model['bytes'] / 1e6:.0f} MB of "
        "tables and optimizer state, one torch thread, and a sidecar that saves at 8 bit to a directory. The steps of "
        "a save are those from 0.3 s before its snapshot, when rows may be copied ahead, until the trainer "
        "receives its commit. The cost of a save is the extra time of these steps over as many ordinary steps right "
        "before and after them. Overhead is the cost of all saves divided by the time of all steps without it; ± is "
        "its standard error over saves. Processor time of the sidecar is not included. While this part ran, the bench "
        f"with its sidecars and the busy neighbour used {machine['ours']:.0%} of the processors, and other processes "
        f"{machine['others']:.0%} (load average {machine['load']:.1f} at the end). The latter adds noise."
    )


def _overhead_table(found: Found) -> str:
    rows = []
    for budget, arm in found["overhead"].items():
        name = f"goal of {budget}" if budget in BUDGETS else f"fixed, every {found['often']} steps"
        if "not_run" in arm:
            rows.append([name, f"not measured: {arm['not_run']}", "", "", "", ""])
        else:
            rows.append([name, *_cells(arm)])
    synchronous = found["synchronous"]
    rows.append([f"`torch.save` and fsync, every {synchronous['every']} steps", *_cells(synchronous)])
    epoch = synchronous["epoch"]
    rows.append(
        [
            f"the same once per epoch of {epoch['steps']:,} steps (computed)", f"{epoch['overhead']:.2%}", "",
            f"{epoch['steps']:,}", f"{epoch['lost_steps']:,.0f}", f"{epoch['lost_most']:,}",
        ]
    )  # fmt: skip
    return table(
        ["", "overhead", "cost of a save", "steps between saves", "steps lost, mean", "at most"],
        rows,
    )


def _cells(arm: Found) -> list[str]:
    return [
        _percent(arm),
        "" if arm["cost_s"] is None else f"{1e3 * arm['cost_s']:.0f} ms",
        _number(arm["interval_steps"]),
        _number(arm["lost_steps"]),
        _number(arm["lost_most"]),
    ]


def _of_overhead(found: Found) -> str:
    fixed, saves = found["overhead"]["fixed"], []
    for budget in BUDGETS:
        arm = found["overhead"][budget]
        if "not_run" not in arm:
            saves.append(f"{arm['saves']} of {arm['of']} saves for {budget}")
    chosen = f"Measured after the sidecar chose its interval: {'; '.join(saves)}. " if saves else ""
    return (
        f"{chosen}A save every {found['often']} steps leaves no ordinary step between saves (a save that is due while "
        f"another is in flight is skipped). It is therefore measured in {fixed['blocks']} blocks between blocks "
        "without calls of `step()`. Steps lost are those that a failure after each step would lose, according to the "
        "saves known durable. The cost of tracking rows is not included; `bench/tracking.py` measures it."
    )


def _of_neighbour(of: Found) -> list[str]:
    static, adaptive = of["static"], of["adaptive"]
    text = (
        "One busy loop per processor starts during the training and stops again. The fixed interval is "
        f"{static['every_s']:.2g} s, the one chosen in the quiet phase; the adaptive one has a goal of "
        f"{of['budget']:.1%}. Overhead is relative to ordinary steps of the same phase."
    )
    if "not_run" in adaptive:
        text += f" **The adaptive interval was not measured**: {adaptive['not_run']}."
    rows = []
    for name, run in (("fixed", static), ("adaptive", adaptive)):
        for phase in run.get("phases", ()):
            rows.append(
                [
                    f"{name}, {phase['name']}",
                    f"{1e3 * phase['step_s']:.1f} ms",
                    _seconds(phase["interval_s"]),
                    _percent(phase),
                    _percent(phase["later"]),
                    "" if phase["cost_s"] is None else f"{1e3 * phase['cost_s']:.0f} ms",
                ]
            )
    parts = [
        text,
        table(
            ["", "ordinary step", "between saves", "overhead", "second half of the phase", "cost of a save"],
            rows,
        ),
    ]
    if adaptive.get("decisions"):
        left_s = sum(phase["seconds"] for phase in adaptive["phases"][:-1])
        if not any(each["at_s"] > left_s for each in adaptive["decisions"]):
            parts.append(
                "**Not reached**: the sidecar did not save more often again after the neighbour stopped. A change "
                "needs eight saves, and the last phase was shorter. Simulated days in tests/unit/sidecar cover it."
            )
    return [*parts, "![overhead and interval next to a busy neighbour](papers/checkfreq_neighbour.svg)"]


def _of_kills(of: Found) -> str:
    lives, every = of["lives"], of["every_steps"]
    return (
        f"A trainer that saves every {every} steps is killed with SIGKILL at {len(lives)} instants of an interval and "
        "started again. The last step is read from memory that survives the kill. The bound is the longest interval "
        "plus the longest time from a snapshot to durable of that process, in steps. CI requires that the loss is "
        "within the bound and that no step known durable is lost."
    )


def _kills_table(lives: list[Found]) -> str:
    rows = [
        [
            each["instant"] + ("" if each["came"] else " (not reached in time)"),
            f"{each['last']:,}",
            f"{each['restored']:,}",
            f"{each['lost']}",
            f"{each['promise']}",
            f"{each['flight']}",
        ]
        for each in lives
    ]
    return table(["killed", "last step", "restored", "lost", "bound", "longest time to durable"], rows)


def _percent(arm: Found) -> str:
    if arm["overhead"] is None:
        return "unknown"
    return f"{arm['overhead']:.2%}" + ("" if arm["error"] is None else f" ± {arm['error']:.2%}")


def _every(arm: Found) -> str:
    return f"one save every {_seconds(arm['interval_s'])}" if arm["interval_s"] else "one save"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2g} s"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def plot(found: Found, folder: Path) -> None:
    of = found["neighbour"]
    path = folder / "checkfreq_neighbour.svg"
    with picture(path, 2, 1, sharex=True, figsize=(7.5, 4.6)) as (above, below):
        for name, key, colour in (("fixed", "static", "tab:orange"), ("adaptive", "adaptive", "tab:blue")):
            run = of[key]
            if "not_run" in run:
                continue
            windows = [each for each in run["windows"] if each["overhead"] is not None]
            above.plot(
                [each["at_s"] for each in windows], [100 * each["overhead"] for each in windows],
                "o-", ms=3, color=colour, label=name,
            )  # fmt: skip
            below.plot(
                [each["at_s"] for each in run["gaps"]], [each["seconds"] for each in run["gaps"]],
                ".", ms=4, alpha=0.6, color=colour, label=f"{name}, between two snapshots",
            )  # fmt: skip
            begin = _phase(run, "quiet")["seconds"]
            end = begin + _phase(run, "busy")["seconds"]
            below.axvline(begin, color=colour, lw=0.8, ls=":")
            below.axvline(end, color=colour, lw=0.8, ls=":")
            above.axvspan(begin, end, color=colour, alpha=0.08)
        if "not_run" not in of["adaptive"]:
            _in_force(below, of["adaptive"])
        above.axhline(100 * of["budget"], color="black", lw=0.8, ls="--", label="goal")
        above.set_ylabel("overhead, %")
        above.set_title("shaded: busy loops on all processors", fontsize=8, loc="right")
        below.set_ylabel("interval, s")
        below.set_xlabel("seconds")
        below.set_ylim(bottom=0)
        for ax in (above, below):
            ax.legend(frameon=False, fontsize=7, ncols=3)


def _in_force(ax: Any, run: Found) -> None:
    total_s = sum(phase["seconds"] for phase in run["phases"])
    chosen = [
        (each["at_s"], seconds)
        for each in run["decisions"]
        if (seconds := parse_interval_s(each["interval"]))
    ]
    if not chosen:
        return
    times = [max(0.0, at_s) for at_s, _ in chosen] + [total_s]
    values = [seconds for _, seconds in chosen]
    ax.step(times, [*values, values[-1]], where="post", color="tab:blue", lw=1.2, label="adaptive, chosen")


def parse_interval_s(interval: str) -> float | None:
    """Return the seconds of a decision such as "every 1.5 s", or None if it has no seconds."""
    found = re.match(r"every ([0-9.e+-]+) s\b", interval)
    return float(found[1]) if found else None
