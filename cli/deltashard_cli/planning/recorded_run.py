"""Size, saves and failures of a run, computed from its log entries. Pure.

Failures are the counts that the run's decider recorded in its commits; without a decider they are counted here by the
same rule. Times are by the writers' clocks, from the start of an attempt to its last checkpoint.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from deltashard_checkpoint.deciding import cost, record
from deltashard_checkpoint.deciding.cost import KEY, BadProfile, Profile
from deltashard_checkpoint.deciding.evidence import NONE, Evidence
from deltashard_checkpoint.deciding.record import Record
from deltashard_checkpoint.deciding.shutdown_reason import is_shutdown_save
from deltashard_checkpoint.format.row_block import raw_row_bytes
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, Entry, Rewound

RECENT_GAPS = 8
"""Number of newest gaps between saves from which the current interval is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Values from a run's log, in bytes and seconds; None if the log does not contain them."""

    raw_bytes: float
    """Size of the tables and their optimizer state in memory."""
    stored_bytes: float
    checkpoints: int
    now_s: float | None
    """Median time between the newest attempt's last saves."""
    step_s: float | None
    profile: Profile
    cost_s: float | None
    """Cost of a save in trainer seconds, as recorded with the profile."""
    evidence: Evidence


def recorded_run(entries: Iterable[Entry]) -> RecordedRun | None:
    """Summarize log entries, oldest first; return None if they contain no checkpoint."""
    known = list(entries)
    checkpoints = [each for each in known if isinstance(each, Checkpoint)]
    if not checkpoints:
        return None
    between = [
        (after.attempt, after.at_s - before.at_s, after.step - before.step)
        for before, after in pairwise(checkpoints)
        if before.attempt == after.attempt and after.at_s > before.at_s
    ]
    recent = [seconds for attempt, seconds, _ in between if attempt == between[-1][0]][-RECENT_GAPS:]
    steps = [seconds / count for _, seconds, count in between if count > 0]
    measured = _measured(checkpoints)
    return RecordedRun(
        raw_bytes=float(
            sum(each.rows * raw_row_bytes(each, each.columns) for each in checkpoints[-1].tables)
        ),
        stored_bytes=statistics.fmean(each.stored_bytes for each in checkpoints),
        checkpoints=len(checkpoints),
        now_s=statistics.median(recent) if recent else None,
        step_s=measured.profile.step_s or (statistics.median(steps) if steps else None),
        profile=measured.profile,
        cost_s=measured.cost_s,
        evidence=_failures(known),
    )


def _measured(checkpoints: Sequence[Checkpoint]) -> Record:
    """Return the newest readable profile, with its choice if that is readable, too."""
    for each in reversed(checkpoints):
        if KEY in each.metadata:
            with suppress(BadProfile):
                return _record(each) or Record(profile=cost.parse_metadata(each.metadata[KEY]))
    return Record(profile=Profile())


def _record(checkpoint: Checkpoint) -> Record | None:
    with suppress(BadProfile):
        return record.parse_metadata(checkpoint.metadata.get(KEY, ""))
    return None


def _failures(entries: Sequence[Entry]) -> Evidence:
    """Return the evidence of failures, decayed as in a live run.

    A resuming attempt is an incident if there was a commit since the last incident: a crash loop counts once. The
    incident lost steps unless the newest checkpoint was a shutdown save or a user rewound the run. A decider's record
    replaces the count up to its commit. Exposure is the committed training time.
    """
    evidence = NONE
    newest_s: float | None = None
    lossy: bool | None = None  # whether a restart now would lose steps; None: no commit since the last one
    for each in entries:
        match each:
            case AttemptOpened():
                if lossy is not None and each.resumes_from is not None:
                    evidence = evidence.with_incident(lossy=lossy)
                    lossy = None
                newest_s = each.at_s
            case Checkpoint():
                passed_s = 0.0 if newest_s is None else max(each.at_s - newest_s, 0.0)
                newest_s = each.at_s if newest_s is None else max(newest_s, each.at_s)
                found = _record(each)
                evidence = evidence.after_training(passed_s) if found is None else found.evidence
                lossy = not (is_shutdown_save(each) if found is None else found.closing)
            case Rewound():
                lossy = None if lossy is None else False
            case _:
                pass
    return evidence
