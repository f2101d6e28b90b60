"""What a run's log says of its model, its saves and its failures. Pure: from entries to numbers.

Failures are those that the run's own decider counted, as its commits say. Where none was at work they are counted here,
by its rule. Time is that of the writers' clocks, from an attempt's beginning to its last checkpoint.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from deltashard_checkpoint.deciding import cost, record
from deltashard_checkpoint.deciding.cost import KEY, BadProfile, Profile
from deltashard_checkpoint.deciding.ending import ends
from deltashard_checkpoint.deciding.evidence import NONE, Evidence
from deltashard_checkpoint.deciding.record import Record
from deltashard_checkpoint.format.row_block import raw_row_bytes, weight_row_bytes
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, Entry, Rewound
from deltashard_checkpoint.vocabulary import ENCODINGS

LAST = 8
"""Gaps between saves that tell how often a run saves now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What was found; None where the log does not say it."""

    rows: int
    columns: int
    """A row's values, on average over all tables."""
    state_bytes: int
    dense_bytes: float
    ranks: int
    checkpoints: int
    attempts: int
    interval_s: float | None
    """Median between two saves of one attempt."""
    recent_s: float | None
    """The same of the newest attempt's last ones."""
    held_s: float | None
    """The interval in force, as the newest commit says; None: none was chosen, or it is advice."""
    step_s: float | None
    encoding: str | None
    """The one of the fewest bits."""
    touched: tuple[tuple[float, float], ...]
    """(seconds, share of rows) of each increment."""
    stall_s: float | None
    stored_bytes: float
    """Of a checkpoint, on average."""
    profile: Profile
    cost_s: float | None
    """Of a save, in trainer seconds, as the profile's commit has it."""
    evidence: Evidence
    gaps: tuple[float, ...]
    """Trained seconds between failures that lost steps."""

    @property
    def now_s(self) -> float | None:
        """How often it saves now, as far as the log tells."""
        return self.recent_s if self.held_s is None else self.held_s


def recorded_run(entries: Iterable[Entry]) -> RecordedRun | None:
    """The run of these log entries, oldest first; None while nothing is committed."""
    known = list(entries)
    checkpoints = [each for each in known if isinstance(each, Checkpoint)]
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    rows = sum(table.rows for table in newest.tables)
    values = sum(table.rows * table.columns for table in newest.tables)
    of_tables = sum(table.rows * raw_row_bytes(table, table.columns) for table in newest.tables)
    state = of_tables - sum(table.rows * weight_row_bytes(table, table.columns) for table in newest.tables)
    baselines = [each.raw_bytes - of_tables for each in checkpoints if each.baseline and each.rows >= rows]
    at = {each.seq: each.at_s for each in checkpoints}
    touched = [
        (each.at_s - at[each.covered[0]], each.rows / max(rows, 1))
        for each in checkpoints
        if len(each.covers) == len(each.covered) == 1 and each.covered[0] in at
    ]
    between = [
        (after.attempt, after.at_s - before.at_s, after.step - before.step)
        for before, after in pairwise(checkpoints)
        if before.attempt == after.attempt and after.at_s > before.at_s
    ]
    steps = [seconds / count for _, seconds, count in between if count > 0]
    recent = [seconds for attempt, seconds, _ in between if attempt == between[-1][0]][-LAST:]
    stalls = [each.stall_s for each in checkpoints if each.stall_s > 0]
    encodings = [name for name in newest.encodings if name in ENCODINGS]
    interval_s = statistics.median(seconds for _, seconds, _ in between) if between else None
    evidence, gaps = _failures(known, interval_s or 0.0)
    measured = _measured(checkpoints)
    return RecordedRun(
        rows=rows,
        columns=round(values / max(rows, 1)),
        state_bytes=round(state / max(rows, 1)),
        dense_bytes=float(max(baselines[-1], 0)) if baselines else 0.0,
        ranks=newest.world_size,
        checkpoints=len(checkpoints),
        attempts=sum(isinstance(each, AttemptOpened) for each in known),
        interval_s=interval_s,
        recent_s=statistics.median(recent) if recent else None,
        held_s=_held_s(newest),
        step_s=statistics.median(steps) if steps else None,
        encoding=min(encodings, key=lambda name: ENCODINGS[name].bits) if encodings else None,
        touched=tuple((seconds, share) for seconds, share in touched if seconds > 0 and 0 < share < 1),
        stall_s=statistics.fmean(stalls) if stalls else None,
        stored_bytes=statistics.fmean(each.stored_bytes for each in checkpoints),
        profile=measured.profile,
        cost_s=measured.cost_s,
        evidence=evidence,
        gaps=gaps,
    )


def _measured(checkpoints: Sequence[Checkpoint]) -> Record:
    """The newest profile that can be read, with the choice beside it if that can be read, too."""
    for each in reversed(checkpoints):
        if KEY in each.metadata:
            with suppress(BadProfile):
                return _record(each) or Record(profile=cost.recorded(each.metadata[KEY]))
    return Record(profile=Profile())


def _record(checkpoint: Checkpoint) -> Record | None:
    """What the run's decider wrote into this commit; None: nothing, or nothing that can be read."""
    with suppress(BadProfile):
        return record.recorded(checkpoint.metadata.get(KEY, ""))
    return None


def _held_s(newest: Checkpoint) -> float | None:
    found = _record(newest)
    if found is None or found.held is None or not found.applied:
        return None
    return found.held.basis.seconds


def _failures(entries: Sequence[Entry], interval_s: float) -> tuple[Evidence, tuple[float, ...]]:
    """What was seen of failures, faded as a run fades it, and what was trained between those that lost steps.

    An attempt that resumes is an incident if something was committed since the last one: a crash loop is one. Steps
    were lost with it unless the newest checkpoint was asked for by its trainer's end, or a person rewound the run. A
    decider's own count stands over what was counted up to its commit.

    Exposure is what was committed. A gap ends half an interval later, where a failure lies on average: at the
    checkpoint itself nothing would be lost.
    """
    evidence, gaps, trained_s = NONE, [], 0.0
    newest_s: float | None = None
    lossy: bool | None = None  # what a restart would be now; None: nothing was committed since the last one
    for each in entries:
        match each:
            case AttemptOpened():
                if lossy is not None and each.resumes_from is not None:
                    evidence = evidence.incident(lossy=lossy)
                    if lossy:
                        gaps.append(trained_s + interval_s / 2)
                        trained_s = 0.0
                    lossy = None
                newest_s = each.at_s
            case Checkpoint():
                passed_s = 0.0 if newest_s is None else max(each.at_s - newest_s, 0.0)
                newest_s = each.at_s if newest_s is None else max(newest_s, each.at_s)
                trained_s += passed_s
                found = _record(each)
                evidence = evidence.trained(passed_s) if found is None else found.evidence
                lossy = not (ends(each) if found is None else found.closing)
            case Rewound():
                lossy = None if lossy is None else False
            case _:
                pass
    return evidence, tuple(gap for gap in gaps if gap > 0)
