"""What saves cost a training, computed from the duration of its steps and the times of saves. Pure.

A save's *window* is from shortly before its snapshot (`LEAD_S`: rows may be copied ahead) to the step at whose end the
trainer had received the commit. All other steps are *quiet*. The cost is the extra time of the window over as many
quiet steps, by the mean of as many right before it as right after it: a drift of the machine's speed cancels out. The
cost may be negative: noise that is clipped at zero would add up to a cost.

    overhead = costs of all saves / seconds of all steps without them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

LEAD_S = 0.3
"""Seconds before a snapshot in which rows may be copied ahead; at most `LEAD_SHARE` of the quiet steps before it."""
LEAD_SHARE = 0.5
MIN_QUIET_STEPS = 4
"""Minimum number of quiet steps next to a window for its cost to be known."""


@dataclass(slots=True, kw_only=True)
class TimedSave:
    """A save by indices of steps, from 0."""

    snapshot: int
    """The step in which the snapshot is taken."""
    durable: int | None = None
    """The step at whose end the save was known durable; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOverhead:
    """The cost of saves as a share of training."""

    overhead: float | None
    """None: no save's cost is known."""
    error: float | None
    """Standard error of `overhead`; None for a single save."""
    cost_s: float | None
    saves: int
    of: int
    step_s: float
    """Seconds of a quiet step; the mean of all steps if none was quiet."""
    interval_s: float | None
    """Mean time between two snapshots; None for fewer than two."""
    interval_steps: float | None

    @classmethod
    def of_span(
        cls, seconds: Sequence[float], saves: Sequence[TimedSave], begin: int, end: int
    ) -> SaveOverhead:
        """Summarize the saves whose snapshot is in steps `begin` to `end` (exclusive)."""
        cost_of = costs(seconds, saves)
        inside = [number for number, save in enumerate(saves) if begin <= save.snapshot < end]
        known = [cost for number in inside if (cost := cost_of[number]) is not None]
        snapshots = [saves[number].snapshot for number in inside]
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
    """Return (first, last + 1) of each save's window, in order; a save that was never durable has all later steps."""
    found = []
    free = 0
    for number, save in enumerate(saves):
        following = saves[number + 1].snapshot if number + 1 < len(saves) else len(seconds)
        # The next snapshot may be at the boundary where this save is known durable.
        end = following if save.durable is None else min(save.durable + 1, following)
        first, lead_s = save.snapshot, 0.0
        least = save.snapshot - int((save.snapshot - free) * LEAD_SHARE)
        while first > least and lead_s < LEAD_S:
            first -= 1
            lead_s += seconds[first]
        found.append((first, max(end, save.snapshot + 1)))
        free = max(end, save.snapshot + 1)
    return found


def quiet(seconds: Sequence[float], saves: Sequence[TimedSave]) -> list[int]:
    found, at = [], 0
    for first, end in windows(seconds, saves):
        found += range(at, first)
        at = max(at, end)
    return [*found, *range(at, len(seconds))]


def costs(seconds: Sequence[float], saves: Sequence[TimedSave]) -> list[float | None]:
    """Return each save's seconds; None where too few steps next to it were quiet, or it was never durable."""
    spans = windows(seconds, saves)
    found: list[float | None] = []
    for number, (first, end) in enumerate(spans):
        after = spans[number + 1][0] if number + 1 < len(spans) else len(seconds)
        before = spans[number - 1][1] if number else 0
        if saves[number].durable is None or first - before + after - end < MIN_QUIET_STEPS:
            found.append(None)
            continue
        # As many on each side, so that a drift cancels out; if one side has too few, only the other.
        near = min(first - before, after - end)
        if near < MIN_QUIET_STEPS // 2:
            near = max(first - before, after - end)
        quiet_s = fmean([*seconds[max(before, first - near) : first], *seconds[end : min(after, end + near)]])
        found.append(sum(seconds[first:end]) - (end - first) * quiet_s)
    return found


def lost_steps(steps: int, saves: Sequence[TimedSave]) -> list[int]:
    """Return the steps lost by a failure after each of `steps` steps, from the first durable save on."""
    found = []
    known = sorted((save.durable, save.snapshot) for save in saves if save.durable is not None)
    newest, at = -1, 0
    for step in range(steps):
        while at < len(known) and known[at][0] <= step:
            newest, at = max(newest, known[at][1]), at + 1
        if newest >= 0:
            found.append(step - newest)
    return found


def paired(on: Sequence[float], off: Sequence[float]) -> tuple[float, float | None]:
    """Return the overhead of blocks with saves over the mean of the two adjacent blocks without; its error.

    `off` has one block more than `on`; both in seconds a step.
    """
    shares = [2 * with_s / (off[at] + off[at + 1]) - 1 for at, with_s in enumerate(on)]
    return fmean(shares), stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None


def timeline(
    seconds: Sequence[float], saves: Sequence[TimedSave], width_s: float, *, begin: int = 0
) -> list[dict[str, Any]]:
    """Return windows of `width_s` from step `begin` on: time, saves, their cost, and a quiet step."""
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
