"""Control of the attached trainers: when to save, under which policy, and whether they are fenced.

It writes the control line, which `Checkpointer.step()` reads without a system call, and posts the notices of Watch. Its
lock covers the policy in force, the timers and control lines of all sessions, and the outcome of each rank's last save.
The lock is never held while waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import UserError
from deltashard_proto.arena_layout import NEVER
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.activity import FENCED
from deltashard_sidecar.parts import Parts
from deltashard_sidecar.policy import KEY, ActivePolicy, parse_directive, policy_of, stated
from deltashard_sidecar.save.save import Save
from deltashard_sidecar.session.schedule import Schedule
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.telemetry.structured_logging import explain


class TrainerControl:
    """Policy, timers and notices of the attached trainers. Thread-safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sessions = parts.sessions
        self._lock = threading.Lock()
        self._active_policy = ActivePolicy(initial=policy_of(parts.settings))
        self._has_directive = False
        self._sent_policy = self._active_policy.policy
        self._outcomes: dict[int, tuple[int, pb.Notice]] = {}
        """Local rank -> (attempt, outcome of its last save), for a session that attaches after the notice."""

    @property
    def active_policy(self) -> ActivePolicy:
        return self._active_policy

    @property
    def policy(self) -> pb.Policy:
        """Policy in force, with the timers that the decider chose."""
        return self._parts.decider.apply_to(self._active_policy.policy)

    def admit(self, request: pb.AttachRequest) -> Session:
        """Add a session under the policy in force; the rank's previous session must be closed."""
        rank = request.local_rank
        with self._lock:  # a directive is applied before all of this, or to this session
            policy, now_s = self.policy, time.monotonic()
            schedule = Schedule(every_s=policy.every_s, every_steps=policy.every_steps, anchor_s=now_s)
            if request.HasField("attempt"):
                schedule = schedule.opened(now_s=now_s, step=self._parts.keeper.step_of(rank))
            session = self._sessions.add(request, schedule)
            # The previous session may have ended before it read the outcome of its last save.
            attempt, notice = self._outcomes.get(rank, (None, None))
            if notice is not None and attempt == session.attempt:
                session.notices.post(notice)
        return session

    def opened(self, session: Session, reply: pb.OpenReply, *, late: bool) -> None:
        """Record the attempt opened for a session (`late`: after it restored); call the decider's `opened` first."""
        with self._lock:
            session.opened(reply)
            if late:
                session.mark_restored()
            self._apply_timers()
            session.schedule = session.schedule.opened(now_s=time.monotonic(), step=reply.step)
        self._send_policy()

    def apply_directive(self, directive: fleet.Directive, *, adopted: bool = False) -> None:
        """Continue under `directive` from a fleet reply or (`adopted`) from a commit. Saves in flight keep theirs."""
        with self._lock:
            if adopted and self._has_directive:
                return
            self._has_directive |= not adopted
            before = self._active_policy
            self._active_policy = after = before.with_directive(directive)
            if after is not before:
                self._parts.decider.set_policy(after.policy)
            self._apply_timers()
        if after is not before:
            self._parts.log.info("directive.applied", id=directive.id, policy=stated(after.policy))
            self._send_policy(force=True)

    def interval_changed(self) -> None:
        with self._lock:
            self._apply_timers()
        self._send_policy()

    def _apply_timers(self) -> None:
        """Set every session's timer to the policy; the lock is held."""
        policy = self.policy
        for session in self._sessions.all():
            session.schedule = replace(
                session.schedule, every_s=policy.every_s, every_steps=policy.every_steps
            )

    def _send_policy(self, *, force: bool = False) -> None:
        previous, self._sent_policy = self._sent_policy, self.policy
        if self._sent_policy == previous and not force:
            return
        for session in self._sessions.all():
            session.notices.post(pb.Notice(policy=self._sent_policy))
            self.write_control_line(session)

    def adopt_recorded(self) -> None:
        """Apply the directive of the workload's newest commit, unless a controller has already sent one."""
        newest = self._parts.run.state().newest()
        text = None if newest is None else newest.metadata.get(KEY)
        if text is None:
            return
        try:
            directive = parse_directive(text)
        except UserError as error:
            self._parts.log.warning("directive.unreadable", **explain(error))
            return
        if directive.workload == self._parts.settings.workload_uid:
            self.apply_directive(directive, adopted=True)

    def request_save(self, order: fleet.SaveOrder) -> Session | None:
        """Request a save from one trainer, and so from all ranks; returns its session, None: no trainer may save."""
        able = next((s for s in self._sessions.all() if self._may_save(s)), None)
        if able is not None and order.urgent:
            self.notify(order.reason, order.deadline_s)
        elif able is not None:
            _request_save(able, order.reason, order.deadline_s, urgent=False)
            self._parts.log.info("save.ordered", reason=order.reason, id=order.id, rank=able.attachment.rank)
        return able

    def save_started(self, session: Session, attempt: int, *, step: int) -> None:
        with self._lock:
            if session.attempt == attempt:
                session.schedule = session.schedule.began(now_s=time.monotonic(), step=step)

    def urgent_started(self, session: Session) -> None:
        with self._lock:
            session.urgent = ""

    def ended(self, save: Save) -> None:
        attempt, rank = save.decisions.attempt, save.attachment.local_rank
        cause, message = save.failure
        if save.commit is not None:
            notice = pb.Notice(committed=save.commit)
        else:
            failed = pb.Notice.SaveFailed(
                snapshot_id=save.decisions.snapshot_id, cause=cause, message=message
            )
            notice = pb.Notice(save_failed=failed)
        with self._lock:
            session = self._sessions.of_rank(rank)
            self._outcomes[rank] = attempt, notice
            if session is None or session.attempt != attempt:
                return
            session.schedule = replace(session.schedule, busy=False)
        if save.commit is not None:
            session.committed(attempt, save.commit)
        elif cause in FENCED:
            session.fence = cause, message
        if (fence := session.fence) is not None:
            # A newer attempt of the run is open: this trainer can never commit again.
            by = self._parts.run.log_of(session.attachment).state.attempt or 0
            taken_over = fence[0] is Cause.TAKEN_OVER
            fenced = pb.Notice.Fenced(attempt=attempt, by=by, message=fence[1], taken_over=taken_over)
            session.notices.post(pb.Notice(fenced=fenced))
        self.write_control_line(session)  # first: readers of the notice find the step of the next save
        session.notices.post(notice)

    def is_urgent_pending(self, attempt: int) -> bool:
        return any(s.urgent and s.attempt == attempt for s in self._sessions.all())

    def watch(self, session: Session, alive: Callable[[], bool]) -> Iterator[pb.Notice]:
        with session.presence.keep_alive():
            for notice in session.notices.read(alive):
                acknowledges = notice.WhichOneof("kind") == "committed"
                if acknowledges:
                    crash_point("ack.before_send")
                yield notice
                if acknowledges:
                    crash_point("ack.after_send")

    def notify(self, reason: str, deadline_s: float) -> int:
        """Request an urgent save from every trainer with an open attempt; returns their number."""
        sessions = [session for session in self._sessions.all() if self._may_save(session)]
        for session in sessions:
            with self._lock:
                session.urgent = reason
            self._parts.markers.begin([] if session.attempt is None else [session.attempt])
            _request_save(session, reason, deadline_s, urgent=True)
            self.write_control_line(session)
        self._parts.log.info(
            "trainers.notified", reason=reason, deadline_s=deadline_s, trainers=len(sessions)
        )
        return len(sessions)

    def _may_save(self, session: Session) -> bool:
        return session.may_commit and self._parts.run.removed is None

    def write_control_line(self, session: Session) -> None:
        rank, keeper = session.attachment.local_rank, self._parts.keeper
        with self._lock:
            if session.closed:
                return
            step = keeper.step_of(rank)
            before = session.schedule.skipped
            session.schedule, at = session.schedule.advance(now_s=time.monotonic(), step=step)
            self._parts.metrics.skipped.inc(session.schedule.skipped - before)
            running = self._parts.in_flight_saves.of_rank(rank)
            urgent = bool(session.urgent) and (
                running is None or running.finished.is_set() or running.staging
            )
            # Ranks save together: only rank 0 follows the timer, and the others follow rank 0.
            due = at if session.attachment.rank == 0 else NEVER
            keeper.write_control_line(rank, save_at_step=step if urgent else due, urgent=urgent)


def _request_save(session: Session, reason: str, deadline_s: float, *, urgent: bool) -> None:
    save_now = pb.Notice.SaveNow(reason=reason, deadline_s=deadline_s, urgent=urgent)
    session.notices.post(pb.Notice(save_now=save_now))
