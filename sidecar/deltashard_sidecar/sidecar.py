"""The sidecar without its transport: each call of the protocol as a method over arena, sessions, saves and run.

`grpc_server` translates gRPC to these methods and `main` runs the process. `control` (`trainer_control`) sends notices
to trainers; `saves` (`save_service`) begins and ends saves. Locks are acquired in this order only. Only the first may
be held while waiting:

    `_attaching` (one Attach at a time) > `InFlightSaves` (begin of a save) > `TrainerControl` (policy, timers,
    control lines) > `Sessions` > a session's and its parts' > a save's > the arena's

Before a rank attaches, the staged save of its predecessor is finished or aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.write.fencing import FencedError
from deltashard_proto.arena_layout import LINES
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.block import MIN_BLOCKS_PER_RANK, Use
from deltashard_sidecar.deciding.measurements import Opening
from deltashard_sidecar.deciding.step_meter import Reading
from deltashard_sidecar.maintenance import MaintenanceLoop
from deltashard_sidecar.parts import Parts
from deltashard_sidecar.restore import Restore
from deltashard_sidecar.run.identity import check_run_assignment
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import Save
from deltashard_sidecar.save_orders import SaveOrders
from deltashard_sidecar.save_service import SaveRefused, SaveService
from deltashard_sidecar.session.attachment import BadAttach, check_attach, check_capacity
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.trainer_control import TrainerControl

FIRST_TRAINER_WAIT_S = 30.0
"""Time that a sidecar waits for its first trainer, in addition to `linger_s`."""
LOCK_RELEASE_S = 5.0
"""Longest wait for the lock of a killed process; the kernel releases it within moments."""


class Stopping(EnvironmentFault):
    """The sidecar received SIGTERM: it finishes saves in flight and accepts no new work."""

    cause = Cause.STOPPING


class RankTaken(UserError):
    """Another live process holds this rank's writer lock."""


class Sidecar(Parts):
    """One sidecar process, without its transport."""

    def __init__(self, keeper: ArenaKeeper, run: Run) -> None:
        super().__init__(keeper, run)
        in_flight = self.in_flight_saves.in_flight
        self.control = TrainerControl(self)
        self.maintenance = MaintenanceLoop(
            run, policy=lambda: self.control.active_policy.policy, saving=lambda: bool(in_flight())
        )
        self.orders = SaveOrders(request_save=self.control.request_save, state=run.state, in_flight=in_flight)
        self.saves = SaveService(self, control=self.control, maintenance=self.maintenance, orders=self.orders)
        self.stopping = False
        self._attaching = threading.Lock()
        self._predecessor_deadline = 0, 0.0
        """Attempt whose saves an Attach waited for, and the monotonic deadline of all such waits."""
        self._idle_since_s = time.monotonic() + FIRST_TRAINER_WAIT_S
        self._unread_session: Session | None = None
        """Rank 0's session when it continues an attempt that has not been read from the log yet."""
        self.metrics.watch_blocks(keeper.counts, [use.value for use in Use])
        self.metrics.blocked.set_function(lambda: self.blocked()[0])
        self.metrics.steps = self._steps

    def blocked(self) -> tuple[float, str]:
        """Return (seconds, reason) of the save that is due and has been blocked the longest, as trainers report."""
        return self.keeper.blocked(session.attachment.local_rank for session in self.sessions.all())

    def _steps(self) -> dict[tuple[str, int], int]:
        training = [each.attachment for each in self.sessions.all() if each.attempt is not None]
        return {
            (self.run.name, attachment.rank): self.keeper.step_of(attachment.local_rank)
            for attachment in training
        }

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """Admit a trainer process; raises `BadAttach`, `AmbiguousRun`, `RankTaken` or `Stopping`."""
        protocol = check_attach(request, LINES)
        check_run_assignment(self.settings, max(1, request.world_size))
        self._refuse_when_stopping()
        with self._attaching:
            self._await_free_rank(request.local_rank, request.pid)
            self._end_predecessor(request.local_rank, request)
            check_capacity(request, self.settings)
            self._check_group(request)
            self._admit_to_arena(request.local_rank)
            session = self.control.admit(request)
            self._idle_since_s = time.monotonic()  # the trainer may be gone before the next tick
            self.saves.trainer_reattached(session)
        crash_point("attach.admitted")
        attempt = session.attempt
        if attempt is not None:
            session.last_commit = self.run.resume(session.attachment, attempt)
            self._continue_attempt(session, attempt)
        elif session.attachment.rank == 0:
            self.decider.trainer_attached()
        self.metrics.has_rank0 |= session.attachment.rank == 0
        self.decider.attached(len(self.sessions.all()))
        self.activity.closed_cleanly = False
        self.log.info(
            "trainer.attached",
            session=session.id,
            rank=request.rank,
            trainer_pid=request.pid,
            attempt=attempt,
        )
        return pb.AttachReply(
            protocol=protocol,
            arena_path=str(self.settings.arena_path),
            arena_bytes=self.keeper.total_bytes,
            block_bytes=self.keeper.block_bytes,
            epoch=self.keeper.epoch,
            control_line=request.local_rank,
            session=session.id,
            has_checkpoint=bool(self.run.log.state.checkpoints),
            last_commit=session.last_commit,
            policy=self.control.policy,
            run=self.run.name,
            url=self.settings.url,
            participated_attempt=self.run.participation.newest(self.run.name),
            grace_s=self.settings.grace_s,
        )

    def _check_group(self, request: pb.AttachRequest) -> None:
        """Check that the pod's ranks form one group: one world size, attempt and layout, and each rank once.

        Waits for the locks of a killed group's other ranks. Raises `BadAttach`.
        """
        until_s = time.monotonic() + min(LOCK_RELEASE_S, self.settings.attach_deadline_s)
        while self._disagreement(request) is not None:
            self._reap()
            if (what := self._disagreement(request)) is not None and time.monotonic() > until_s:
                remedy = "end the processes of the other group, or use another run"
                raise BadAttach(what, where="attach", remedy=remedy)
            time.sleep(0.02)

    def _disagreement(self, request: pb.AttachRequest) -> str | None:
        mine = f"rank {request.rank} of {max(1, request.world_size)}"
        for session in self.sessions.all():
            attachment, attempt = session.attachment, session.attempt
            if attachment.local_rank == request.local_rank:
                continue
            theirs = f"rank {attachment.rank} of {attachment.world_size} (process {attachment.pid})"
            if attachment.world_size != max(1, request.world_size):
                return f"{mine} attaches, but {theirs} is attached: they are not of one group"
            if attachment.rank == request.rank:
                place = f"local rank {request.local_rank}"
                return f"{mine} attaches as {place}, {theirs} is local rank {attachment.local_rank}"
            if request.HasField("attempt") and attempt is not None:
                if attempt == request.attempt and session.layout != request.layout:
                    return f"{mine} attaches with another layout than {theirs}"
                if attempt > request.attempt:
                    return f"{mine} attaches under attempt {request.attempt}, {theirs} trains under {attempt}"
        return None

    def _admit_to_arena(self, rank: int) -> None:
        if self.keeper.attached(rank):
            return
        blocks, trainers = self.keeper.ledger.total, len(self.keeper.ledger.ranks) + 1
        what = f"the arena has {blocks} blocks of {self.keeper.block_bytes} bytes, too few for {trainers} trainers"
        remedy = f"set arena_bytes to at least {MIN_BLOCKS_PER_RANK} blocks a trainer"
        raise BadAttach(what, where="arena", remedy=remedy)

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping("the sidecar is stopping", where="sidecar", remedy="attach to the next one")

    def _await_free_rank(self, rank: int, pid: int) -> None:
        until_s = time.monotonic() + min(LOCK_RELEASE_S, self.settings.attach_deadline_s)
        while (holder := self.keeper.writer_pid(rank)) is not None and holder not in (0, pid):
            if time.monotonic() > until_s:
                what = f"process {holder} trains as local rank {rank} of this sidecar"
                remedy = "stop it, or use another run or runtime directory"
                raise RankTaken(what, where=str(self.settings.dir), remedy=remedy)
            time.sleep(0.02)

    def _end_predecessor(self, rank: int, request: pb.AttachRequest) -> None:
        old = self.sessions.of_rank(rank)
        save = self.in_flight_saves.of_rank(rank)
        if old is not None:
            self.sessions.close(old)
            old.presence.cancel_streams()
            if not request.HasField("attempt"):
                self.saves.trainer_lost(old)
                self._trainer_lost(old)
        if save is None:
            return
        save.stream_finished.wait(5.0)
        if old is not None and old.attachment.pid == request.pid and request.HasField("attempt"):
            return  # the same process continues
        # All ranks of a group share one deadline.
        if self._predecessor_deadline[0] != save.decisions.attempt:
            self._predecessor_deadline = (
                save.decisions.attempt,
                time.monotonic() + self.settings.attach_deadline_s,
            )
        if not save.finished.wait(max(0.0, self._predecessor_deadline[1] - time.monotonic())):
            save.cancel(Cause.SUPERSEDED, "a new trainer attached and this save did not end in time")

    def open(self, request: pb.OpenRequest) -> pb.OpenReply:
        self._refuse_when_stopping()
        session = self.sessions.get(request.session)
        attachment = session.attachment
        if attachment.rank != 0 or (attachment.world_size > 1) != bool(request.layout):
            how = "with a layout" if request.layout else "without a layout"
            what = f"rank {attachment.rank} of {attachment.world_size} opens an attempt {how}"
            remedy = "rank 0 opens it for all, with the layout of all ranks; one rank alone has none"
            raise UserError(what, where="open attempt", remedy=remedy)
        step_seen = self.keeper.step_of(attachment.local_rank)
        session.open_requested_s = time.time()
        try:
            reply = self.run.open(request, attachment, gone=lambda: session.closed, step_seen=step_seen)
        except FencedError as error:
            self.activity.fenced(Cause(error.cause), str(error), step=step_seen)
            raise
        if reply.HasField("basis"):
            return reply  # no attempt is open: the trainer restores and calls again
        late = request.HasField("basis")
        self.control.adopt_recorded()  # first: recorded measurements are valid under the goal they were made for
        # Rank 0's sidecar decides how often the run saves. With a late open, the trainer trains already.
        self._unread_session = None
        opening = self._opening(session, reply.attempt)
        if not late:
            opening = replace(opening, reading=Reading(reply.step, session.open_requested_s))
        opening = replace(opening, resumed=reply.HasField("resume_seq"), step_seen=reply.last_step_seen)
        self.decider.opened(opening, self.run.log_of(attachment).state)
        self.control.opened(session, reply, late=late)
        self.activity.opened(reply)
        self.log.info("attempt.opened", attempt=reply.attempt, step=reply.step, rank=attachment.rank)
        self.control.write_control_line(session)
        return reply

    def _opening(self, session: Session, attempt: int) -> Opening:
        return Opening(
            attempt=attempt,
            world_size=session.attachment.world_size,
            ranks_here=len(self.sessions.all()),
            reading=self._reading(session),
        )

    def _continue_attempt(self, session: Session, attempt: int) -> None:
        """Continue an attempt after a restart of the sidecar.

        Directive, measurements and choices are read from the run's log. Until the log can be read, nothing is decided:
        a commit would record that nothing is known.
        """
        state = self.run.state()
        self.control.adopt_recorded()
        if session.attachment.rank != 0:
            return
        self._unread_session = None if attempt in state.attempts else session
        if self._unread_session is None:
            self.run.bits.continue_attempt(state, attempt)
            self.decider.opened(self._opening(session, attempt), state)
            self.control.interval_changed()

    def _reading(self, session: Session) -> Reading:
        rank = session.attachment.local_rank
        return Reading(self.keeper.step_of(rank), self.keeper.step_time_s(rank))

    def _update_decider(self) -> None:
        for session in self.sessions.all():
            if session.attachment.rank == 0 and session.attempt is not None:
                if session is self._unread_session:
                    self._continue_attempt(session, session.attempt)
                if self.decider.observe(self._reading(session)):
                    self.control.interval_changed()
                return

    def begin(self, begin: pb.SaveRequest.Begin) -> Save:
        session = self.sessions.get(begin.session)
        if self.stopping:
            raise SaveRefused(begin.snapshot_id, Cause.STOPPING, "the sidecar is stopping")
        return self.saves.begin(session, begin)

    def restore(
        self,
        session: Session,
        want: pb.RestoreRequest.Want,
        requests: Iterator[pb.RestoreRequest],
        alive: Callable[[], bool],
    ) -> Iterator[pb.RestoreReply]:
        restore = Restore(run=self.run, attachment=session.attachment, want=want, keeper=self.keeper)
        try:
            with self.maintenance.restoring(), session.presence.keep_alive():
                yield from restore.serve(requests, alive)
        finally:
            if restore.source and (want.boxes or not session.attachment.boxes):  # blobs come first, rows last
                self.activity.restored(session, step=restore.step, source=restore.source)

    def tick(self) -> bool:
        """Check timers, dead trainers and silent streams; returns False when a lingering sidecar should exit."""
        self.keeper.sweep()
        for session in self.sessions.all():
            self.control.write_control_line(session)
        self._update_decider()
        self._reap()
        now_s, idle_s = time.monotonic(), self.settings.stream_idle_s
        for save in self.in_flight_saves.newest():
            if save.staging and now_s - save.last_message_s > idle_s:
                save.cancel(Cause.DEADLINE, f"the trainer sent nothing for {idle_s} s")
        self.metrics.spooled.set(self.run.cache.used_bytes)
        self.run.release_unused(self._sessions_in_use)
        if self.sessions.all() or self.in_flight_saves.in_flight():
            self._idle_since_s = now_s
            return True
        linger_s = self.settings.linger_s
        return linger_s < 0 or now_s - self._idle_since_s < linger_s

    def _reap(self) -> None:
        for session in self.sessions.reap(lambda rank: self.keeper.writer_pid(rank) is not None):
            self.log.info("trainer.lost", session=session.id, rank=session.attachment.rank)
            self.saves.trainer_lost(session)
            self._trainer_lost(session)
            session.presence.cancel_streams()
            self.keeper.remove_rank(session.attachment.local_rank)

    def _trainer_lost(self, session: Session) -> None:
        if session.attachment.rank == 0:
            self.decider.trainer_lost()
        self.activity.record_trainer_lost(session, step=self.keeper.step_of(session.attachment.local_rank))
        self._remove_marker(session)

    def _remove_marker(self, session: Session) -> None:
        """Remove the attempt's closing marker unless a save in flight may still commit."""
        if not any(save.decisions.attempt == session.attempt for save in self.in_flight_saves.in_flight()):
            self.markers.end(session.attempt)

    def _sessions_in_use(self) -> set[str]:
        saving = {save.attachment.id for save in self.in_flight_saves.in_flight()}
        return {session.id for session in self.sessions.all()} | saving

    def detach(self, request: pb.DetachRequest) -> pb.DetachReply:
        """Close a trainer's session. With `wait`, return after its save has ended or the deadline has passed."""
        session = self.sessions.get(request.session)
        rank = session.attachment.local_rank
        save = self.in_flight_saves.of_rank(rank)
        idle = save is None or save.finished.is_set()
        if request.wait and save is not None:
            idle = save.finished.wait(request.deadline_s or self.settings.save_deadline_s)
        durable = session.attempt is not None and session.durable_step == self.keeper.step_of(rank)
        self.activity.closed_cleanly = idle and durable
        self.sessions.close(session)
        session.presence.cancel_streams()
        self._remove_marker(session)
        self.keeper.remove_rank(rank)
        self.log.info("trainer.detached", session=session.id, rank=session.attachment.rank, idle=idle)
        return pb.DetachReply(last_commit=session.last_commit, idle=idle)

    def terminate(self, stop_now: Callable[[], bool]) -> None:
        """Finish or abort the saves in flight, by the deadline or until `stop_now()`, and close all sessions."""
        self.stopping = True
        self.maintenance.stop()
        until_s = time.monotonic() + self.settings.term_deadline_s
        self.markers.begin({save.decisions.attempt for save in self.in_flight_saves.in_flight()})
        for save in self.in_flight_saves.in_flight():
            while not (stop_now() or save.finished.wait(0.05)) and time.monotonic() < until_s:
                pass
        for save in self.in_flight_saves.in_flight():
            save.cancel(Cause.STOPPING, "the sidecar had to stop before this save was durable")
        self.markers.end_all()
        for session in self.sessions.all():
            self.sessions.close(session)
        self.saves.pool.shutdown(wait=False, cancel_futures=True)
