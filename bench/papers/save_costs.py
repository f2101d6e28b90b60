"""What saves cost a training, from nothing but how long each of its steps took and when saves were. Pure.

A save's *window* goes from shortly before its cut (`LEAD_S`: rows may be copied ahead) to the step at whose end the
trainer knew it durable. All other steps are *quiet*. Its cost is what the window took beyond as many quiet steps, by
the mean of as many right before it as right after it: a machine that grows slower or faster meanwhile cancels out. It
may be negative: noise that is cut off at zero would add up to a cost.

    overhead = costs of all saves / seconds of all steps without them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

LEAD_S = 0.3
"""Before a cut, in which rows may be copied ahead of it; at most `LEAD_SHARE` of the quiet steps before it."""
LEAD_SHARE = 0.5
MIN_QUIET_STEPS = 4
"""Steps beside a window, below which it has no cost that could be told."""


@dataclass(slots=True, kw_only=True)
class TimedSave:
    """Indices of steps, from 0."""

    cut: int
    """The step in which training was held for it."""
    durable: int | None = None
    """The step at whose end it was known durable; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOverhead:
    """What saves cost, as a share of training."""

    overhead: float | None
    """None: no save's cost could be told."""
    error: float | None
    """Standard error of `overhead`; None: of one save alone."""
    cost_s: float | None
    """Of a save, the mean."""
    saves: int
    """Whose cost could be told, of all."""
    of: int
    step_s: float
    """Of a quiet step; of all where none was quiet."""
    interval_s: float | None
    """Between two cuts, the mean; None: fewer than two."""
    interval_steps: float | None

    @classmethod
    def of_span(
        cls, seconds: Sequence[float], saves: Sequence[TimedSave], begin: int, end: int
    ) -> SaveOverhead:
        """Of the saves that were cut in steps `begin` to `end`, which is exclusive."""
        told = costs(seconds, saves)
        inside = [number for number, save in enumerate(saves) if begin <= save.cut < end]
        known = [cost for number in inside if (cost := told[number]) is not None]
        snapshots = [saves[number].cut for number in inside]
        total_s = sum(seconds[begin:end])
        overhead = error = None
        if known:
            cost_s = fmean(known) * len(inside)
            without_s = max(total_s - cost_s, 1e-9)
            overhead = cost_s / without_s
            if len(known) > 1:
                error = stdev(known) / math.sqrt(len(known)) * len(inside) / without_s
        gaps = len(snapshots) - 1
        calm = [seconds[at] for at in quiet(seconds, saves) if begin <= at < end]
        return cls(
            overhead=overhead,
            error=error,
            cost_s=fmean(known) if known else None,
            saves=len(known),
            of=len(inside),
            step_s=fmean(calm) if calm else total_s / max(1, end - begin),
            interval_s=sum(seconds[snapshots[0] : snapshots[-1]]) / gaps if gaps > 0 else None,
            interval_steps=(snapshots[-1] - snapshots[0]) / gaps if gaps > 0 else None,
        )

    def found(self) -> dict[str, Any]:
        return asdict(self)


def windows(seconds: Sequence[float], saves: Sequence[TimedSave]) -> list[tuple[int, int]]:
    """(first, last + 1) of each save's window, in order; one that was never durable has all that follows."""
    found = []
    free = 0
    for number, save in enumerate(saves):
        following = saves[number + 1].cut if number + 1 < len(saves) else len(seconds)
        # The next one may be cut at the boundary where this one is known durable.
        end = following if save.durable is None else min(save.durable + 1, following)
        first, lead_s = save.cut, 0.0
        least = save.cut - int((save.cut - free) * LEAD_SHARE)
        while first > least and lead_s < LEAD_S:
            first -= 1
            lead_s += seconds[first]
        found.append((first, max(end, save.cut + 1)))
        free = max(end, save.cut + 1)
    return found


def quiet(seconds: Sequence[float], saves: Sequence[TimedSave]) -> list[int]:
    found, at = [], 0
    for first, end in windows(seconds, saves):
        found += range(at, first)
        at = max(at, end)
    return [*found, *range(at, len(seconds))]


def costs(seconds: Sequence[float], saves: Sequence[TimedSave]) -> list[float | None]:
    """Seconds that each save cost; None where too few steps beside it were quiet, or it was never durable."""
    spans = windows(seconds, saves)
    found: list[float | None] = []
    for number, (first, end) in enumerate(spans):
        after = spans[number + 1][0] if number + 1 < len(spans) else len(seconds)
        before = spans[number - 1][1] if number else 0
        if saves[number].durable is None or first - before + after - end < MIN_QUIET_STEPS:
            found.append(None)
            continue
        # As many on each side, so that a drift cancels out; where one side has next to none, the other.
        near = min(first - before, after - end)
        if near < MIN_QUIET_STEPS // 2:
            near = max(first - before, after - end)
        quiet_s = fmean([*seconds[max(before, first - near) : first], *seconds[end : min(after, end + near)]])
        found.append(sum(seconds[first:end]) - (end - first) * quiet_s)
    return found


def lost_steps(steps: int, saves: Sequence[TimedSave]) -> list[int]:
    """Steps that a death right after each of `steps` steps would have lost; none before the first save is durable."""
    found = []
    known = sorted((save.durable, save.cut) for save in saves if save.durable is not None)
    newest, at = -1, 0
    for step in range(steps):
        while at < len(known) and known[at][0] <= step:
            newest, at = max(newest, known[at][1]), at + 1
        if newest >= 0:
            found.append(step - newest)
    return found


def paired(on: Sequence[float], off: Sequence[float]) -> tuple[float, float | None]:
    """Overhead of blocks with saves, each over the mean of the two blocks without that it lies between; its error.

    `off` has one block more than `on`; both in seconds a step.
    """
    shares = [2 * with_s / (off[at] + off[at + 1]) - 1 for at, with_s in enumerate(on)]
    return fmean(shares), stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None


def timeline(
    seconds: Sequence[float], saves: Sequence[TimedSave], width_s: float, *, begin: int = 0
) -> list[dict[str, Any]]:
    """Windows of `width_s` each from step `begin` on: when, the saves in it, what they cost, and a quiet step."""
    found: list[dict[str, Any]] = []
    at, now_s = begin, 0.0
    while at < len(seconds):
        first, begun_s = at, now_s
        while at < len(seconds) and now_s - begun_s < width_s:
            now_s += seconds[at]
            at += 1
        share = SaveOverhead.of_span(seconds, saves, first, at)
        quiet_of = share.overhead
        if not share.of:  # no save, no cost
            quiet_of = 0.0
        found.append(
            {"at_s": (begun_s + now_s) / 2, "overhead": quiet_of, "saves": share.of, "step_s": share.step_s}
        )
    return found
