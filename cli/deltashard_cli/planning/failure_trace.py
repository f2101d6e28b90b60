"""Failures of the past from a CSV file: what a run may expect. Pure.

One failure a line. Without a header a line is the time of a failure; with one, columns by name, others ignored:

    start     when training stopped (needed)
    end       when it went on; empty: at once
    cause     a word; `evicted`, `drained`, `preempted`, `suspended` and `maintenance` lose no steps, since a checkpoint
              is saved first: they count as restores, not as failures

A time is a number of seconds (since whenever), or a date as ISO 8601 has it (UTC where it names no zone). Empty lines
and lines that begin with # are passed over. What starts during another failure, or within a minute of its start, is the
same incident: pods that are lost together are one.
"""

from __future__ import annotations

import csv
import datetime as dt
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deltashard_checkpoint.errors import UserError

GRACEFUL = frozenset({"evicted", "drained", "preempted", "suspended", "maintenance"})
TOGETHER_S = 60.0
MOST_LINES = 1_000_000
_LINE = 120


class BadTrace(UserError):
    """A trace that cannot be read; it says which line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption. Seconds."""

    start_s: float
    end_s: float
    lossy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTrace:
    """What a trace says."""

    incidents: tuple[Incident, ...]
    exposure_s: float
    """Trained seconds that it spans."""
    lossy: int
    """Failures within them that lost steps."""
    restores: int
    """Interruptions within them."""
    gaps: tuple[float, ...]
    """Trained seconds between failures that lost steps."""
    down_s: float | None
    """Mean from start to end of those that say when they ended."""


def failure_trace(lines: Iterable[str], *, where: str, span_s: float | None = None) -> FailureTrace:
    """The trace in a file's lines; raises `BadTrace`.

    `span_s`: how long was looked at. Without it the trace begins with its first failure, which then only marks the
    beginning.
    """
    incidents = _merged(_rows(lines, where))
    if not incidents:
        raise BadTrace("no failure in it", where=where, remedy="one time a line, or columns start,end,cause")
    downs = [each.end_s - each.start_s for each in incidents if each.end_s > each.start_s]
    counted = incidents if span_s is not None else incidents[1:]
    if span_s is None:
        if len(incidents) < 2:
            raise BadTrace(
                "a single failure says nothing of how often they come",
                where=where,
                remedy="say how long was looked at: --trace-span 30d",
            )
        exposure_s = sum(max(each.start_s - before.end_s, 0.0) for before, each in pairwise(incidents))
    else:
        exposure_s = span_s - sum(downs)
        if incidents[-1].start_s - incidents[0].start_s > span_s:
            raise BadTrace(
                "its failures lie further apart than the time that was looked at",
                where=where,
                remedy="a longer --trace-span",
            )
    if exposure_s <= 0:
        raise BadTrace(
            "no time of training lies between its failures", where=where, remedy="are times in seconds?"
        )
    return FailureTrace(
        incidents=incidents,
        exposure_s=exposure_s,
        lossy=sum(each.lossy for each in counted),
        restores=len(counted),
        gaps=_gaps(incidents),
        down_s=sum(downs) / len(downs) if downs else None,
    )


def _gaps(incidents: Sequence[Incident]) -> tuple[float, ...]:
    """Graceful interruptions pause training, and end no gap."""
    found: list[float] = []
    trained_s = 0.0
    for before, each in pairwise(incidents):
        trained_s += each.start_s - before.end_s
        if each.lossy:
            found.append(trained_s)
            trained_s = 0.0
    return tuple(gap for gap in found if gap > 0)


def _merged(rows: Sequence[Incident]) -> tuple[Incident, ...]:
    found: list[Incident] = []
    for row in sorted(rows, key=lambda each: each.start_s):
        if found and row.start_s < max(found[-1].end_s, found[-1].start_s + TOGETHER_S):
            last = found[-1]
            found[-1] = Incident(
                start_s=last.start_s, end_s=max(last.end_s, row.end_s), lossy=last.lossy or row.lossy
            )
        else:
            found.append(row)
    return tuple(found)


def _rows(lines: Iterable[str], where: str) -> list[Incident]:
    columns: dict[str, int] | None = None
    dated: bool | None = None
    found: list[Incident] = []
    for at, line in enumerate(lines, 1):
        here = f"{where}, line {at}"
        if at > MOST_LINES:
            raise BadTrace(f"more than {MOST_LINES:,} lines", where=where, remedy="a shorter trace")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise BadTrace(f"no CSV: {error}", where=here, remedy="quotes in pairs") from None
        if columns is None:
            names = [cell.lower() for cell in cells]
            if "start" in names:
                columns = {name: place for place, name in enumerate(names)}
                continue
            columns = {"start": 0}
            if len(cells) > 1:
                raise BadTrace(
                    f"{len(cells)} columns without names: {line.strip()[:_LINE]!r}",
                    where=here,
                    remedy="begin with a header such as start,end,cause",
                )
        start, end, cause = (
            cells[columns[name]] if name in columns and columns[name] < len(cells) else ""
            for name in ("start", "end", "cause")
        )
        start_s, start_dated = _time(start, "start", here)
        end_s, end_dated = _time(end, "end", here) if end else (start_s, start_dated)
        if start_dated != end_dated or dated not in {None, start_dated}:
            raise BadTrace("dates and seconds in one file", where=here, remedy="one of them for all times")
        if end_s < start_s:
            raise BadTrace(f"ends before it starts: {line.strip()[:_LINE]!r}", where=here, remedy="start,end")
        dated = start_dated
        found.append(Incident(start_s=start_s, end_s=end_s, lossy=cause.lower() not in GRACEFUL))
    return found


def _time(text: str, name: str, here: str) -> tuple[float, bool]:
    """(seconds, whether it was a date)."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        if math.isfinite(value):
            return value, False
    try:
        date = dt.datetime.fromisoformat(text)
    except ValueError:
        raise BadTrace(
            f"{name} is no time: {text[:_LINE]!r}" if text else f"{name} is empty",
            where=here,
            remedy="seconds, or a date such as 2024-05-01T12:30:00Z",
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=dt.UTC)
    return date.timestamp(), True
