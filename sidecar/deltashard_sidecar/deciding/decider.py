"""The one who decides how often this run saves: rank 0's sidecar. A thin holder; the rules stand beside it, pure.

It hears of a trainer's attempt, of each save's begin and end, and looks at rank 0's control line once a tick; it is
asked for the timers in force, for what rides in a commit, and for what people are told. It calls nobody. What is not
rank 0's sidecar never hears of an attempt, and decides nothing.

    begin of a save     the control line stands still: (step that is cut, when it ended)
    its commit          stall (of the slowest rank), seconds to durable, slowdown while rows were copied ahead
    the first step that ended after it     what the steps between took beyond quiet ones: the save's cost is complete

Only saves of a timer are measured: who asks for one mostly waits for it, and an end has no step after it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from deltashard_checkpoint.deciding.cost import KEY, MAX_TEXT, Measure, Profile
from deltashard_checkpoint.deciding.ending import ends
from deltashard_checkpoint.deciding.evidence import NONE, Evidence, Expected, Rates, rates
from deltashard_checkpoint.deciding.interval import Situation, failing_apart
from deltashard_checkpoint.deciding.record import Held, Record, cost_of, recorded
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import LINEAGE_KEY
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.deciding.choice import CAUSES, Choice, capped, choose, terms_of
from deltashard_sidecar.deciding.history import Past, follows_rewind, past, without_checkpoint
from deltashard_sidecar.deciding.place import key_of, place
from deltashard_sidecar.deciding.step_meter import Reading, StepMeter, lost_s
from deltashard_sidecar.policy import changed, policy_of
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

MEMORY = 40
"""Saves that a mean weighs at most: a cost that changes is followed within about as many."""
PHASE_SHARE = 0.1
"""By so much of an interval, either way, an attempt's first save is off: runs that start together drift apart."""
PREPARED_S = 60.0
"""Rows are copied ahead for so long at most; without a cut until then none came of it."""
LONGEST_GAP_S = 86400.0
"""Between two trainers, beyond which nobody was waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A save that began."""

    cut: int
    reading: Reading
    """The step that is cut, and when it ended."""
    timed: bool
    """Whether the timer wanted it: only then it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What is known of a save at its commit. Seconds."""

    stall_s: float
    """Of the slowest rank."""
    slower_s: float
    """By so much steps took longer while rows were copied ahead of the cut."""
    durable_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An attempt that begins, or that is found under way."""

    run: str
    attempt: int
    world_size: int
    ranks_here: int
    """Trainers of this pod."""
    reading: Reading
    """The step that the attempt begins after, and when it was asked for; of one under way, as the line shows."""
    resumed: bool = False
    """A trainer came back to a checkpoint: an incident. False where one goes on in the middle of its attempt."""
    step_seen: int = 0
    """Last step of the trainer before, if this arena saw it."""

    @property
    def pods(self) -> int:
        """Of the run, when all have as many trainers as this one."""
        return -(-self.world_size // max(1, self.ranks_here))


class Decider:
    """Profile, evidence and the choice in force. Thread-safe; its lock is the last of all."""

    def __init__(
        self,
        settings: Settings,
        *,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: Unix seconds."""
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._place = place(settings.profile_key)
        self._lock = threading.Lock()
        self._terms = terms_of(policy_of(settings))
        self._opening: Opening | None = None
        self._meter = StepMeter()
        self._profile = Profile()
        self._past = Past()
        self._evidence = NONE
        self._choice: Choice | None = None
        self._held: Held | None = None
        self._begin: Begin | None = None
        self._cost: Cost | None = None
        self._ended_s: float | None = None
        """When the save that began ended, Unix seconds; the step in which that was is over later."""
        self._disturbed_s = -math.inf
        """When rows began to be copied ahead of a cut."""
        self._restoring = False
        self._left_s: float | None = None
        """When the last trainer went without a word."""
        self._committed = True
        """Whether something was committed since the last incident: a crash loop is one."""
        self._doublings: int | None = None
        """Of the interval's cap, see `capped`; None: the attempt before had a checkpoint."""
        self._looked_at: tuple[float, int] | None = None
        """The timers that were chosen at the last look; None: none were."""
        self._partial = False
        self._left_steps = math.inf
        self._saves = 0
        for cause in CAUSES:
            metrics.decided.labels(cause)

    # What holds.

    def over(self, policy: pb.Policy) -> pb.Policy:
        """`policy` with the timers that are chosen."""
        with self._lock:
            if self._choice is None or not self._terms.applied:
                return policy
            return changed(policy, every_s=self._choice.every_s, every_steps=self._choice.every_steps)

    def phase(self) -> float:
        """By which share of the interval the attempt's first save is off, -0.1 to 0.1; 0 where nothing is chosen."""
        with self._lock:
            opening, terms = self._opening, self._terms
            if self._choice is None or not terms.applied or opening is None:
                return 0.0
        digest = hashlib.sha256(f"{opening.run}\0{opening.attempt}".encode()).digest()
        phase = PHASE_SHARE * (2 * int.from_bytes(digest[:8]) / (1 << 64) - 1)
        # What may be lost at most was promised.
        return -abs(phase) if terms.goal.aim == "lost-work" else phase

    def text(self, *, closing: bool) -> str | None:
        """What rides in a commit that begins now; `closing`: the trainer's end asked for it. None: nothing does."""
        with self._lock:
            if self._choice is None or not self._terms.applied:
                return None
            record = Record(
                profile=self._profile,
                held=self._held,
                evidence=self._seen(),
                closing=closing,
            )
        text = record.text()
        return text if len(text) <= MAX_TEXT else None

    # What it hears.

    def governed(self, policy: pb.Policy) -> None:
        with self._lock:
            self._terms = terms_of(policy)
            self._decide()

    def opened(self, opening: Opening, state: RunState) -> None:
        """A trainer of rank 0 begins an attempt, or goes on in one; `state`: the log as it stands."""
        key = key_of(self._place, opening.world_size)
        with self._lock:
            before, self._opening = self._opening, opening
            newest, attempt = state.newest(), state.attempts.get(opening.attempt)
            came_back = opening.resumed
            # A lower attempt: the store was emptied, and a run of this name begins anew.
            if before is None or before.run != opening.run or before.attempt > opening.attempt:
                self._profile, self._held, self._past, self._evidence = Profile(key=key), None, Past(), NONE
                # Its coming back was counted by a process that ended before it could commit so.
                came_back |= (
                    attempt is not None and attempt.resumes_from is not None and attempt.last_seq is None
                )
                self._adopt(state, key, came_back=came_back)
                self._committed = True
            elif self._profile.key != key:
                self._profile, self._held = Profile(key=key), None
            self._begin, self._left_steps = None, math.inf
            self._meter = self._meter.began(None)
            self._restoring = opening.resumed
            empty = without_checkpoint(state, before=opening.attempt)
            commits = sum(1 for each in state.checkpoints.values() if each.attempt == opening.attempt)
            self._doublings = commits - (empty - 1) if empty else None
            self._partial = newest is not None and LINEAGE_KEY in newest.metadata
            if came_back and self._committed and newest is not None:
                self._committed = False
                lossy = not _closing(newest.metadata.get(KEY), ends(newest))
                if opening.step_seen:
                    lossy = opening.step_seen > newest.step
                lossy &= not follows_rewind(state, opening.attempt)
                self._evidence = self._evidence.incident(lossy=lossy)
            self._decide()

    def _adopt(self, state: RunState, key: str, *, came_back: bool) -> None:
        """Go on from what the newest commit says, or from what the log does."""
        assert self._opening is not None
        newest = state.newest()
        # A sidecar's first commit says nothing where its log could not be read before.
        text = None if newest is None else state.said(KEY, newest)
        if newest is None or text is None:
            # The last attempt's end is counted where it is seen: by the trainer that comes back.
            last = None if newest is None else newest.attempt
            goes_on = came_back or last == self._opening.attempt
            self._past = past(state, open_attempt=last if goes_on else None)
            return
        try:
            record = recorded(text)
        except UserError as error:
            self._log.warning("profile.unreadable", **explain(error))
            return
        self._evidence = record.evidence
        if record.profile.key == key:
            self._profile, self._held = record.profile, record.held
            self._log.info("profile.adopted", saves=record.profile.save.n, seq=newest.seq)
        else:
            self._log.info("profile.of_another_place", theirs=record.profile.key, ours=key)

    def attached(self, ranks_here: int) -> None:
        """So many ranks are attached now: how many pods the run has follows from it."""
        with self._lock:
            opening = self._opening
            if opening is not None and opening.ranks_here < ranks_here <= opening.world_size:
                self._opening = replace(opening, ranks_here=ranks_here)
                self._decide()

    def came(self) -> None:
        with self._lock:
            left_s, self._left_s = self._left_s, None
            if left_s is not None and 0 <= (gap_s := self._clock() - left_s) <= LONGEST_GAP_S:
                self._profile = replace(self._profile, reschedule=_sampled(self._profile.reschedule, gap_s))

    def gone(self) -> None:
        """Rank 0's trainer went away without a word."""
        with self._lock:
            self._left_s = self._clock()
            self._begin = None

    def prepares(self) -> None:
        """Rows are copied ahead of a cut from now on: steps are not quiet."""
        with self._lock:
            self._disturbed_s = self._clock()

    def save_begins(
        self, cut: int, reading: Reading, *, planned_steps: int, partial: bool, timed: bool
    ) -> None:
        """A save of rank 0 begins at the step that was read; `timed`: the timer wanted it."""
        with self._lock:
            self._begin = Begin(cut=cut, reading=reading, timed=timed)
            self._cost = self._ended_s = None
            self._left_steps = planned_steps - reading.step if planned_steps > reading.step else math.inf
            self._partial = partial

    def save_failed(self, cut: int) -> None:
        """It will never commit, and is no measurement."""
        with self._lock:
            if self._begin is not None and self._begin.cut == cut:
                self._ended_s = self._clock()

    def committed(self, cut: int, cost: Cost) -> None:
        """A save of rank 0 is durable. What it cost is known once the trainer has ended a step after it."""
        with self._lock:
            self._committed = True
            if self._doublings is not None:
                self._doublings += 1
                self._decide()
            if self._begin is not None and self._begin.cut == cut:
                self._ended_s = self._clock()
                if self._begin.timed and math.isfinite(cost.stall_s) and cost.stall_s >= 0:
                    self._cost = cost

    def look(self, reading: Reading) -> bool:
        """One look at rank 0's control line, once a tick; True when the timers are others than at the look before."""
        with self._lock:
            self._read(reading)
            before, self._looked_at = self._looked_at, self._timers()
            return before != self._looked_at

    def _read(self, reading: Reading) -> None:
        opening = self._opening
        if opening is None or reading.step <= opening.reading.step:
            return  # what the line says of time is not this attempt's yet
        prepares = self._clock() - self._disturbed_s < PREPARED_S
        before_s = self._meter.trained_s
        self._meter = self._meter.read(reading, quiet=self._begin is None and not prepares)
        if (trained_s := self._meter.trained_s - before_s) > 0:
            self._evidence = self._evidence.trained(trained_s)
            self._metrics.trained.inc(trained_s)
        if self._meter.step_s:
            self._profile = replace(self._profile, step_s=_short(self._meter.step_s))
        self._restored(opening, reading)
        begin, cost = self._begin, self._cost
        if begin is None or self._ended_s is None or reading.at_s <= self._ended_s:
            return
        self._begin, self._disturbed_s = None, -math.inf
        if cost is None or reading.step <= begin.reading.step:
            return
        self._measured(begin, cost, reading)
        self._decide()

    def _restored(self, opening: Opening, reading: Reading) -> None:
        """The first step after a restore: what it took from open to there, without the steps seen since."""
        if not self._restoring:
            return
        self._restoring = False
        since = (reading.step - opening.reading.step - 1) * self._profile.step_s
        seconds = reading.at_s - opening.reading.at_s - since
        if seconds > 0:
            self._profile = replace(self._profile, restore=_sampled(self._profile.restore, seconds))

    def _measured(self, begin: Begin, cost: Cost, reading: Reading) -> None:
        profile = self._profile
        profile = replace(
            profile,
            stall=_sampled(profile.stall, cost.stall_s),
            durable=_sampled(profile.durable, cost.durable_s),
        )
        slower_s = cost.slower_s if math.isfinite(cost.slower_s) else 0.0
        slower_s = min(max(slower_s, 0.0), PREPARED_S)
        lost: float | None = cost.stall_s
        if profile.step_s > 0:
            # With the stall, which lies between the step that was cut and the next one.
            lost = lost_s(
                begin.reading, reading, step_s=profile.step_s, in_flight_s=max(cost.durable_s, cost.stall_s)
            )
        if lost is not None:
            profile = replace(profile, save=_sampled(profile.save, lost + slower_s))
            self._saves += 1
        self._profile = profile

    # Deciding; the lock is held.

    def _seen(self) -> Evidence:
        return self._past.evidence(self._profile.step_s).plus(self._evidence)

    def _rates(self) -> Rates:
        opening = self._opening
        return rates(self._seen(), pods=1 if opening is None else opening.pods)

    def _decide(self) -> None:
        """The choice anew. Whatever goes wrong with it costs the choice, and leaves the timers as they are said."""
        try:
            self._choice = self._chosen()
        except Exception as error:  # noqa: BLE001 - saves and training go on without a decision
            self._log.error("decider.unexpected", exc_info=error)
            self._choice = None
        self._show()

    def _timers(self) -> tuple[float, int] | None:
        if self._choice is None or not self._terms.applied:
            return None
        return self._choice.every_s, self._choice.every_steps

    def _chosen(self) -> Choice | None:
        terms, opening = self._terms, self._opening
        if opening is None:
            return None
        profile, seen = self._profile, self._seen()
        now = self._situation(opening)
        evidence = (
            f"{self._saves} saves measured by this sidecar, {profile.save.n} in the mean; {seen.lossy:.3g} lossy "
            f"failures and {seen.restores:.3g} restores in {seen.exposure_s / 3600:.3g} h of training"
        )
        choice = choose(terms, profile, now, self._held, evidence)
        if choice.cause is not None and terms.applied:
            self._profile = profile.restarted() if self._held is not None else profile
            self._metrics.decided.labels(choice.cause).inc()
            self._log.info(
                "decided",
                subject="interval",
                goal=terms.shown,
                interval=choice.decision.would,
                before="" if self._held is None else f"every {self._held.basis.seconds:.4g} s",
                cause=choice.cause,
                why=choice.decision.why,
                bound=choice.decision.bound,
                unreachable=choice.decision.unreachable,
                evidence=evidence,
            )
        self._held = choice.held
        return choice if self._doublings is None else capped(choice, terms, self._doublings)

    def _situation(self, opening: Opening) -> Situation:
        profile = self._profile
        return Situation(
            cost_s=cost_of(profile, self._held),
            durable_s=profile.durable.p95,
            step_s=profile.step_s,
            mtbf_s=self._rates().mtbf_s,
            shards=failing_apart(opening.world_size, opening.pods),
            partial=self._partial,
            left_s=self._left_steps * profile.step_s if profile.step_s else math.inf,
            user=self._terms.policy,
        )

    # What people are told.

    def _show(self) -> None:
        metrics, choice = self._metrics, self._choice
        timers = self._terms.policy if choice is None else choice
        chosen = None if choice is None else choice.held
        metrics.interval.labels("in_force").set(timers.every_s)
        metrics.interval.labels("chosen").set(0.0 if chosen is None else chosen.basis.seconds)
        metrics.cost.set(self._profile.save.mean)
        metrics.mtbf.set(0.0 if self._opening is None else self._rates().mtbf_s)

    def measured(self) -> fleet.Measured | None:
        """For the heartbeat; None: another pod decides."""
        with self._lock:
            if self._opening is None:
                return None
            profile = self._profile
            cost_s = cost_of(profile, self._held)
            return fleet.Measured(
                step_s=profile.step_s,
                stall_s=profile.stall.mean,
                slowdown_s=max(0.0, cost_s - profile.stall.mean),
                cost_s=cost_s,
                durable_s=profile.durable.p95,
                restore_s=profile.restore.mean,
                reschedule_s=profile.reschedule.mean,
                saves=profile.stall.n,
                mtbf_s=self._rates().mtbf_s,
                trained_s=self._meter.trained_s,
            )

    def expected(self) -> Expected:
        """What is believed of failures to come, for other decisions."""
        with self._lock:
            return Expected(
                rates=self._rates(), trained_s=self._seen().exposure_s, step_s=self._profile.step_s
            )

    def decisions(self) -> list[fleet.Decision]:
        """What holds, what would, and why."""
        with self._lock:
            return [] if self._choice is None else [self._choice.decision]


def _sampled(measure: Measure, seconds: float) -> Measure:
    return measure.sampled(_short(seconds)).within(MEMORY)


def _short(seconds: float) -> float:
    """As many digits as a measurement has: it is written into every commit."""
    return float(f"{seconds:.4g}")


def _closing(text: str | None, otherwise: bool) -> bool:
    """Whether a commit's trainer had asked for it by its end: as its decider wrote, otherwise as its entry tells."""
    if text is not None:
        with suppress(UserError):
            return recorded(text).closing
    return otherwise
