"""Part 4's real training: the quality cost of partial recovery, and the gain of priority saves (CPR).

One pass over shopping baskets (`basket_training`), its tables sharded by rows into 8 shards. At random steps a shard
is lost, each shard once: its rows and accumulators return to their last saved values; everything else continues. Plain
partial recovery saves all rows every T. At the same bytes the priority variants save r N rows every r T: the two small
tables whole, the rest from the table of pairs, chosen by SCAR, MFU or SSU as `priority` scores them. Differential
saves, at the same bytes, save all changed rows as often as these bytes allow. Differential and MFU are also measured
at 8 bits, which is three times as many rows for the same bytes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from basket_training import (
    COLUMNS,
    F32,
    SHALLOW,
    STEPS,
    TABLES,
    BasketTraining,
    Rows,
    ShallowModel,
    TrainingTask,
    compile_kernels,
    mean_and_error,
    paragraph,
    run_parallel,
    task,
)
from codecs_reference import through_codec
from priority import AccessCounts, SampledReads, scar, top
from report import picture, table

PAIR_ROWS = 1 << 18
SEEDS = 4
SHARDS = 8
R = 0.125
INTERVALS = (128, 256, 512, 1024)
"""T, in steps."""
SHORT_INTERVALS = (8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64)
"""Number of differential saves in 8 T."""
RAW_ROW = 4 * COLUMNS + 4
"""Bytes of a row and its accumulator in float32."""
QUANTIZED_ROW = COLUMNS + 8 + 4
"""Bytes with the row at 8 bits, its scale and bias in float32."""
PAIRS = TABLES.index("pairs")
PLAIN, SCAR, MFU, SSU = "all rows (plain)", "SCAR", "MFU", "SSU"
CHANGED = "changed rows"
MFU_8, CHANGED_8 = "MFU, 8 bit", "changed rows, 8 bit"
ARMS = (PLAIN, SCAR, MFU, SSU, CHANGED, MFU_8, CHANGED_8)
QUANTIZED = (MFU_8, CHANGED_8)


class RowPriority(Protocol):
    """Chooses the rows of `pairs` for a save."""

    def steps(self, of: TrainingTask, start: int, stop: int) -> None:
        pass

    def choose(self, now: F32, saved: F32, k: int) -> Rows:
        """Return at most k rows, which are saved now."""


class ByDistance:
    """SCAR: rows by distance from their saved values."""

    def steps(self, of: TrainingTask, start: int, stop: int) -> None:
        pass

    def choose(self, now: F32, saved: F32, k: int) -> Rows:
        return top(scar(now, saved), k)


class ByCounts:
    """MFU: rows by number of reads."""

    def __init__(self) -> None:
        self.counts = AccessCounts(PAIR_ROWS)

    def steps(self, of: TrainingTask, start: int, stop: int) -> None:
        self.counts.read(of.steps_rows(start, stop, PAIRS))

    def choose(self, now: F32, saved: F32, k: int) -> Rows:  # noqa: ARG002 (reads decide, not weights)
        chosen = self.counts.top(k)
        self.counts.saved(chosen)
        return chosen


class BySample:
    """SSU: rows from a sample of the reads."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.sample = SampledReads(capacity, seed=seed)

    def steps(self, of: TrainingTask, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.sample.read(of.steps_rows(step, step + 1, PAIRS))

    def choose(self, now: F32, saved: F32, k: int) -> Rows:  # noqa: ARG002 (reads decide, not weights)
        return self.sample.take()[:k]


def measure_quality(quick: bool) -> dict[str, Any]:
    """Return changes against the uninterrupted twin by arm, T and seed; PLS; bytes as shares of plain's."""
    began = time.perf_counter()
    steps, seeds, intervals = (384, 2, (64, 192)) if quick else (STEPS, SEEDS, INTERVALS)
    compile_kernels()
    by_seed = run_parallel(
        [lambda seed=seed: _one_seed(seed, steps, intervals) for seed in range(1, seeds + 1)]
    )
    cells = []
    for arm in ARMS:
        for every in intervals:
            runs = [found[arm, every] for found in by_seed]
            cells.append(
                {
                    "arm": arm,
                    "every": every,
                    "changes": {
                        metric: [run["change"][metric] for run in runs] for metric in runs[0]["change"]
                    },
                    **{name: [run[name] for run in runs] for name in ("pls", "interval", "bytes")},
                }
            )
    correlation = {metric: _correlation(cells, metric) for metric in ("progressive", "held_out")}
    return {
        "quick": quick,
        "steps": steps,
        "seeds": seeds,
        "pair_rows": PAIR_ROWS,
        "shards": SHARDS,
        "r": R,
        "cells": cells,
        "correlation": correlation,
        "wall_s": time.perf_counter() - began,
    }


def headlines(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    progressive, held_out = (found["correlation"][metric] for metric in ("progressive", "held_out"))
    return [
        {
            "what": "CPR: correlation of the lost quality with PLS under partial recovery",
            "paper": ".8764",
            "ours": f"{progressive:.3f} (progressive loss), {held_out:.3f} (held-out loss)",
            "met": progressive > 0.8,
            "why": "the time of a loss matters more than the age of the last save",
        }
    ]


def _one_seed(seed: int, steps: int, intervals: Sequence[int]) -> dict[tuple[str, int], dict[str, Any]]:
    of = task(seed, pair_count=PAIR_ROWS, steps=steps)
    twin = BasketTraining(of, of.first.copy())
    twin.run(steps)
    best = twin.quality()
    rng = np.random.default_rng((seed, SHARDS))
    losses = dict(
        zip(
            np.sort(rng.choice(np.arange(1, steps), SHARDS, replace=False)).tolist(),
            rng.permutation(SHARDS).tolist(),
            strict=True,
        )
    )
    found = {}
    for arm in ARMS:
        for every in intervals:
            run = _Run(of, arm, every, steps)
            run.train(losses)
            found[arm, every] = {
                "change": run.training.quality().change(best),
                "pls": run.pls,
                "interval": run.interval,
                "bytes": run.bytes / run.saved_at / _plain_rate(of, every),
            }
    return found


class _Run:
    """One pass with saves and lost shards."""

    def __init__(self, of: TrainingTask, arm: str, every: int, steps: int) -> None:
        self.of, self.arm, self.stop = of, arm, steps
        self.training = BasketTraining(of, of.first.copy())
        self.saved: ShallowModel = of.first.copy()
        self.first_pair = of.bounds[PAIRS][0]
        self.row_bytes = QUANTIZED_ROW if arm in QUANTIZED else RAW_ROW
        self.k = min(int(R * of.bounds[-1][1]) * RAW_ROW // self.row_bytes - self.first_pair, PAIR_ROWS)
        self.priority = self._priority()
        if self.priority is not None:
            self.interval = int(R * every)
        elif arm == PLAIN:
            self.interval = every
        else:
            self.interval = _affordable(of, self.row_bytes, every, steps)
        self.bytes = 0.0
        self.pls = 0.0
        self.saved_at = 0

    def _priority(self) -> RowPriority | None:
        if self.arm in {MFU, MFU_8}:
            return ByCounts()
        if self.arm == SSU:
            return BySample(self.k, self.of.seed)
        return ByDistance() if self.arm == SCAR else None

    def train(self, losses: Mapping[int, int]) -> None:
        saves = range(self.interval, self.stop, self.interval)
        for step in sorted({*saves, *losses, self.stop}):
            before = self.training.step
            self.training.run(step)
            if self.priority is not None:
                self.priority.steps(self.of, before, step)
            if step in saves:
                self._save(step)
            if step in losses:
                self._lose_shard(losses[step], step)

    def _save(self, step: int) -> None:
        now, saved = self.training.model, self.saved
        if self.arm == PLAIN:
            rows: Rows = np.arange(len(now.weights))
        elif self.priority is None:
            rows = np.unique(self.of.steps_rows(self.saved_at, step))
        else:
            pairs = self.priority.choose(
                now.weights[self.first_pair :], saved.weights[self.first_pair :], self.k
            )
            rows = np.concatenate([np.arange(self.first_pair), self.first_pair + pairs])
        values = now.weights[rows]
        saved.weights[rows] = through_codec(values, 8) if self.arm in QUANTIZED else values
        saved.sums[rows] = now.sums[rows]
        self.bytes += len(rows) * self.row_bytes
        if self.arm != PLAIN:
            self.bytes += _id_bytes(len(rows), len(now.weights))
        self.saved_at = step

    def _lose_shard(self, shard: int, step: int) -> None:
        now, saved = self.training.model, self.saved
        for first, last in self.of.bounds:
            begin, end = (first + (last - first) * s // SHARDS for s in (shard, shard + 1))
            now.weights[begin:end] = saved.weights[begin:end]
            now.sums[begin:end] = saved.sums[begin:end]
        self.pls += (step - self.saved_at) / (self.stop * SHARDS)


def _id_bytes(count: int | np.integer, rows: int) -> float:
    return min(rows / 8, 4 * count)


def _plain_rate(of: TrainingTask, every: int) -> float:
    return of.bounds[-1][1] * RAW_ROW / every


def _affordable(of: TrainingTask, row_bytes: int, every: int, steps: int) -> int:
    """Return the shortest interval up to T in which saves of all changed rows need at most the bytes of plain's."""
    rows = of.bounds[-1][1]

    def too_much(interval: int) -> bool:
        windows = list(pairwise(range(0, steps, interval)))
        spent = 0.0
        for start, stop in windows:
            changed = np.zeros(rows, np.bool_)
            changed[of.steps_rows(start, stop)] = True
            count = np.count_nonzero(changed)
            spent += count * row_bytes + _id_bytes(count, rows)
        return spent / windows[-1][1] > _plain_rate(of, every)

    intervals = [every * 8 // eighths for eighths in SHORT_INTERVALS]
    return intervals[max(0, bisect_left(intervals, True, key=too_much) - 1)]


def _correlation(cells: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Return Pearson's correlation of plain recovery's loss change with PLS, over all seeds and T."""
    plain = [cell for cell in cells if cell["arm"] == PLAIN]
    pls = [v for cell in plain for v in cell["pls"]]
    change = [v for cell in plain for v in cell["changes"][metric]]
    return float(np.corrcoef(pls, change)[0, 1])


def _cells(found: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    return [cell for cell in found["cells"] if cell["arm"] == arm]


def check_quality(found: Mapping[str, Any]) -> list[str]:
    def loss_changes(arm: str) -> list[float]:
        return [mean_and_error(cell["changes"]["progressive"])[0] for cell in _cells(found, arm)]

    plain = loss_changes(PLAIN)
    wrong = []
    if not plain[-1] > plain[0]:
        wrong.append(
            f"a save every {found['cells'][0]['every']} steps increases the loss no less than the longest interval"
        )
    for arm in ARMS[1:]:
        # Saves of changed rows can give the same result: where many rows change, the saves are no more frequent.
        if not loss_changes(arm)[-1] <= plain[-1]:
            wrong.append(
                f"at the longest interval {arm} increases the progressive loss by {loss_changes(arm)[-1]:.4f} %,"
                f" more than saves of all rows, {plain[-1]:.4f} %"
            )
    return wrong


def quality_page(found: Mapping[str, Any]) -> str:
    intervals = [cell["every"] for cell in _cells(found, PLAIN)]

    columns = [f"T = {every}" for every in intervals]

    def changes() -> str:
        rows = [
            [
                arm,
                *(
                    "{:+.3f} ± {:.3f}".format(*mean_and_error(cell["changes"]["progressive"]))
                    for cell in _cells(found, arm)
                ),
            ]
            for arm in ARMS
        ]
        return table(["what is saved", *columns], rows)

    def row(name: str, cells: Sequence[Mapping[str, Any]], key: str, form: str) -> list[str]:
        return [name, *(format(np.mean(cell[key]), form) for cell in cells)]

    return "\n".join(
        [
            "### Quality after partial recovery",
            "",
            paragraph(
                f"The bench trains {SHALLOW}, in one pass of {found['steps']:,} steps over the baskets, with",
                f"{found['pair_rows']:,} rows of pairs and {found['seeds']} seeds. The tables have {found['shards']}",
                "row shards. Each shard is lost once, at a random step that is the same for all variants of a seed.",
                "Its rows and accumulators return to their last saved values, and dense parameters stay as they are.",
                "The table compares each variant with an uninterrupted run of the same seed:",
            ),
            "",
            paragraph(
                "- *All rows*: a save of everything every T steps, as in the paper's plain partial recovery."
            ),
            paragraph(
                f"- *SCAR*, *MFU*, *SSU*: priority saves of r N rows every r T steps (r = {found['r']:g}): the small",
                "tables and the pairs that the rule chooses.",
            ),
            paragraph("- *Changed rows*: differential saves as often as the bytes of all rows allow."),
            paragraph("- *8 bit*: the same with quantized rows, three times as many for the same bytes."),
            "",
            "**Progressive log loss**, change in %, ± standard error over seeds:",
            "",
            changes(),
            "",
            "![the progressive loss over PLS](papers/cpr_quality.svg)",
            "",
            paragraph(
                "The next table shows the remaining share of the increase under plain recovery. Its last row shows by",
                "how much the increase with changed rows exceeds that of the best priority rule.",
                _at_8_bit(found, intervals),
            ),
            "",
            table(["", *columns], _comparison_rows(found, intervals)),
            "",
            "**Cost** of the saves:",
            "",
            table(
                ["", *columns],
                [
                    row("PLS of plain recovery", _cells(found, PLAIN), "pls", ".3f"),
                    *(
                        row(f"steps between saves, {arm}", _cells(found, arm), "interval", ".0f")
                        for arm in (MFU, CHANGED)
                    ),
                    *(
                        row(f"bytes (all rows = 1), {arm}", _cells(found, arm), "bytes", ".2f")
                        for arm in ARMS[1:]
                    ),
                ],
            ),
            "",
            paragraph(
                "The paper reports that the loss of quality is linear in PLS. The correlations at the top of this page",
                "are over all seeds and T of plain recovery.",
            ),
            "",
        ]
    )


def _comparison_rows(found: Mapping[str, Any], intervals: Sequence[int]) -> list[list[str]]:
    of = [
        {arm: np.array(_cells(found, arm)[i]["changes"]["progressive"]) for arm in ARMS}
        for i in range(len(intervals))
    ]
    rows = [
        [arm, *(f"{100 * changes[arm].mean() / changes[PLAIN].mean():.0f} %" for changes in of)]
        for arm in ARMS[1:]
    ]
    best = [min((SCAR, MFU, SSU), key=lambda arm: changes[arm].mean()) for changes in of]
    rows.append(
        [
            "changed rows minus best rule",
            *(_compared(changes, CHANGED, one) for changes, one in zip(of, best, strict=True)),
        ]
    )
    return rows


def _compared(loss_changes: Mapping[str, Any], one: str, other: str) -> str:
    mean, error = mean_and_error(loss_changes[one] - loss_changes[other])
    word = "worse" if mean > 2 * error else "better" if mean < -2 * error else "not decided"
    return f"{mean:+.3f} ± {error:.3f} % ({word})"


def _at_8_bit(found: Mapping[str, Any], intervals: Sequence[int]) -> str:
    cells = zip(_cells(found, CHANGED_8), _cells(found, MFU_8), intervals, strict=True)
    differing = []
    for changed, mfu, every in cells:
        mean, error = mean_and_error(
            np.subtract(*(cell["changes"]["progressive"] for cell in (changed, mfu)))
        )
        if abs(mean) > 2 * error:
            differing.append(f"T = {every} ({mean:+.3f} ± {error:.3f} %)")
    if not differing:
        return (
            "At 8 bit, the difference between changed rows and MFU is within two standard errors at every T."
        )
    return f"At 8 bit, changed rows and MFU differ at {', '.join(differing)}."


def plot_quality(found: Mapping[str, Any], folder: Path) -> None:
    plain = _cells(found, PLAIN)
    with picture(folder / "cpr_quality.svg", figsize=(7, 4.2)) as axes:
        for arm in ARMS:
            cells = _cells(found, arm)
            x = [np.mean(cell["pls"]) for cell in plain]
            (line,) = axes.plot(x, [np.mean(cell["changes"]["progressive"]) for cell in cells], label=arm)
            for cell, whole in zip(cells, plain, strict=True):
                axes.plot(whole["pls"], cell["changes"]["progressive"], ".", color=line.get_color())
        axes.set(xlabel="PLS of plain recovery at the same bytes", ylabel="progressive log loss, change in %")
        axes.legend(fontsize=8)
