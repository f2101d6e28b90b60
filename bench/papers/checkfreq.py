"""Part 3, CheckFreq (FAST'21): how often to save, what that costs, what a failure loses, and the order of the data.

The demo's training on real data under a real sidecar and a file store; every figure is of steps that were timed.

    overhead    at the frequency that the sidecar finds for a budget, at a fixed one that is too high, and, beside them,
                of torch.save with fsync as often, and once an epoch
    neighbour   busy loops on all processors begin and end: a fixed interval, and one that is chosen anew
    kills       SIGKILL at several instants of an interval: steps lost, against the interval and the time to durable
    order       one pass with restarts, resumed where it was and restarted under a new shuffle (`data_order`)

What needs the sidecar to choose an interval says "not run" where it chose none.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import data_order
from report import table
from save_costs import Share, lost_steps, paired, timeline
from trained_steps import BATCH, Decisions, Machine, Track, Training, Victim, neighbour

Found = dict[str, Any]
GOALS = {"1 %": "overhead=1%", "3.5 %": "overhead=3.5%"}
BUDGETS = {"1 %": 0.01, "3.5 %": 0.035}
TIMELINE = "3.5 %"
"""The budget under which a neighbour comes."""
PAPER_OVERHEAD, PAPER_STATIC, PAPER_ADAPTED = 0.035, 0.35, 0.05
OFTEN = 4
"""Steps between saves that are too frequent."""
FIRST_S = 0.7
"""Interval while the sidecar measures."""
STARTED_S = 180.0
"""A trainer process may take so long to begin, or to come to an instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    pair_rows: int
    every_steps: int
    """Of the trainings that are killed."""
    instants: tuple[str, ...]
    measuring_s: float
    """The sidecar may take so long to choose."""
    steady_s: float
    """At the smaller budget."""
    blocks: int
    block_s: float
    quiet_s: float
    """The neighbour's three phases."""
    busy_s: float
    again_s: float
    static_s: tuple[float, float]
    synchronous_s: float


FULL = Size(
    pair_rows=1 << 19, measuring_s=30, steady_s=40, blocks=5, block_s=2.0, quiet_s=25, busy_s=40, again_s=60,
    static_s=(12, 20), every_steps=80, synchronous_s=10,
    instants=("at a cut", "just durable", "in between", "before the next"),
)  # fmt: skip
QUICK = Size(
    pair_rows=1 << 14, measuring_s=4, steady_s=1, blocks=1, block_s=0.3, quiet_s=1, busy_s=1, again_s=1,
    static_s=(0.5, 0.5), every_steps=20, synchronous_s=0.5, instants=("at a cut", "before the next"),
)  # fmt: skip


def measure(quick: bool) -> Found:
    size = QUICK if quick else FULL
    machine = Machine()
    found: Found = {"every_steps": size.every_steps, "often": OFTEN}
    with tempfile.TemporaryDirectory(prefix="deltashard-papers-") as name:
        folder = Path(name)
        _say("a training that is killed")
        found["kills"] = _kills(folder, size)
        training = Training(pair_rows=size.pair_rows)
        for _ in range(20):
            training.step()
        found["model"] = {"bytes": training.bytes, "pair_rows": size.pair_rows, "batch": BATCH,
                          "epoch_steps": training.epoch_steps}  # fmt: skip
        _say("overhead at a budget of 1 %")
        found["overhead"] = {
            "1 %": {"not_run": "in small"} if quick else _at_budget(folder, training, size, "1 %")
        }
        _say("a neighbour, and a budget of 3.5 %")
        found["neighbour"], found["overhead"]["3.5 %"] = _neighbours(folder, training, size)
        _say("too frequent saves")
        found["overhead"]["fixed"] = _too_frequent(folder, training, size)
        _say("torch.save")
        found["synchronous"] = _synchronous(folder, training, size, _steps_of(found["overhead"], size))
        del training
        _say("the order of the data")
        found["order"] = data_order.measure(folder, quick=quick)
    found["machine"] = machine.found()
    found["headlines"] = _headlines(found)
    return found


# A training under a sidecar


class Arm:
    """One training under one sidecar."""

    def __init__(self, training: Training, ckpt: Any, track: Track, decisions: Decisions) -> None:
        self.training, self.ckpt, self.track, self.decisions = training, ckpt, track, decisions

    def run(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> tuple[int, int]:
        """Steps that the Checkpointer hears of; the first and the last + 1."""
        return self.track.run(self.training, self.ckpt.step, seconds=seconds, enough=enough)

    def until_chosen(self, seconds: float) -> bool:
        """Train until the sidecar has chosen an interval and saved once more; whether it did."""

        def chosen() -> bool:
            return len(self.track.seconds) % 16 == 0 and bool(self.decisions.read())

        self.run(seconds, chosen)
        if not self.decisions.read():
            return False
        commits = self.track.commits
        self.run(seconds, lambda: self.track.commits > commits)
        return True

    def share(self, begin: int, end: int) -> Found:
        """What saves cost between two steps, what a death there would lose, and how long they took."""
        track = self.track
        lost = lost_steps(len(track.seconds), track.saves)
        inside = lost[-(len(track.seconds) - begin) :][: end - begin] if lost else []
        return Share.of_span(track.seconds, track.saves, begin, end).found() | {
            "lost_steps": fmean(inside) if inside else None,
            "lost_most": max(inside, default=None),
            "durable_s": median(track.durable_s) if track.durable_s else None,
            "stall_s": median(track.stalls_s) if track.stalls_s else None,
            "failures": track.failures,
        }


@contextlib.contextmanager
def _arm(folder: Path, training: Training, run: str, **settings: object) -> Iterator[Arm]:
    import deltashard
    from ours import Sidecar
    from peers import Place

    place = Place(name="file", root=str(folder / "store"))
    # What nobody needs is deleted while it runs: a hundred checkpoints would fill the disk.
    flags = {"housekeeping_s": 10, "gc_grace_s": 5, **settings}
    track = Track()
    with Sidecar(place, run, folder / run, **flags) as sidecar:
        ckpt = deltashard.Checkpointer(
            training.model, training.optimizers, grace_s=None, on_event=track.heard
        )
        with ckpt:
            ckpt.restore()
            yield Arm(training, ckpt, track, Decisions(sidecar.log))
    place.remove(run)


# Overhead


def _at_budget(folder: Path, training: Training, size: Size, budget: str) -> Found:
    with _arm(folder, training, f"budget-{budget[0]}", goal=GOALS[budget], every_s=FIRST_S) as arm:
        if not arm.until_chosen(size.measuring_s):
            return {"not_run": _unchosen(arm)}
        return arm.share(*arm.run(size.steady_s)) | {"chosen": arm.decisions.read()[-1]}


def _unchosen(arm: Arm) -> str:
    return f"the sidecar chose no interval within {arm.track.commits} saves"


def _too_frequent(folder: Path, training: Training, size: Size) -> Found:
    """Blocks of steps that the Checkpointer hears of, between blocks that it does not: those cannot be saved."""
    with _arm(folder, training, "often", every_steps=OFTEN) as arm:
        track, off, on = arm.track, [], []
        arm.run(size.measuring_s, lambda: track.commits >= 2)
        off.append(_unheard(arm, size))
        first = len(track.seconds)
        for _ in range(size.blocks):
            begin, end = arm.run(size.block_s)
            on.append(fmean(track.seconds[begin:end]))
            off.append(_unheard(arm, size))
        end = len(track.seconds)
        track.step(arm.training, arm.ckpt.step)  # closing takes the last step, which must be one it heard of
        overhead, error = paired(on, off)
        return arm.share(first, end) | {
            "overhead": overhead, "error": error, "blocks": size.blocks, "on_s": on, "off_s": off,
            "cost_s": None,
        }  # fmt: skip


def _unheard(arm: Arm, size: Size) -> float:
    """Seconds a step of steps beside which no save runs: those of the time that a save needs are left out."""
    until = time.monotonic() + 2 * max(arm.track.durable_s, default=0.0)
    while time.monotonic() < until:
        arm.training.step()
    apart = Track()
    apart.run(arm.training, lambda: None, seconds=size.block_s)
    return fmean(apart.seconds) if apart.seconds else apart.step(arm.training)


def _steps_of(overhead: Found, size: Size) -> int:
    """Steps between saves that a synchronous save is measured at: as many as at the larger budget."""
    steps = overhead[TIMELINE].get("interval_steps")
    return max(10, round(steps)) if steps else size.every_steps


def _synchronous(folder: Path, training: Training, size: Size, every: int) -> Found:
    """torch.save of everything, synced, every so many steps; and once an epoch, which follows from it."""
    import torch

    track, path = Track(), folder / "state.pt"

    def save() -> None:
        if (len(track.seconds) + 1) % every:
            return
        begun = time.perf_counter()
        with path.open("wb") as out:
            torch.save(training.state(), out)
            out.flush()
            os.fsync(out.fileno())
        track.saved(time.perf_counter() - begun)

    track.run(training, save, seconds=size.synchronous_s)
    track.run(training, save, seconds=STARTED_S, enough=lambda: track.commits >= 2)
    track.run(training, lambda: None, seconds=0.2)
    share = Share.of_span(track.seconds, track.saves, 0, len(track.seconds))
    lost = lost_steps(len(track.seconds), track.saves)
    cost_s = share.cost_s if share.cost_s is not None else fmean(track.stalls_s)
    epoch = training.epoch_steps
    return {
        "every": every, "bytes": path.stat().st_size, "lost_steps": fmean(lost), "lost_most": max(lost),
        "epoch": {"steps": epoch, "overhead": cost_s / (epoch * share.step_s), "lost_steps": (epoch - 1) / 2,
                  "lost_most": epoch - 1},
    } | share.found()  # fmt: skip


# A neighbour


def _neighbours(folder: Path, training: Training, size: Size) -> tuple[Found, Found]:
    """The same neighbour beside a chosen interval and beside a fixed one; and the quiet phase by itself."""
    with _arm(folder, training, "adaptive", goal=GOALS[TIMELINE], every_s=FIRST_S) as arm:
        if arm.until_chosen(size.measuring_s):
            adaptive = _phases(arm, (size.quiet_s, size.busy_s, size.again_s))
            alone = arm.share(*adaptive["phases"][0]["steps"]) | {"chosen": arm.decisions.read()[0]}
            every_s = adaptive["phases"][0]["interval_s"] or FIRST_S
        else:
            adaptive = alone = {"not_run": _unchosen(arm)}
            every_s = FIRST_S
    with _arm(folder, training, "static", every_s=every_s) as arm:
        arm.run(size.measuring_s, lambda: arm.track.commits >= 2)
        static = _phases(arm, (*size.static_s, 0.0)) | {"every_s": every_s}
    return {"adaptive": adaptive, "static": static, "budget": BUDGETS[TIMELINE]}, alone


def _phases(arm: Arm, lasting_s: tuple[float, float, float]) -> Found:
    """Quiet, beside a neighbour, quiet again; each with what saves cost in all of it and in its second half."""
    track, names = arm.track, ("quiet", "busy", "quiet again")
    begin = len(track.seconds)
    began_s = time.time()
    spans = []
    for name, seconds in zip(names, lasting_s, strict=True):
        if seconds:
            with neighbour() if name == "busy" else contextlib.nullcontext():
                spans.append((name, *arm.run(seconds)))
    phases = []
    for name, first, end in spans:
        half = (first + end) // 2
        phases.append(
            {"name": name, "steps": [first, end], "seconds": sum(track.seconds[first:end])}
            | arm.share(first, end)
            | {"later": arm.share(half, end)}
        )
    cuts = [save.cut for save in track.saves if save.cut >= begin]
    return {
        "phases": phases,
        "windows": timeline(track.seconds, track.saves, max(lasting_s) / 8, begin=begin),
        "gaps": [
            {"at_s": track.ended_s[then] - began_s, "seconds": track.ended_s[then] - track.ended_s[now]}
            for now, then in pairwise(cuts)
        ],
        "decisions": [each | {"at_s": each["at_s"] - began_s} for each in arm.decisions.read()],
    }


# Kills


def _kills(folder: Path, size: Size) -> Found:
    """Lives of one run, each ended by SIGKILL at an instant; the next one tells what was lost."""
    from ours import Sidecar
    from peers import Place

    place, every = Place(name="file", root=str(folder / "store")), size.every_steps
    flags = {"every_steps": every, "housekeeping_s": 10, "gc_grace_s": 5}
    lives: list[Found] = []
    with Sidecar(place, "killed", folder / "killed", **flags):
        for instant in (*size.instants, ""):
            with Victim(folder / "record", pair_rows=size.pair_rows) as victim:
                victim.until(lambda _: True, seconds=STARTED_S)
                if lives:
                    lives[-1]["restored"] = victim.record.get("restored")
                if instant:
                    victim.until(lambda record: record.get("commits") >= 2, seconds=STARTED_S)
                    came = victim.until(INSTANTS[instant](every), seconds=STARTED_S)
                    lives.append({"instant": instant, "came": came} | life(victim.kill()))
    place.remove("killed")
    for each in lives:
        each["lost"] = each["last"] - each["restored"]
    return {"every_steps": every, "lives": lives}


def _since_cut(record: Any) -> int:
    steps: int = record.get("step") - record.get("cut")
    return steps


INSTANTS: dict[str, Callable[[int], Callable[[Any], bool]]] = {
    "at a cut": lambda _: lambda record: record.get("cuts") > record.get("commits"),
    "just durable": lambda every: (
        lambda record: record.get("cuts") == record.get("commits") and _since_cut(record) < every
    ),
    "in between": lambda every: lambda record: _since_cut(record) >= every // 2,
    "before the next": lambda every: lambda record: _since_cut(record) >= every - 3,
}
"""Of an interval of so many steps: whether a record shows it."""


def life(record: dict[str, int]) -> Found:
    """What a dead trainer's record says; steps. `promise`: the longest interval it had, and the longest flight.

    A save that was in flight, and the interval that had begun, count as they stood.
    """
    last, cut = record["step"], record["cut"]
    flight = last - cut if record["cuts"] > record["commits"] else 0
    longest_flight = max(record["longest_flight"], flight)
    longest_gap = max(record["longest_gap"], last - cut)
    return {
        "last": last, "durable": record["committed"], "cuts": record["cuts"], "commits": record["commits"],
        "interval": longest_gap, "flight": longest_flight, "promise": longest_gap + longest_flight,
    }  # fmt: skip


# What is claimed


def _headlines(found: Found) -> list[Found]:
    first = found["overhead"]["1 %"]
    rows = [
        {
            "what": "CheckFreq, overhead at the interval found for 1 %, against the paper",
            "paper": f"at most {PAPER_OVERHEAD:.1%}",
        }
        | verdict(first, PAPER_OVERHEAD)
    ]
    rows += [
        {"what": f"CheckFreq, overhead at the interval found for {budget}, against that", "paper": "its p"}
        | verdict(found["overhead"][budget], share)
        for budget, share in BUDGETS.items()
    ]
    adaptive, static = found["neighbour"]["adaptive"], found["neighbour"]["static"]
    rows.append(
        {
            "what": "CheckFreq, beside a busy neighbour: a fixed interval, and one that adapts",
            "paper": f"{PAPER_STATIC:.0%} to {PAPER_ADAPTED:.0%}",
        }
        | _adapted(adaptive, static)
    )
    lives = found["kills"]["lives"]
    kept = [each for each in lives if 0 <= each["lost"] <= each["promise"]]
    every = found["kills"]["every_steps"]
    rows.append(
        {
            "what": f"CheckFreq, steps lost at a SIGKILL, saving every {every}",
            "paper": f"at most two intervals ({2 * every})",
            "ours": f"at most {max(each['lost'] for each in lives)} in {len(lives)} kills, "
            f"{fmean(each['lost'] for each in lives):.0f} on average",
            "met": len(kept) == len(lives) and all(each["lost"] <= 2 * every for each in lives),
            "why": "a save took longer than an interval",
        }
    )
    return rows + data_order.headlines(found["order"])


def verdict(arm: Found, budget: float) -> Found:
    """Ours against a budget: None where twice the standard error leaves it open."""
    if "not_run" in arm:
        return {"ours": "not run", "met": None, "why": arm["not_run"]}
    overhead, error = arm["overhead"], arm["error"]
    if overhead is None or error is None:
        return {"ours": "not told", "met": None, "why": f"the costs of {arm['saves']} saves say nothing"}
    met, why = None, f"{budget:.1%} lies within twice the standard error"
    if overhead - 2 * error > budget:
        met, why = False, f"it is more than {budget:.1%}, beyond twice the standard error"
    elif overhead + 2 * error <= budget:
        met = True
    return {"ours": f"{_percent(arm)}, {_every(arm)}", "met": met, "why": why}


def _adapted(adaptive: Found, static: Found) -> Found:
    if "not_run" in adaptive:
        return {"ours": "not run", "met": None, "why": adaptive["not_run"]}
    busy, fixed = _phase(adaptive, "busy")["later"], _phase(static, "busy")
    said = verdict(busy, PAPER_ADAPTED)
    return said | {"ours": f"{_percent(fixed)} to {_percent(busy)}"}


def _phase(run: Found, name: str) -> Found:
    found: Found = next(each for each in run["phases"] if each["name"] == name)
    return found


def check(found: Found) -> list[str]:
    """What a failure may lose, and the order of the data; nothing of speed."""
    wrong = []
    for number, each in enumerate(found["kills"]["lives"], 1):
        where = f"kill {number} ({each['instant']})"
        if each["restored"] < each["durable"]:
            wrong.append(
                f"{where}: step {each['durable']} was known durable, step {each['restored']} came back"
            )
        if each["restored"] > each["last"]:
            wrong.append(f"{where}: step {each['restored']} came back, {each['last']} was the last one")
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
            "## CheckFreq: how often to save",
            _how(model, machine),
            _overhead_table(found),
            _of_overhead(found),
            "## CheckFreq: a busy neighbour",
            *_of_neighbour(found["neighbour"]),
            "## CheckFreq: what a failure loses",
            _of_kills(found["kills"]),
            _kills_table(found["kills"]["lives"]),
            data_order.page(found["order"]),
        ]
    )


def _how(model: Found, machine: Found) -> str:
    return (
        f"The demo's training on real baskets (batches of {model['batch']}, {model['bytes'] / 1e6:.0f} MB "
        "of tables and optimizer state, one torch thread) under a real sidecar, q8, on a file store. "
        "A save's cost is what the steps from 0.3 s before its cut (rows are copied ahead) until it is known "
        "durable took beyond as many ordinary ones right before and right after it, in the same run; overhead is "
        "all saves' cost over the time of all steps without it, and the figure behind +- is its standard error "
        "over saves. Only trainer seconds count: the sidecar has processor time of its own. "
        f"While this part ran, it (with its sidecars and the neighbour below) used {machine['ours']:.0%} of "
        f"the processors' time and others {machine['others']:.0%}, load average {machine['load']:.1f} at its "
        "end: what others took is noise in these figures."
    )


def _overhead_table(found: Found) -> str:
    rows = []
    for budget, arm in found["overhead"].items():
        name = f"interval found for {budget}" if budget in BUDGETS else f"every {found['often']} steps, fixed"
        if "not_run" in arm:
            rows.append([name, f"not run: {arm['not_run']}", "", "", "", ""])
        else:
            rows.append([name, *_cells(arm)])
    synchronous = found["synchronous"]
    rows.append([f"torch.save and fsync, every {synchronous['every']} steps", *_cells(synchronous)])
    epoch = synchronous["epoch"]
    rows.append(
        [
            f"the same once an epoch of {epoch['steps']:,} steps (computed)", f"{epoch['overhead']:.2%}", "",
            f"{epoch['steps']:,}", f"{epoch['lost_steps']:,.0f}", f"{epoch['lost_most']:,}",
        ]
    )  # fmt: skip
    return table(
        ["", "overhead", "a save costs", "steps between saves", "steps lost, mean", "at most"],
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
            saves.append(
                f"for {budget} {arm['saves']} of {arm['of']} saves, {_every(arm)}: {arm['chosen']['why']}"
            )
    chosen = "Measured, each from when the sidecar had chosen: " + "; ".join(saves) + ". " if saves else ""
    return (
        f"{chosen}A save every {found['often']} steps leaves no ordinary step in between (one that comes due "
        f"while another is in flight is skipped), so that it is measured in {fixed['blocks']} blocks, each "
        "between two in which the training says nothing to its Checkpointer. Steps lost are those that a death right "
        "after each step would have lost, from when each save was known durable. The paper allows "
        f"{PAPER_OVERHEAD:.1%}. What tracking rows costs every step is in neither: "
        "`bench/tracking.py` measures it."
    )


def _of_neighbour(of: Found) -> list[str]:
    static, adaptive = of["static"], of["adaptive"]
    said = (
        "Busy loops, one for each processor, begin beside the training and end again. The paper's static interval "
        f"goes to {PAPER_STATIC:.0%} of overhead then, its adaptive one back to {PAPER_ADAPTED:.0%}. "
        f"Ours is static at {static['every_s']:.2g} s, what was found while it was quiet, and adaptive under "
        f"a budget of {of['budget']:.1%}. Overhead is against ordinary steps of the same phase: those are "
        "slower beside the neighbour, whoever saves."
    )
    if "not_run" in adaptive:
        said += f" **The adaptive one was not run**: {adaptive['not_run']}."
    rows = []
    for name, run in (("static", static), ("adaptive", adaptive)):
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
        said,
        table(
            ["", "ordinary step", "between saves", "overhead", "in its second half", "a save costs"],
            rows,
        ),
    ]
    if adaptive.get("decisions"):
        parts.append(
            "Decisions, by seconds from the timeline's beginning: "
            + "; ".join(
                f"{each['at_s']:.0f} s {each['interval']} ({each['cause']})" for each in adaptive["decisions"]
            )
            + "."
        )
        left_s = sum(phase["seconds"] for phase in adaptive["phases"][:-1])
        if not any(each["at_s"] > left_s for each in adaptive["decisions"]):
            parts.append(
                "It did not save more often again once the neighbour had gone: **missed here**. A change asks for "
                "eight saves, and the last phase ended before. Simulated days in tests/unit/sidecar show it."
            )
    return [*parts, "![a busy neighbour](papers/checkfreq_neighbour.svg)"]


def _of_kills(of: Found) -> str:
    lives, every = of["lives"], of["every_steps"]
    within = sum(each["lost"] <= 2 * every for each in lives)
    return (
        f"A trainer that saves every {every} steps is ended by SIGKILL at {len(lives)} instants of an "
        "interval, and started again; the last step is read from memory that outlives it, the step that came back from "
        "the trainer after it. The promise: the longest interval of that life and the longest flight from a cut to "
        "durable, in steps as that life had them. CI holds it, and that no step is lost that was known "
        "durable. CheckFreq's bound of two intervals, which asks that a save is durable within one, was kept "
        f"{within} of {len(lives)} times."
    )


def _kills_table(lives: list[Found]) -> str:
    rows = [
        [
            each["instant"] + ("" if each["came"] else " (did not come in time)"),
            f"{each['last']:,}",
            f"{each['restored']:,}",
            f"{each['lost']}",
            f"{each['promise']}",
            f"{each['flight']}",
        ]
        for each in lives
    ]
    return table(["killed", "last step", "came back", "lost", "promised at most", "longest flight"], rows)


def _percent(arm: Found) -> str:
    if arm["overhead"] is None:
        return "not told"
    return f"{arm['overhead']:.2%}" + ("" if arm["error"] is None else f" +- {arm['error']:.2%}")


def _every(arm: Found) -> str:
    return f"a save every {_seconds(arm['interval_s'])}" if arm["interval_s"] else "one save"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2g} s"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def plot(found: Found, folder: Path) -> None:
    """One picture: overhead and interval over time, with a neighbour in the middle."""
    from matplotlib import pyplot as plt

    of = found["neighbour"]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7.5, 4.6))
    for name, colour in (("static", "tab:orange"), ("adaptive", "tab:blue")):
        run = of[name]
        if "not_run" in run:
            continue
        windows = [each for each in run["windows"] if each["overhead"] is not None]
        above.plot(
            [each["at_s"] for each in windows], [100 * each["overhead"] for each in windows],
            "o-", ms=3, color=colour, label=name,
        )  # fmt: skip
        below.plot(
            [each["at_s"] for each in run["gaps"]], [each["seconds"] for each in run["gaps"]],
            ".", ms=4, alpha=0.6, color=colour, label=f"{name}, between two cuts",
        )  # fmt: skip
        begin = _phase(run, "quiet")["seconds"]
        end = begin + _phase(run, "busy")["seconds"]
        below.axvline(begin, color=colour, lw=0.8, ls=":")
        below.axvline(end, color=colour, lw=0.8, ls=":")
        above.axvspan(begin, end, color=colour, alpha=0.08)
    if "not_run" not in of["adaptive"]:
        _in_force(below, of["adaptive"])
    above.axhline(100 * of["budget"], color="black", lw=0.8, ls="--", label="budget")
    above.set_ylabel("overhead, %")
    above.set_title("shaded: busy loops on all processors", fontsize=8, loc="right")
    below.set_ylabel("interval, s")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0)
    for ax in (above, below):
        ax.legend(frameon=False, fontsize=7, ncols=3)
    figure.savefig(folder / "checkfreq_neighbour.svg", metadata={"Date": None})
    plt.close(figure)


def _in_force(ax: Any, run: Found) -> None:
    total_s = sum(phase["seconds"] for phase in run["phases"])
    chosen = [(each["at_s"], seconds) for each in run["decisions"] if (seconds := in_words(each["interval"]))]
    if not chosen:
        return
    times = [max(0.0, at_s) for at_s, _ in chosen] + [total_s]
    values = [seconds for _, seconds in chosen]
    ax.step(times, [*values, values[-1]], where="post", color="tab:blue", lw=1.2, label="adaptive, in force")


def in_words(interval: str) -> float | None:
    """Seconds of a decision such as "every 1.5 s"; None: it says no seconds."""
    said = re.match(r"every ([0-9.e+-]+) s\b", interval)
    return float(said[1]) if said else None


def _say(what: str) -> None:
    print(f"  {what} ...", file=sys.stderr, flush=True)
