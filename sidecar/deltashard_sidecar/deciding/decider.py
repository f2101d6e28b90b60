"""Decides how often the run saves, in rank 0's sidecar: holds the newest measurements and the choice in force.

`measurements` computes the effect of each event and `choice.decide` the interval; both are pure. The decider calls no
other part. A sidecar without rank 0 opens no attempt and decides nothing.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from deltashard_checkpoint.deciding.cost import KEY, MAX_TEXT, Profile
from deltashard_checkpoint.deciding.evidence import NONE, RunEstimate, rates
from deltashard_checkpoint.deciding.record import Record, parse_metadata
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.process import version
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.deciding import measurements
from deltashard_sidecar.deciding.choice import Choice, apply_choice, decide
from deltashard_sidecar.deciding.measurements import (
    Cost,
    MeasuredSave,
    Measurements,
    Opening,
    needs_new_choice,
)
from deltashard_sidecar.deciding.step_meter import Reading
from deltashard_sidecar.policy import policy_of
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

MAX_KEY = 200  # characters of a profile's key, which is part of every commit


class Decider:
    """Measurements and the choice in force. Thread-safe; its lock is the last in the order."""

    def __init__(
        self, settings: Settings, *, metrics: Metrics, log: Logger, clock: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._environment = f"{settings.profile_key}, {os.cpu_count()} x {platform.machine()}".lstrip(", ")
        self._lock = threading.Lock()
        self._policy = policy_of(settings)
        self._measurements: Measurements | None = None
        self._choice: Choice | None = None
        self._last_policy = self._policy

    def apply_to(self, policy: pb.Policy) -> pb.Policy:
        choice = self._choice
        return policy if choice is None else choice.apply_to(policy)

    def text(self, *, closing: bool) -> str | None:
        """Return the record for a commit that begins now, or None; `closing`: the trainer is shutting down."""
        with self._lock:
            known, choice = self._measurements, self._choice
        if known is None or choice is None or not choice.applied:
            return None
        text = known.record(closing=closing).text()
        return text if len(text) <= MAX_TEXT else None

    def measured(self) -> fleet.Measured | None:
        if (known := self._measurements) is None:
            return None
        profile, cost_s = known.profile, known.cost_s
        return fleet.Measured(
            step_s=profile.step_s,
            stall_s=profile.stall.mean,
            slowdown_s=max(0.0, cost_s - profile.stall.mean),
            cost_s=cost_s,
            durable_s=profile.durable.p95,
            restore_s=profile.restore.mean,
            reschedule_s=profile.reschedule.mean,
            saves=profile.stall.n,
            mtbf_s=known.rates.mtbf_s,
            trained_s=known.meter.trained_s,
        )

    def expected(self) -> RunEstimate:
        if (known := self._measurements) is None:
            return RunEstimate(rates=rates(NONE, pods=1), trained_s=0.0, step_s=0.0)
        return RunEstimate(
            rates=known.rates, trained_s=known.evidence.exposure_s, step_s=known.profile.step_s
        )

    def decisions(self) -> list[fleet.Decision]:
        choice = self._choice
        return [] if choice is None else [choice.decision]

    def set_policy(self, policy: pb.Policy) -> None:
        with self._lock:
            self._policy = policy
            self._decide()

    def opened(self, opening: Opening, state: RunState) -> None:
        # The environment comes last, so a long key loses only its end.
        key = f"world size {opening.world_size}, {version()}, {self._environment}"[:MAX_KEY]
        with self._lock:
            before = self._measurements
            if before is not None and before.opening.attempt > opening.attempt:
                before = None  # the store was emptied, and a new run of this name begins
            record = self._record(state, key) if before is None else None
            self._measurements = measurements.opened(before, opening, state, key=key, record=record)
            self._decide()

    def _record(self, state: RunState, key: str) -> Record | None:
        """Return the newest commit's record, without its profile if that is of another environment; None: no record."""
        newest = state.newest()
        # A sidecar's first commit has no record if its log could not be read before.
        text = None if newest is None else state.inherited_metadata(KEY, newest)
        if newest is None or text is None:
            return None
        try:
            record = parse_metadata(text)
        except UserError as error:
            self._log.warning("profile.unreadable", **explain(error))
            return None
        if record.profile.key == key:
            self._log.info("profile.adopted", saves=record.profile.save.n, seq=newest.seq)
            return record
        self._log.info("profile.environment_mismatch", theirs=record.profile.key, ours=key)
        return replace(record, profile=Profile(key=key), held=None)

    def attached(self, ranks_here: int) -> None:
        self._update(lambda known, _: known.attached(ranks_here))

    def trainer_attached(self) -> None:
        self._update(lambda known, now_s: known.trainer_attached(now_s))

    def trainer_lost(self) -> None:
        self._update(lambda known, now_s: replace(known, lost_at_s=now_s, save=None))

    def precopy_started(self) -> None:
        self._update(lambda known, now_s: replace(known, precopy_started_s=now_s))

    def save_started(self, save: MeasuredSave, *, planned_steps: int, partial: bool) -> None:
        self._update(lambda known, _: known.save_started(save, planned_steps=planned_steps, partial=partial))

    def save_ended(self, snapshot_id: int, cost: Cost | None) -> None:
        """Record that a save is durable, or failed (`cost` None)."""
        self._update(lambda known, now_s: known.save_ended(snapshot_id, cost, now_s))

    def observe(self, reading: Reading) -> bool:
        """Process one reading of rank 0's control line; returns whether the timers changed since the last one."""
        self._update(lambda known, now_s: known.read(reading, now_s))
        with self._lock:
            before, self._last_policy = self._last_policy, self.apply_to(self._policy)
            return before != self._last_policy

    def _update(self, change: Callable[[Measurements, float], Measurements]) -> None:
        with self._lock:
            if (before := self._measurements) is None:
                return
            self._measurements = change(before, self._clock())
            if needs_new_choice(before, self._measurements):
                self._decide()

    def _decide(self) -> None:
        """Choose again; the lock is held. After an error there is no choice, and the policy's timers apply."""
        known, choice = self._measurements, None
        try:
            if known is not None:
                choice = decide(known, self._policy)
                self._measurements = apply_choice(choice, known)
                if choice.applied and choice.cause is not None:
                    self._record_choice(choice, choice.cause, known)
        except Exception as error:  # noqa: BLE001 - saves and training continue without a decision
            self._log.error("decider.unexpected", exc_info=error)
            choice = None
        self._choice = choice  # assigned once: others read it without the lock
        metrics, known = self._metrics, self._measurements
        held = None if choice is None else choice.held
        metrics.interval.labels("effective").set(self.apply_to(self._policy).every_s)
        metrics.interval.labels("chosen").set(0.0 if held is None else held.basis.seconds)
        metrics.cost.set(0.0 if known is None else known.profile.save.mean)
        metrics.mtbf.set(0.0 if known is None else known.rates.mtbf_s)

    def _record_choice(self, choice: Choice, cause: str, before: Measurements) -> None:
        self._metrics.decided.labels(cause).inc()
        facts = {
            name: getattr(choice.decision, name)
            for name in ("goal", "why", "bound", "unreachable", "evidence")
        }
        was = "" if before.held is None else f"every {before.held.basis.seconds:.4g} s"
        self._log.info(
            "interval.decided", interval=choice.decision.proposed, before=was, cause=cause, **facts
        )
