"""Overhead against interval as lines of text: a curve on a logarithmic axis, and letters where goals lie. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltashard_checkpoint.deciding.goal import duration

HEIGHT = 12
_LABELS = 4
_CLIP = 3.0
"""The axis ends at this multiple of the least overhead (and above the goals that lie near)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A goal on the curve."""

    letter: str
    interval_s: float
    overhead: float


def chart(curve: Sequence[tuple[float, float]], marks: Sequence[Mark], *, point: str = "*") -> list[str]:
    """Lines from top to bottom, the axes last; the first mark is on top of others at its place."""
    finite = [overhead for _, overhead in curve if math.isfinite(overhead)]
    if not finite:
        return ["no interval keeps up with these failures"]
    least = min(finite)
    near = [mark.overhead for mark in marks if mark.overhead <= 2 * _CLIP * least]
    top = max([min(max(finite), _CLIP * least), *near]) * 1.05 or 1.0
    width = len(curve)
    low, high = math.log(curve[0][0]), math.log(curve[-1][0])

    def line(overhead: float) -> int | None:
        at = HEIGHT - 1 - round(overhead / top * (HEIGHT - 1)) if math.isfinite(overhead) else -1
        return at if 0 <= at < HEIGHT else None

    cells = [[" "] * width for _ in range(HEIGHT)]
    for column, (_, overhead) in enumerate(curve):
        if (at := line(overhead)) is not None:
            cells[at][column] = point
    for mark in reversed(marks):
        column = round((math.log(mark.interval_s) - low) / (high - low) * (width - 1))
        at = line(mark.overhead)
        cells[0 if at is None else at][min(max(column, 0), width - 1)] = mark.letter
    every = (HEIGHT - 1) / (_LABELS - 1)
    labelled = {round(at * every): top * (1 - at / (_LABELS - 1)) for at in range(_LABELS)}
    lines = [
        f"{f'{100 * labelled[at]:.3g} %' if at in labelled else '':>8} |{''.join(row)}"
        for at, row in enumerate(cells)
    ]
    ticks = [0, width // 3, 2 * width // 3, width - 1]
    rule = "".join("+" if at in ticks else "-" for at in range(width))
    names = [" "] * (width + 12)
    for at in ticks:
        text = duration(curve[at][0])
        begin = min(max(at - len(text) // 2, 0), len(names) - len(text))
        names[begin : begin + len(text)] = text
    return [*lines, f"{'':>8} +{rule}", f"{'':>8}  {''.join(names).rstrip()}"]
