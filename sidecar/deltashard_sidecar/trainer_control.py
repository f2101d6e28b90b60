"""What trainers are told to do: when to save, under which policy, and that somebody else trains now.

The half of the sidecar that speaks to its trainers, by two roads: the control line, which `Checkpointer.step()` reads
without a system call, and the notices of Watch. It hears from the timer, from the hook of a pod that stops
(`notify`), and from the controller (`follow`, `save_now`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import UserError
from deltashard_proto.arena_layout import NEVER
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.fleet.activity import Reports
from deltashard_sidecar.fleet.directive import KEY, Directive, InForce, Policy, recorded
from deltashard_sidecar.handoff import Closings
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import Save
from deltashard_sidecar.session import notice as notices
from deltashard_sidecar.session.session import Session, Sessions
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain


class Orders:
    """Sessions, what holds for them, and what they are told; `Sidecar` builds on it."""

    def __init__(
        self, settings: Settings, *, keeper: ArenaKeeper, run: Run, metrics: Metrics, log: Logger
    ) -> None:
        self.settings = settings
        self.keeper = keeper
        self.run = run
        self.metrics = metrics
        self.log = log
        self.sessions = Sessions()
        self.stopping = False
        self.in_force = InForce(started_with=Policy.of(settings))
        self.reports = Reports(run.incidents)
        self.closings = Closings(run)
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}

    # What the controller says.

    def follow(self, directive: Directive) -> None:
        """Go on under `directive`, unless it is not newer than what is in force. No save is touched that has begun."""
        with self._lock:
            before = self.in_force
            self.in_force = after = before.after(directive)
            sessions = self.sessions.all()
            for session in sessions:
                session.schedule = session.schedule.paced(
                    every_s=after.policy.every_s, every_steps=after.policy.every_steps
                )
        if after is before:
            return
        self.metrics.directives.inc()
        self.log.info("directive.followed", generation=directive.generation, policy=str(after.policy))
        for session in sessions:
            session.notices.post(notices.policy(after.policy.message()))
            self.direct(session)

    def _adopt(self, session: Session) -> None:
        """Follow what this workload's newest commit was told, should no controller say so (again)."""
        newest = self.run.log_of(session).state.newest()
        text = None if newest is None else newest.metadata.get(KEY)
        if text is None:
            return
        try:
            directive = recorded(text)
        except UserError as error:
            self.explain("directive.unreadable", error)
            return
        if directive.workload == self.settings.workload_uid:
            self.follow(directive)

    def save_now(self, reason: str, *, urgent: bool, deadline_s: float) -> int:
        """Have the trainers save at their next step; returns how many were told."""
        if urgent:
            return self.notify(reason, deadline_s)
        told = [s for s in self.sessions.all() if s.rank == 0 and s.attempt is not None and not s.fenced]
        for session in told:
            session.notices.post(notices.save_now(reason, deadline_s=deadline_s, urgent=False))
        self.log.info("save.asked", reason=reason, trainers=len(told))
        return len(told)

    # Notices and the control line.

    def watch(self, session_id: str, alive: Callable[[], bool]) -> Iterator[pb.Notice]:
        """Notices of a session until it ends or `alive()` is false."""
        session = self.sessions.get(session_id)
        session.watchers += 1
        try:
            for notice in session.notices.read(alive):
                acknowledges = notice.WhichOneof("kind") == "committed"
                if acknowledges:
                    crash_point("ack.before_send")
                yield notice
                if acknowledges:
                    crash_point("ack.after_send")
        finally:
            session.watchers -= 1

    def notify(self, reason: str, deadline_s: float) -> int:
        """Have every trainer with an open attempt save now; returns how many were told."""
        told = 0
        for session in self.sessions.all():
            if session.attempt is not None and not session.fenced:
                session.urgent_reason = reason
                self.closings.begin((session.attempt,))
                session.notices.post(notices.save_now(reason, deadline_s=deadline_s, urgent=True))
                self.direct(session)
                told += 1
        self.log.info("notified", reason=reason, deadline_s=deadline_s, trainers=told)
        return told

    def direct(self, session: Session) -> None:
        """Write the control line of one trainer."""
        rank = session.local_rank
        with self._lock:
            if session.closed:
                return
            now_s, step = time.monotonic(), self.keeper.step_of(rank)
            before = session.schedule.skipped
            session.schedule, at = session.schedule.advance(now_s=now_s, step=step)
            self.metrics.skipped.inc(session.schedule.skipped - before)
            running = self._saves.get(rank)
            urgent = bool(session.urgent_reason) and (
                running is None or running.over.is_set() or running.staging
            )
            # Ranks cut together: only rank 0 hears the timer, the others hear rank 0.
            due = at if session.rank == 0 else NEVER
            self.keeper.direct(rank, save_at_step=step if urgent else due, urgent=urgent)

    def in_flight(self) -> list[Save]:
        """Saves that have not ended."""
        return [save for save in list(self._saves.values()) if not save.over.is_set()]

    def explain(self, event: str, error: BaseException) -> None:
        """Log an error that was answered to a caller."""
        self.log.warning(event, **explain(error))
