"""Part 3, CheckFreq (FAST'21): how often to save, what saves cost, what a failure loses, and the order of the data.

The demo's training on real data under a real sidecar and a file store; every figure comes from timed steps.

    overhead    at the frequency that the sidecar finds for a budget, at a fixed one that is too high, and, for
                comparison, of torch.save with fsync as often, and once an epoch
    neighbour   busy loops on all processors start and stop: a fixed interval, and one that the sidecar adapts
    kills       SIGKILL at several instants of an interval: steps lost, against the interval and the time to durable
    order       one pass with restarts, resumed at its position and restarted under a new shuffle (`data_order`)

A figure that requires an interval of the sidecar is "not measured" where the sidecar chose none.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import data_order
from checkfreq_claims import BUDGETS, check, headlines, page, plot
from demo_training import BATCH, pair_table_rows
from measuring import log_progress
from save_costs import SaveOverhead, lost_steps, paired, timeline
from trained_steps import CpuUsage, DecisionLog, EndlessTraining, KilledTrainer, StepTrace, neighbour

__all__ = ["check", "headlines", "measure", "page", "plot"]
Found = dict[str, Any]
GOALS = {"1 %": "overhead=1%", "3.5 %": "overhead=3.5%"}
TIMELINE = "3.5 %"
"""The budget in the neighbour's arm."""
FREQUENT_STEPS = 4
"""Steps between too frequent saves."""
FIRST_S = 0.7
START_TIMEOUT_S = 180.0
"""Seconds that a trainer process may take to start, or to reach an instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the measurement."""

    pair_rows: int
    every_steps: int
    instants: tuple[str, ...]
    measuring_s: float
    steady_s: float
    """Seconds of training at the smaller budget."""
    blocks: int
    block_s: float
    quiet_s: float
    """Seconds of the neighbour's three phases."""
    busy_s: float
    second_quiet_s: float
    static_s: tuple[float, float]
    synchronous_s: float


FULL = Size(
    pair_rows=1 << 19, measuring_s=30, steady_s=40, blocks=5, block_s=2.0, quiet_s=25, busy_s=40, second_quiet_s=60,
    static_s=(12, 20), every_steps=80, synchronous_s=10,
    instants=("at a snapshot", "just durable", "halfway", "before the next"),
)  # fmt: skip
QUICK = Size(
    pair_rows=1 << 14, measuring_s=4, steady_s=1, blocks=1, block_s=0.3, quiet_s=1, busy_s=1, second_quiet_s=1,
    static_s=(0.5, 0.5), every_steps=20, synchronous_s=0.5, instants=("at a snapshot", "before the next"),
)  # fmt: skip


def measure(quick: bool) -> Found:
    size = QUICK if quick else FULL
    machine = CpuUsage()
    found: Found = {"every_steps": size.every_steps, "often": FREQUENT_STEPS}
    with tempfile.TemporaryDirectory(prefix="deltashard-papers-") as name:
        folder = Path(name)
        log_progress("a training that is killed")
        found["kills"] = _kills(folder, size)
        with pair_table_rows(size.pair_rows):
            training = EndlessTraining()
            for _ in range(20):
                training.step()
            found["model"] = {"bytes": training.bytes, "pair_rows": size.pair_rows, "batch": BATCH,
                              "epoch_steps": training.epoch_steps}  # fmt: skip
            log_progress("overhead at a budget of 1 %")
            found["overhead"] = {
                "1 %": {"not_run": "in small"} if quick else _at_budget(folder, training, size, "1 %")
            }
            log_progress("a neighbour, and a budget of 3.5 %")
            found["neighbour"], found["overhead"]["3.5 %"] = _neighbours(folder, training, size)
            log_progress("too frequent saves")
            found["overhead"]["fixed"] = _too_frequent(folder, training, size)
            log_progress("torch.save")
            found["synchronous"] = _synchronous(folder, training, size, _steps_of(found["overhead"], size))
            del training
        log_progress("the order of the data")
        found["order"] = data_order.measure(folder, quick=quick)
    found["machine"] = machine.found()
    return found


# A training under a sidecar


class Arm:
    """One training under one sidecar."""

    def __init__(
        self, training: EndlessTraining, ckpt: Any, trace: StepTrace, decisions: DecisionLog
    ) -> None:
        self.training, self.ckpt, self.trace, self.decisions = training, ckpt, trace, decisions

    def run(self, seconds: float, stop_when: Callable[[], bool] = lambda: False) -> tuple[int, int]:
        return self.trace.run(self.training, self.ckpt.step, seconds=seconds, stop_when=stop_when)

    def until_chosen(self, seconds: float) -> bool:
        """Train until the sidecar has chosen an interval and has saved once more; return whether it did."""

        def chosen() -> bool:
            return len(self.trace.seconds) % 16 == 0 and bool(self.decisions.read())

        self.run(seconds, chosen)
        if not self.decisions.read():
            return False
        commits = self.trace.commits
        self.run(seconds, lambda: self.trace.commits > commits)
        return True

    def share(self, begin: int, end: int) -> Found:
        """Return cost and durations of the saves between two steps, and the steps that a failure there would lose."""
        trace = self.trace
        lost = lost_steps(len(trace.seconds), trace.saves)
        inside = lost[-(len(trace.seconds) - begin) :][: end - begin] if lost else []
        return SaveOverhead.of_span(trace.seconds, trace.saves, begin, end).found() | {
            "lost_steps": fmean(inside) if inside else None,
            "lost_most": max(inside, default=None),
            "durable_s": median(trace.durable_s) if trace.durable_s else None,
            "stall_s": median(trace.stalls_s) if trace.stalls_s else None,
            "failures": trace.failures,
        }


@contextlib.contextmanager
def _arm(folder: Path, training: EndlessTraining, run: str, **settings: object) -> Iterator[Arm]:
    import deltashard
    from ours import SidecarServer
    from peers import StoreLocation

    place = StoreLocation(name="file", root=str(folder / "store"))
    # Delete unneeded checkpoints during the run: a hundred of them would fill the disk.
    flags = {"maintenance_interval_s": 10, "gc_grace_s": 5, **settings}
    trace = StepTrace()
    with SidecarServer(place, run, folder / run, **flags) as sidecar:
        ckpt = deltashard.Checkpointer(
            training.model, training.optimizers, grace_s=None, on_event=trace.on_event
        )
        with ckpt:
            ckpt.restore()
            yield Arm(training, ckpt, trace, DecisionLog(sidecar.log))
    place.remove(run)


# Overhead


def _at_budget(folder: Path, training: EndlessTraining, size: Size, budget: str) -> Found:
    with _arm(folder, training, f"budget-{budget[0]}", goal=GOALS[budget], every_s=FIRST_S) as arm:
        if not arm.until_chosen(size.measuring_s):
            return {"not_run": _unchosen(arm)}
        return arm.share(*arm.run(size.steady_s)) | {"chosen": arm.decisions.read()[-1]}


def _unchosen(arm: Arm) -> str:
    return f"the sidecar chose no interval within {arm.trace.commits} saves"


def _too_frequent(folder: Path, training: EndlessTraining, size: Size) -> Found:
    """Run blocks of steps with `ckpt.step()`, which are saved, between blocks without it, which cannot be saved."""
    with _arm(folder, training, "often", every_steps=FREQUENT_STEPS) as arm:
        trace, off, on = arm.trace, [], []
        arm.run(size.measuring_s, lambda: trace.commits >= 2)
        off.append(_unobserved_step_s(arm, size))
        first = len(trace.seconds)
        for _ in range(size.blocks):
            begin, end = arm.run(size.block_s)
            on.append(fmean(trace.seconds[begin:end]))
            off.append(_unobserved_step_s(arm, size))
        end = len(trace.seconds)
        trace.step(
            arm.training, arm.ckpt.step
        )  # closing saves the last step, which must be one with `ckpt.step()`
        overhead, error = paired(on, off)
        return arm.share(first, end) | {
            "overhead": overhead, "error": error, "blocks": size.blocks, "on_s": on, "off_s": off,
            "cost_s": None,
        }  # fmt: skip


def _unobserved_step_s(arm: Arm, size: Size) -> float:
    """Return seconds per step without a concurrent save: steps within the time that a save needs are excluded."""
    until = time.monotonic() + 2 * max(arm.trace.durable_s, default=0.0)
    while time.monotonic() < until:
        arm.training.step()
    apart = StepTrace()
    apart.run(arm.training, lambda: None, seconds=size.block_s)
    return fmean(apart.seconds) if apart.seconds else apart.step(arm.training)


def _steps_of(overhead: Found, size: Size) -> int:
    """Return the steps between saves for the synchronous measurement: as many as at the larger budget."""
    steps = overhead[TIMELINE].get("interval_steps")
    return max(10, round(steps)) if steps else size.every_steps


def _synchronous(folder: Path, training: EndlessTraining, size: Size, every: int) -> Found:
    """Run torch.save of everything, synced, every few steps; derive the overhead of one save per epoch."""
    import torch

    trace, path = StepTrace(), folder / "state.pt"

    def save() -> None:
        if (len(trace.seconds) + 1) % every:
            return
        begun = time.perf_counter()
        with path.open("wb") as out:
            torch.save(training.state(), out)
            out.flush()
            os.fsync(out.fileno())
        trace.saved(time.perf_counter() - begun)

    trace.run(training, save, seconds=size.synchronous_s)
    trace.run(training, save, seconds=START_TIMEOUT_S, stop_when=lambda: trace.commits >= 2)
    trace.run(training, lambda: None, seconds=0.2)
    share = SaveOverhead.of_span(trace.seconds, trace.saves, 0, len(trace.seconds))
    lost = lost_steps(len(trace.seconds), trace.saves)
    cost_s = share.cost_s if share.cost_s is not None else fmean(trace.stalls_s)
    epoch = training.epoch_steps
    return {
        "every": every, "bytes": path.stat().st_size, "lost_steps": fmean(lost), "lost_most": max(lost),
        "epoch": {"steps": epoch, "overhead": cost_s / (epoch * share.step_s), "lost_steps": (epoch - 1) / 2,
                  "lost_most": epoch - 1},
    } | share.found()  # fmt: skip


# A neighbour


def _neighbours(folder: Path, training: EndlessTraining, size: Size) -> tuple[Found, Found]:
    """Measure the same neighbour with a chosen interval and with a fixed one; and the quiet phase alone."""
    with _arm(folder, training, "adaptive", goal=GOALS[TIMELINE], every_s=FIRST_S) as arm:
        if arm.until_chosen(size.measuring_s):
            adaptive = _phases(arm, (size.quiet_s, size.busy_s, size.second_quiet_s))
            alone = arm.share(*adaptive["phases"][0]["steps"]) | {"chosen": arm.decisions.read()[0]}
            every_s = adaptive["phases"][0]["interval_s"] or FIRST_S
        else:
            adaptive = alone = {"not_run": _unchosen(arm)}
            every_s = FIRST_S
    with _arm(folder, training, "static", every_s=every_s) as arm:
        arm.run(size.measuring_s, lambda: arm.trace.commits >= 2)
        static = _phases(arm, (*size.static_s, 0.0)) | {"every_s": every_s}
    return {"adaptive": adaptive, "static": static, "budget": BUDGETS[TIMELINE]}, alone


def _phases(arm: Arm, lasting_s: tuple[float, float, float]) -> Found:
    """Measure quiet, neighbour and quiet phases; for each the cost of saves in all of it and in its second half."""
    trace, names = arm.trace, ("quiet", "busy", "quiet again")
    begin = len(trace.seconds)
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
            {"name": name, "steps": [first, end], "seconds": sum(trace.seconds[first:end])}
            | arm.share(first, end)
            | {"later": arm.share(half, end)}
        )
    snapshots = [save.snapshot for save in trace.saves if save.snapshot >= begin]
    return {
        "phases": phases,
        "windows": timeline(trace.seconds, trace.saves, max(lasting_s) / 8, begin=begin),
        "gaps": [
            {"at_s": trace.ended_s[then] - began_s, "seconds": trace.ended_s[then] - trace.ended_s[now]}
            for now, then in pairwise(snapshots)
        ],
        "decisions": [each | {"at_s": each["at_s"] - began_s} for each in arm.decisions.read()],
    }


# Kills


def _kills(folder: Path, size: Size) -> Found:
    """Kill several trainers of one run by SIGKILL at an instant; the next one reports what it restored."""
    from ours import SidecarServer
    from peers import StoreLocation

    place, every = StoreLocation(name="file", root=str(folder / "store")), size.every_steps
    flags = {"every_steps": every, "maintenance_interval_s": 10, "gc_grace_s": 5}
    lives: list[Found] = []
    with SidecarServer(place, "killed", folder / "killed", **flags):
        for instant in (*size.instants, ""):
            with KilledTrainer(folder / "record", pair_rows=size.pair_rows) as victim:
                victim.until(lambda _: True, seconds=START_TIMEOUT_S)
                if lives:
                    lives[-1]["restored"] = victim.record.get("restored")
                if instant:
                    victim.until(lambda record: record.get("commits") >= 2, seconds=START_TIMEOUT_S)
                    came = victim.until(INSTANTS[instant](every), seconds=START_TIMEOUT_S)
                    lives.append({"instant": instant, "came": came} | summarize_kill(victim.kill()))
    place.remove("killed")
    for each in lives:
        each["lost"] = each["last"] - each["restored"]
    return {"every_steps": every, "lives": lives}


def _steps_since_snapshot(record: Any) -> int:
    steps: int = record.get("step") - record.get("snapshot_step")
    return steps


INSTANTS: dict[str, Callable[[int], Callable[[Any], bool]]] = {
    "at a snapshot": lambda _: lambda record: record.get("snapshots") > record.get("commits"),
    "just durable": lambda every: (
        lambda record: (
            record.get("snapshots") == record.get("commits") and _steps_since_snapshot(record) < every
        )
    ),
    "halfway": lambda every: lambda record: _steps_since_snapshot(record) >= every // 2,
    "before the next": lambda every: lambda record: _steps_since_snapshot(record) >= every - 3,
}
"""By position in an interval of `n` steps: whether a record is at that instant."""


def summarize_kill(record: dict[str, int]) -> Found:
    """Summarize a dead trainer's record in steps. `promise`: its longest interval plus its longest flight.

    A save in flight and the current interval count with their length at the kill.
    """
    last, snapshot_step = record["step"], record["snapshot_step"]
    flight = last - snapshot_step if record["snapshots"] > record["commits"] else 0
    longest_flight = max(record["longest_flight"], flight)
    longest_gap = max(record["longest_gap"], last - snapshot_step)
    return {
        "last": last, "durable": record["committed"], "snapshots": record["snapshots"], "commits": record["commits"],
        "interval": longest_gap, "flight": longest_flight, "promise": longest_gap + longest_flight,
    }  # fmt: skip
