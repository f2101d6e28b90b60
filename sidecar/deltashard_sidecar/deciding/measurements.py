"""Measurements of a run in rank 0's sidecar: attempt, cost of saves, failures. Pure: each change returns a new value.

    begin of a save     the control line does not change: (step of the save, time when it ended)
    its commit          stall (of the slowest rank), seconds to durable, slowdown while rows were copied ahead
    first step that ends after it    time of the steps between in excess of quiet ones: the save's cost is complete

Only saves of a timer are measured: the caller of a requested save mostly waits for it, and no step follows a final one.
Failures are counted when a trainer restarts. The counts are part of commits (`record`), so that the next process
continues from them.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

from deltashard_checkpoint.deciding.cost import KEY, Measure, Profile
from deltashard_checkpoint.deciding.evidence import NONE, Evidence, Rates, rates
from deltashard_checkpoint.deciding.record import CurrentChoice, Record, cost_of, parse_metadata
from deltashard_checkpoint.deciding.shutdown_reason import is_shutdown_save
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import LINEAGE_KEY

from deltashard_sidecar.deciding.step_meter import Reading, StepMeter, lost_s

MAX_SAMPLE_WEIGHT = 40  # largest weight of a mean, in saves: a changed cost is followed within about as many
MAX_PRECOPY_S = 60.0  # longest copy ahead of a save; after it without a save the copy counts as abandoned
MAX_RESCHEDULE_S = 86400.0  # longest gap between two trainers that counts as rescheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a save as measured at its commit. Seconds."""

    stall_s: float
    """Of the slowest rank."""
    slowdown_s: float
    """Time that steps took longer while rows were copied ahead of the save."""
    durable_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSave:
    """A save of rank 0, kept until the first step after its end."""

    snapshot_id: int
    started: Reading
    timed: bool
    """Whether a timer triggered it: only such saves are measured."""
    ended_s: float | None = None
    """Unix seconds; the step running at that time ends later."""
    cost: Cost | None = None
    """None: not measured, or not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Start of an attempt, or of its observation by this process."""

    attempt: int
    world_size: int
    ranks_here: int
    reading: Reading
    """Step before the attempt and time of the Open; for an attempt under way, the control line's reading."""
    resumed: bool = False
    """Whether a trainer restarted from a checkpoint, an incident. False where one continues its attempt."""
    step_seen: int = 0

    @property
    def pods(self) -> int:
        """Number of the run's pods, if all have as many trainers as this one."""
        return -(-self.world_size // max(1, self.ranks_here))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of one run, from its log and from this process."""

    opening: Opening
    profile: Profile
    held: CurrentChoice | None = None
    evidence: Evidence = NONE
    meter: StepMeter = field(default_factory=StepMeter)
    saves: int = 0
    save: MeasuredSave | None = None
    precopy_started_s: float = -math.inf
    restoring: bool = False
    lost_at_s: float | None = None
    committed: bool = True
    """Whether a commit followed the last incident: a crash loop counts as one incident."""
    doublings: int | None = None
    """Doublings of the interval's cap (`choice._cap_s`); None: the previous attempt had a checkpoint."""
    partial: bool = False
    left_steps: float = math.inf

    @property
    def rates(self) -> Rates:
        return rates(self.evidence, pods=self.opening.pods)

    @property
    def cost_s(self) -> float:
        return cost_of(self.profile, self.held)

    def record(self, *, closing: bool) -> Record:
        return Record(profile=self.profile, held=self.held, evidence=self.evidence, closing=closing)

    def attached(self, ranks_here: int) -> Measurements:
        """Return the measurements with this number of attached ranks, from which the number of pods follows."""
        if not self.opening.ranks_here < ranks_here <= self.opening.world_size:
            return self
        return replace(self, opening=replace(self.opening, ranks_here=ranks_here))

    def trainer_attached(self, now_s: float) -> Measurements:
        gone = replace(self, lost_at_s=None)
        if self.lost_at_s is None or not 0 <= (gap_s := now_s - self.lost_at_s) <= MAX_RESCHEDULE_S:
            return gone
        reschedule = _add_sample(self.profile.reschedule, gap_s)
        return replace(gone, profile=replace(self.profile, reschedule=reschedule))

    def save_started(self, save: MeasuredSave, *, planned_steps: int, partial: bool) -> Measurements:
        step = save.started.step
        left_steps = planned_steps - step if planned_steps > step else math.inf
        return replace(self, save=save, left_steps=left_steps, partial=partial)

    def save_ended(self, snapshot_id: int, cost: Cost | None, now_s: float) -> Measurements:
        """Record that a save of rank 0 is durable, or failed (`cost` None). The next step completes its cost."""
        now = self
        if cost is not None:
            doublings = None if self.doublings is None else self.doublings + 1
            now = replace(self, committed=True, doublings=doublings)
        if self.save is None or self.save.snapshot_id != snapshot_id:
            return now
        measured = cost is not None and self.save.timed and 0 <= cost.stall_s < math.inf
        return replace(now, save=replace(self.save, ended_s=now_s, cost=cost if measured else None))

    def read(self, reading: Reading, now_s: float) -> Measurements:
        if reading.step <= self.opening.reading.step:
            return self  # the line still shows a time before this attempt
        precopying = now_s - self.precopy_started_s < MAX_PRECOPY_S
        meter = self.meter.read(reading, quiet=self.save is None and not precopying)
        trained_s, profile = meter.trained_s - self.meter.trained_s, self.profile
        if meter.step_s:
            profile = replace(profile, step_s=_round_digits(meter.step_s))
        if self.restoring:
            profile = _with_restore(profile, self.opening.reading, reading)
        now = replace(self, meter=meter, profile=profile, restoring=False)
        if trained_s > 0:
            now = replace(now, evidence=self.evidence.after_training(trained_s))
        save = self.save
        if save is None or save.ended_s is None or reading.at_s <= save.ended_s:
            return now
        now = replace(now, save=None, precopy_started_s=-math.inf)
        return now if save.cost is None else _with_save(now, save.started, save.cost, reading)


def _with_restore(profile: Profile, opened: Reading, reading: Reading) -> Profile:
    seconds = reading.at_s - opened.at_s - (reading.step - opened.step - 1) * profile.step_s
    return replace(profile, restore=_add_sample(profile.restore, seconds)) if seconds > 0 else profile


def _with_save(known: Measurements, started: Reading, cost: Cost, reading: Reading) -> Measurements:
    profile = replace(
        known.profile,
        stall=_add_sample(known.profile.stall, cost.stall_s),
        durable=_add_sample(known.profile.durable, cost.durable_s),
    )
    slowdown_s = min(max(cost.slowdown_s, 0.0), MAX_PRECOPY_S) if math.isfinite(cost.slowdown_s) else 0.0
    lost: float | None = cost.stall_s
    if profile.step_s > 0:
        # Includes the stall, which is between the step of the save and the next one.
        in_flight_s = max(cost.durable_s, cost.stall_s)
        lost = lost_s(started, reading, step_s=profile.step_s, in_flight_s=in_flight_s)
    if lost is None:
        return replace(known, profile=profile)
    profile = replace(profile, save=_add_sample(profile.save, lost + slowdown_s))
    return replace(known, profile=profile, saves=known.saves + 1)


def opened(
    before: Measurements | None, opening: Opening, state: RunState, *, key: str, record: Record | None
) -> Measurements:
    """Return the measurements after rank 0's trainer begins or continues an attempt; `state` is the current log.

    `before` None: this process starts from `record`, the newest commit's record, if there is one. `key` names the
    profile (`Profile.key`).
    """
    is_restart, counted = opening.resumed, before is not None or record is not None
    if before is None:
        # A previous process may have counted the restart and ended before it could commit that.
        attempt = state.attempts.get(opening.attempt)
        is_restart |= attempt is not None and attempt.resumes_from is not None and attempt.last_seq is None
        record = record or Record(profile=Profile(key=key))
        before = Measurements(
            opening=opening, profile=record.profile, held=record.held, evidence=record.evidence
        )
    newest = state.newest()
    same = before.profile.key == key
    empty = without_checkpoint(state, before=opening.attempt)
    commits = sum(1 for each in state.checkpoints.values() if each.attempt == opening.attempt)
    now = replace(
        before,
        opening=opening,
        profile=before.profile if same else Profile(key=key),
        held=before.held if same else None,
        meter=replace(before.meter, last=None),
        save=None,
        left_steps=math.inf,
        restoring=opening.resumed,
        doublings=commits - (empty - 1) if empty else None,
        partial=newest is not None and LINEAGE_KEY in newest.metadata,
    )
    if not is_restart or not counted or not before.committed or newest is None:
        return now
    lossy = not _was_closing(newest.metadata.get(KEY), is_shutdown_save(newest))
    if opening.step_seen:
        lossy = opening.step_seen > newest.step
    lossy &= not follows_rewind(state, opening.attempt)
    return replace(now, committed=False, evidence=now.evidence.with_incident(lossy=lossy))


def follows_rewind(state: RunState, attempt: int) -> bool:
    """Return whether attempt `attempt` directly follows a manual rewind: no failure came before it."""
    before = max((n for n in state.attempts if n < attempt), default=None)
    return before is not None and state.attempts[before].world_size == 0


def without_checkpoint(state: RunState, *, before: int) -> int:
    """Return the number of consecutive attempts up to `before` without a checkpoint, not counting rewinds."""
    real = sorted((n for n, each in state.attempts.items() if n < before and each.world_size), reverse=True)
    return sum(1 for _ in takewhile(lambda n: state.attempts[n].last_seq is None, real))


def needs_new_choice(before: Measurements, after: Measurements) -> bool:
    """Return whether a change may lead to another interval: a measured save, or new pods or doublings."""
    measured = before.save is not None and before.save.cost is not None and after.save is None
    return measured or (before.opening, before.doublings) != (after.opening, after.doublings)


def _add_sample(measure: Measure, seconds: float) -> Measure:
    return measure.with_sample(_round_digits(seconds)).within(MAX_SAMPLE_WEIGHT)


def _round_digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")  # the precision of a measurement, because every commit contains it


def _was_closing(text: str | None, otherwise: bool) -> bool:
    """Return whether a commit was requested by its trainer's shutdown: from its record, else `otherwise`."""
    if text is not None:
        with suppress(UserError):
            return parse_metadata(text).closing
    return otherwise
