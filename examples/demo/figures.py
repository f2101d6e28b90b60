"""Draws a run of the demo from its records as SVG."""

from __future__ import annotations

import io
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import SeenCheckpoint, StepRecord

INK, FAINT, GRID = "#1d2733", "#7a8794", "#e6eaee"
PROCESS_COLOURS = ("#2563a8", "#c2571a", "#2c7a4b", "#7a4fa3", "#a83a5b")
KILL = "#c22f2f"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deltashard",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventMark:
    """An event of the run."""

    text: str
    at_s: float
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The history of a run for the figures."""

    started_s: float
    steps: list[StepRecord]
    reference: list[StepRecord]
    """Of the uninterrupted run."""
    seen: list[SeenCheckpoint]
    marks: list[EventMark]
    processes: list[str]
    """Names of the training processes, or groups of processes, that have steps."""
    full_bytes: int
    """One ordinary checkpoint."""


def figures(history: RunHistory) -> dict[str, str]:
    """Return drawings as SVG by name: progress, loss, bytes, stall, age."""
    drawn = {"progress": _progress, "loss": _loss, "bytes": _bytes, "stall": _stall, "age": _age}
    with mpl.rc_context(STYLE):
        return {name: svg(draw(history)) for name, draw in drawn.items()}


def canvas(height: float = 3.1, width: float = 9.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _processes(steps: list[StepRecord]) -> list[list[StepRecord]]:
    """Return the steps of each process that has any."""
    return [[s for s in steps if s.process == process] for process in sorted({s.process for s in steps})]


def _mark(axes: Axes, text: str, at: float, *, top: float) -> None:
    axes.axvline(at, color=KILL, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        text,
        (at, top),
        xytext=(4, -2),
        textcoords="offset points",
        va="top",
        color=KILL,
        fontsize=9.5,
        annotation_clip=False,
    )


def _progress(history: RunHistory) -> Figure:
    figure, axes = canvas(3.6)
    processes = _processes(history.steps)
    for number, steps_of in enumerate(processes):
        color = PROCESS_COLOURS[number % len(PROCESS_COLOURS)]
        t = [s.at_s - history.started_s for s in steps_of]
        axes.plot(t, [s.step for s in steps_of], color=color, linewidth=2.2, label=history.processes[number])
        if number:
            last = processes[number - 1][-1]
            axes.plot(
                [last.at_s - history.started_s, t[0]],
                [last.step, steps_of[0].step - 1],
                color=FAINT,
                linewidth=1.2,
                linestyle=(0, (1, 1.5)),
            )
    snapshot_times = _snapshot_times(history)
    committed = [s for s in history.seen if s.checkpoint.step in snapshot_times]
    axes.plot(
        [s.at_s - history.started_s for s in committed],
        [s.checkpoint.step for s in committed],
        "o",
        markersize=5.5,
        markerfacecolor="white",
        markeredgecolor=INK,
        label="checkpoint committed",
    )
    top = max(s.step for s in history.steps)
    axes.set(xlabel="seconds since the start", ylabel="training step", ylim=(0, top * 1.12), xlim=(0, None))
    for mark in history.marks:
        _mark(axes, mark.text, mark.at_s - history.started_s, top=top * 1.1)
    axes.legend(loc="lower right")
    return figure


def _smooth(values: list[float], width: int = 100) -> np.ndarray:
    """Return means of the last `width` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(1, len(values) + 1)
    start = np.maximum(0, at - width)
    return (total[at] - total[start]) / (at - start)


def _loss(history: RunHistory) -> Figure:
    figure, axes = canvas(3.4)
    steps = [s.step for s in history.reference]
    axes.plot(
        steps,
        _smooth([s.loss for s in history.reference]),
        color="#b7c0c9",
        linewidth=5,
        label="uninterrupted",
        zorder=2,
    )
    # Draw only each process's steps that led to the final model: up to where the next process took over.
    processes = _processes(history.steps)
    final: dict[int, float] = {}
    for steps_of in processes:
        final.update({s.step: s.loss for s in steps_of})
    smooth = dict(zip(sorted(final), _smooth([final[s] for s in sorted(final)]), strict=True))
    for number, steps_of in enumerate(processes):
        stop = processes[number + 1][0].step if number + 1 < len(processes) else steps_of[-1].step + 1
        kept = [s.step for s in steps_of if s.step < stop]
        axes.plot(
            kept,
            [smooth[s] for s in kept],
            color=PROCESS_COLOURS[number % len(PROCESS_COLOURS)],
            linewidth=1.6,
            label=history.processes[number],
            zorder=3,
        )
    values = np.array(list(smooth.values()))[20:]
    low, high = values.min(), values.max()
    axes.set(
        xlabel="training step",
        ylabel="loss, mean of 100 steps",
        ylim=(low - 0.02, high + 0.03),
        xlim=(0, max(steps)),
    )
    for mark in history.marks:
        _mark(axes, mark.text, mark.last_step, top=high + 0.03)
    axes.legend(loc="lower left", ncols=2)
    return figure


def _bytes(history: RunHistory) -> Figure:
    figure, axes = canvas(3.0)
    checkpoints = [s.checkpoint for s in history.seen]
    x = np.arange(len(checkpoints))
    full = history.full_bytes / 1e6
    axes.bar(
        x,
        [full] * len(x),
        color="#eef1f4",
        width=0.72,
        label="full checkpoint (torch.save, fp32)",
    )
    for baseline, color, label in (
        (True, PROCESS_COLOURS[0], "deltashard: all rows (baseline)"),
        (False, PROCESS_COLOURS[2], "deltashard: changed rows"),
    ):
        of_kind = [i for i in x if checkpoints[i].baseline is baseline]
        sizes = [checkpoints[i].stored_bytes / 1e6 for i in of_kind]
        axes.bar(of_kind, sizes, color=color, width=0.72, label=label)
        for i, size in zip(of_kind, sizes, strict=True) if len(x) <= 26 else ():
            axes.text(i, size + full * 0.015, f"{size:.0f}", ha="center", fontsize=9, color=INK)
    shown = x[:: 1 + len(x) // 27]
    axes.set_xticks(shown, [str(checkpoints[i].step) for i in shown], fontsize=9.5)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="checkpoint of step", ylabel="MB", ylim=(0, full * 1.32), xlim=(-0.6, len(x) - 0.4))
    axes.legend(loc="upper right", ncols=3, fontsize=9.5)
    return figure


def _stall(history: RunHistory) -> Figure:
    figure, axes = canvas(2.8, 4.5)
    snapshots = [s for s in history.steps if s.snapshot]
    times = np.array([s.stall_s for s in snapshots]) * 1e3
    axes.bar(np.arange(len(snapshots)), times, color=PROCESS_COLOURS[0], width=0.72)
    p50 = float(np.median(times))
    axes.axhline(p50, color=KILL, linewidth=1.2)
    axes.annotate(
        f"median {p50:.0f} ms",
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="top",
        color=KILL,
        fontsize=9.5,
    )
    axes.grid(visible=False, axis="x")
    axes.set_xticks([])
    axes.set(xlabel="checkpoints, in order", ylabel="milliseconds", ylim=(0, max(times) * 1.25))
    return figure


def _snapshot_times(history: RunHistory) -> dict[int, float]:
    return {s.step: s.at_s for s in history.steps if s.snapshot}


def _age(history: RunHistory) -> Figure:
    figure, axes = canvas(2.8, 4.5)
    snapshot_times = _snapshot_times(history)
    t, age = [], []
    newest: float | None = None
    for seen in history.seen:
        snapshot_s = snapshot_times.get(seen.checkpoint.step)
        if snapshot_s is None:  # snapshot by close(), after the last step line
            continue
        at = seen.at_s - history.started_s
        if newest is not None:
            t.append(at)
            age.append(seen.at_s - newest)
        t.append(at)
        age.append(seen.at_s - snapshot_s)
        newest = snapshot_s
    axes.plot(t, age, color=PROCESS_COLOURS[0], linewidth=1.6)
    axes.fill_between(t, age, color=PROCESS_COLOURS[0], alpha=0.1)
    for mark in history.marks:
        axes.axvline(mark.at_s - history.started_s, color=KILL, linewidth=1, linestyle=(0, (2, 2)))
    axes.set(
        xlabel="seconds since the start",
        ylabel="seconds",
        ylim=(0, None),
        xlim=(0, None),
    )
    return figure
