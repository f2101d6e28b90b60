"""The sidecar itself: every call of the contract as a plain method, over arena, sessions, saves and the run.

`grpc_server` translates gRPC to these methods, `main` gives them a process; what trainers are told is in
`trainer_control`. Locks are taken in this order and never another: `_attaching` (one Attach at a time; may wait
long), `_lock` (state of sessions; never held while waiting), a save's, the arena's.

Rules kept here:
- one save in flight per rank; an urgent one replaces a periodic one that still stages and waits for one that uploads;
- a rank that attaches first has whatever its predecessor staged finished or aborted;
- a failed save costs the save and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.write.commit import FencedError
from deltashard_proto.arena_layout import LINES
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.block import MIN_BLOCKS_PER_RANK, Use
from deltashard_sidecar.fleet.activity import FENCED
from deltashard_sidecar.maintenance import Housekeeping
from deltashard_sidecar.restore import Restore
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import Cut, Save
from deltashard_sidecar.save.sink import PartSink
from deltashard_sidecar.session import notice as notices
from deltashard_sidecar.session.capacity import check_capacity, raw_bytes
from deltashard_sidecar.session.schedule import Schedule
from deltashard_sidecar.session.session import BadAttach, Session, check_attach
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger
from deltashard_sidecar.trainer_control import Orders

STALL_ABORTS = 2
"""After so many saves in a row aborted for their stall, the next one waits it out."""


URGENT_WAIT_S = 3.0
"""An urgent save waits so long at its begin for one that uploads; then it is refused and asked for again afterwards."""

BRIEF_WAIT_S = 1.0


class Stopping(EnvironmentFault):
    """The sidecar got SIGTERM: it finishes what is in flight and takes nothing new."""


class RankTaken(UserError):
    """Another live process holds this rank's writer lock."""


class Refused(Exception):
    """A save is not begun; `reply` says why."""

    def __init__(self, cut: int, cause: Cause, message: str) -> None:
        super().__init__(message)
        failed = pb.SaveReply.Failed(cut=cut, cause=cause, message=message, code=cause.code)
        self.reply = pb.SaveReply(failed=failed)


ENCODE_NICENESS = 10
"""Of encoding threads: on shared cores (a laptop) the cut that is being copied, and training, go first."""


def _yield_to_training() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENCODE_NICENESS)


class Sidecar(Orders):
    """One sidecar process, without its transport."""

    def __init__(
        self, settings: Settings, *, keeper: ArenaKeeper, run: Run, metrics: Metrics, log: Logger
    ) -> None:
        super().__init__(settings, keeper=keeper, run=run, metrics=metrics, log=log)
        self.pool = ThreadPoolExecutor(
            settings.threads, thread_name_prefix="encode", initializer=_yield_to_training
        )
        self.keeping = Housekeeping(run, log=log)
        self._attaching = threading.Lock()
        self._outcomes: dict[int, tuple[int, pb.Notice]] = {}
        self._cancel_streams: dict[str, list[Callable[[], None]]] = {}
        self._idle_since_s = time.monotonic()
        metrics.watch_blocks(keeper.counts, [use.value for use in Use])
        metrics.trainers.set_function(lambda: len(self.sessions.all()))

    def start(self) -> None:
        """Begin the work nobody asked for: a look at the log, and the prefetch."""
        if self.run.named.is_set():
            self.keeping.named()
        self.keeping.start()

    # Attachments.

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """Take a trainer process in; raises `BadAttach`, `RankTaken` or `Stopping`."""
        protocol = check_attach(request, LINES)
        self._refuse_when_stopping()
        rank = request.local_rank
        with self._attaching:
            self._await_free_rank(rank, request.pid)
            self._end_predecessor(rank, request)
            check_capacity(request, self.settings)
            self._identify(max(1, request.world_size))
            if not self.keeper.attached(rank):
                raise BadAttach(
                    f"the arena has {self.keeper.ledger.total} blocks of {self.keeper.block_bytes} bytes, too few for "
                    f"{len(self.keeper.ledger.ranks) + 1} trainers",
                    where="arena",
                    remedy=f"set arena_bytes to at least {MIN_BLOCKS_PER_RANK} blocks a trainer",
                )
            with self._lock:  # a directive comes before all of this or finds the session
                policy = self.in_force.policy
                schedule = Schedule(
                    every_s=policy.every_s, every_steps=policy.every_steps, anchor_s=time.monotonic()
                )
                if request.HasField("attempt"):
                    schedule = schedule.opened(now_s=time.monotonic(), step=self.keeper.step_of(rank))
                session = self.sessions.add(request, schedule)
                # Its last session may have ended before it read how its last save did.
                attempt, notice = self._outcomes.get(rank, (None, None))
                if notice is not None and attempt == session.attempt:
                    session.notices.post(notice)
        if session.attempt is not None:
            session.last_commit = self.run.resume(session)
            self._adopt(session)
        self.reports.attached()
        self.log.info(
            "trainer.attached",
            session=session.id,
            rank=session.rank,
            trainer_pid=request.pid,
            attempt=session.attempt,
        )
        return pb.AttachReply(
            protocol=protocol,
            arena_path=str(self.settings.arena_path),
            arena_bytes=self.keeper.total_bytes,
            block_bytes=self.keeper.block_bytes,
            epoch=self.keeper.epoch,
            control_line=rank,
            session=session.id,
            has_checkpoint=self.run.has_checkpoint(),
            last_commit=session.last_commit,
            policy=self.in_force.policy.message(),
            run=self.run.name,
            url=self.settings.url,
            several_pins=True,
        )

    def _identify(self, world_size: int) -> None:
        """This attachment says which run the pod's is; refused while trainers of another one are attached."""
        if not self.run.identify(world_size, free=not self.sessions.all()):
            raise BadAttach(
                f"a trainer of world size {world_size} trains another run than {self.run.name!r}, which others train",
                where="attach",
                remedy="the trainers of a pod are ranks of one group",
            )
        self.keeping.named()

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping("the sidecar is stopping", where="sidecar", remedy="wait for the next one")

    def _await_free_rank(self, rank: int, pid: int) -> None:
        """A killed predecessor lets its lock go within moments; a live one keeps it."""
        deadline_s = time.monotonic() + min(5.0, self.settings.attach_deadline_s)
        while (holder := self.keeper.writer_pid(rank)) is not None and holder not in (0, pid):
            if time.monotonic() > deadline_s:
                raise RankTaken(
                    f"process {holder} trains as local rank {rank} of this sidecar",
                    where=str(self.settings.dir),
                    remedy="end it, or use another run or runtime directory",
                )
            time.sleep(0.02)

    def _end_predecessor(self, rank: int, request: pb.AttachRequest) -> None:
        old = self.sessions.of_rank(rank)
        save = self._saves.get(rank)
        if old is not None:
            self.sessions.close(old)
            for cancel in self._cancel_streams.pop(old.id, []):
                cancel()
            if not request.HasField("attempt"):
                self._lost(old)
        if save is None:
            return
        save.stream_over.wait(5.0)
        same = old is not None and old.pid == request.pid and request.HasField("attempt")
        if not same and not save.over.wait(self.settings.attach_deadline_s):
            save.cancel(Cause.SUPERSEDED, "a new trainer attached and this save did not end in time")

    def open(self, request: pb.OpenRequest) -> pb.OpenReply:
        """Open an attempt for a session; raises what the log raises."""
        self._refuse_when_stopping()
        session = self.sessions.get(request.session)
        step_seen = self.keeper.step_of(session.local_rank)
        session.opened_s, session.opened_at_s = time.monotonic(), time.time()
        try:
            reply = self.run.open(request, session, step_seen=step_seen)
        except FencedError as error:
            self.reports.fenced(Cause(error.cause), str(error), step=step_seen)
            raise
        with self._lock:
            session.attempt = reply.attempt
            session.fenced = ""
            session.last_commit = None
            session.resumed, session.restored = reply.HasField("resume_seq"), False
            session.durable_step = reply.step if session.resumed else None
            session.schedule = session.schedule.opened(now_s=time.monotonic(), step=reply.step)
        self._adopt(session)
        self.reports.opened(session, reply)
        self.metrics.attempts.inc()
        self.log.info("attempt.opened", attempt=reply.attempt, step=reply.step, rank=session.rank)
        self.direct(session)
        return reply

    def hold_stream(self, session_id: str, cancel: Callable[[], None]) -> Session:
        """The session of a new stream, whose `cancel` is called when the session ends."""
        session = self.sessions.get(session_id)
        self._cancel_streams.setdefault(session_id, []).append(cancel)
        return session

    def drop_stream(self, session_id: str, cancel: Callable[[], None]) -> None:
        """The stream ended by itself."""
        held = self._cancel_streams.get(session_id)
        if held is not None and cancel in held:
            held.remove(cancel)

    # Saves.

    def begin(self, begin: pb.SaveRequest.Begin) -> Save:
        """Begin a save; raises `Refused`, or `UnknownSession`."""
        session = self.sessions.get(begin.session)
        if self.stopping:
            raise Refused(begin.cut, Cause.STOPPING, "the sidecar is stopping")
        if session.fenced:
            raise Refused(begin.cut, session.fenced_cause, session.fenced)
        if session.attempt is None:
            raise Refused(begin.cut, Cause.INVALID, "no attempt is open: restore() first")
        self._make_way(session, begin)
        self.keeper.copies_stopped(session.local_rank)
        with self._lock:
            running = self._saves.get(session.local_rank)
            if running is not None and not (running.over.is_set() and running.stream_over.is_set()):
                raise Refused(begin.cut, Cause.BUSY, "another save of this rank is in flight")
            in_force = self.in_force
            policy = in_force.policy
            covers, directive = self.run.decide(session, begin, policy)
            waits = session.stall_aborts >= STALL_ABORTS
            if waits:
                self.log.warning("save.waits_out_its_stall", aborted=session.stall_aborts, cut=begin.cut)
            arena_bytes = self.keeper.ledger.total * self.keeper.block_bytes
            if covers is None and (raw := raw_bytes(session.tables, session.boxes)) > arena_bytes:
                # It can only go on as batches are encoded: to abort it and try again would take longer still.
                waits = True
                self.log.info(
                    "save.larger_than_the_arena", raw_bytes=raw, arena_bytes=arena_bytes, cut=begin.cut
                )
            cut = Cut(
                attempt=session.attempt,
                cut=begin.cut,
                step=begin.step,
                reason=begin.reason,
                urgent=begin.urgent,
                covers=covers,
                encoding=policy.encoding,
                state_encoding=policy.state_encoding,
                stall_budget_s=0.0 if waits else self.settings.stall_budget_s,
                directive=directive,
                follows=None if in_force.directive is None else in_force.directive.text(),
            )
            save = Save(
                session=session,
                cut=cut,
                sink=PartSink(self.run, session, cut),
                keeper=self.keeper,
                submit=self.pool.submit,
                metrics=self.metrics,
                log=self.log,
                deadline_s=self.settings.save_deadline_s,
                ended=self._save_ended,
            )
            self._saves[session.local_rank] = save
            session.schedule = session.schedule.began(now_s=time.monotonic(), step=begin.step)
            if begin.urgent:
                session.urgent_reason = ""
        self.direct(session)
        if begin.tracking_faults:
            self.reports.tracking_fault(begin.tracking_faults, step=begin.step)
        self.log.info(
            "save.begun",
            attempt=cut.attempt,
            cut=cut.cut,
            step=cut.step,
            reason=cut.reason,
            covers=covers,
            rank=session.rank,
        )
        return save

    def _make_way(self, session: Session, begin: pb.SaveRequest.Begin) -> None:
        """Refuse while another save of the rank is in flight.

        An urgent save cancels one that stages and waits a while for one that uploads; any other waits only for what is
        about to end anyway: an abort on its way, a stream being closed, an end that is being told (the trainer may have
        heard of it already, and begins anew).
        """
        running = self._saves.get(session.local_rank)
        if running is None:
            return
        if begin.urgent and running.staging and not running.cut.urgent:
            running.cancel(Cause.SUPERSEDED, f"an urgent save ({begin.reason}) takes its place")
        brief = running.staging or running.life.ended
        patience_s = URGENT_WAIT_S if begin.urgent else BRIEF_WAIT_S if brief else 0.0
        if running.over.wait(patience_s) and running.stream_over.wait(BRIEF_WAIT_S):
            return
        self.metrics.skipped.inc()
        raise Refused(begin.cut, Cause.BUSY, f"cut {running.cut.cut} is {running.life.state.value.lower()}")

    def _save_ended(self, save: Save) -> None:
        """A save committed or failed: tell the trainer, the timer and the metrics."""
        cut = save.cut
        if save.commit is not None:
            commit = save.commit
            self.metrics.committed(step=commit.step, baseline=commit.baseline, durable_s=commit.durable_s)
            self.log.info(
                "save.committed",
                seq=commit.seq,
                attempt=cut.attempt,
                cut=cut.cut,
                step=cut.step,
                baseline=commit.baseline,
                durable_s=round(commit.durable_s, 3),
                stored_bytes=commit.stored_bytes,
            )
            notice = notices.committed(commit)
        else:
            cause, message = save.failure
            notice = notices.save_failed(cut.cut, cause, message)
        self.reports.ended(save)
        rank = save.session.local_rank
        with self._lock:
            session = self.sessions.of_rank(rank)
            current = session if session is not None and session.attempt == cut.attempt else None
            self._outcomes[rank] = cut.attempt, notice
        if current is not None:
            with self._lock:
                current.schedule = current.schedule.ended()
                if save.commit is not None:
                    current.last_commit = save.commit
                    current.durable_step = save.commit.step
                elif save.failure[0] in FENCED:
                    current.fenced_cause, current.fenced = save.failure
            if current.fenced:
                current.notices.post(
                    notices.fenced(
                        cut.attempt,
                        self.run.newest_attempt(current),
                        current.fenced,
                        taken_over=current.fenced_cause is Cause.TAKEN_OVER,
                    )
                )
            current.notices.post(notice)
            self.direct(current)
        urgent = any(s.urgent_reason and s.attempt == cut.attempt for s in self.sessions.all())
        if not urgent and all(
            other is save or other.cut.attempt != cut.attempt for other in self.in_flight()
        ):
            self.closings.end(cut.attempt)
        if save.commit is not None and save.session.rank == 0:
            self.keeping.committed(self.run.log_of(save.session))

    def restore(
        self,
        session: Session,
        want: pb.RestoreRequest.Want,
        requests: Iterator[pb.RestoreRequest],
        alive: Callable[[], bool],
    ) -> Iterator[pb.RestoreReply]:
        """Serve the frames of a checkpoint."""
        self.keeping.stop_prefetch()
        restore = Restore(run=self.run, session=session, want=want, keeper=self.keeper, log=self.log)
        session.streams += 1
        try:
            yield from restore.serve(requests, alive)
        finally:
            session.streams -= 1
            if restore.source and (want.boxes or not session.boxes):  # blobs come first, rows last
                self.reports.restored(session, step=restore.step, source=restore.source)

    # Time.

    def tick(self) -> bool:
        """Once in a while: timers, dead trainers, silent streams. False when a lingering sidecar may exit."""
        self.keeper.sweep()
        for session in self.sessions.all():
            self.direct(session)
        for session in self.sessions.reap(lambda rank: self.keeper.writer_pid(rank) is not None):
            self.log.info("trainer.gone", session=session.id, rank=session.rank)
            self._lost(session)
            for cancel in self._cancel_streams.pop(session.id, []):
                cancel()
            self.keeper.dismiss(session.local_rank)
        now_s = time.monotonic()
        for save in list(self._saves.values()):
            if save.staging and now_s - save.heard_s > self.settings.stream_idle_s:
                save.cancel(Cause.DEADLINE, f"the trainer said nothing for {self.settings.stream_idle_s} s")
        self.metrics.spooled.set(self.run.cache_bytes())
        self.run.forget_others(self._sessions_in_use)
        if self.sessions.all() or self.in_flight():
            self._idle_since_s = now_s
        linger_s = self.settings.linger_s
        return linger_s < 0 or now_s - self._idle_since_s < linger_s

    def _lost(self, session: Session) -> None:
        """A trainer went without a word; what it had staged goes on."""
        self.reports.lost(session, step=self.keeper.step_of(session.local_rank))
        self._stopped_saving(session)

    def _stopped_saving(self, session: Session) -> None:
        """The trainer is gone: only a save that is on its way is worth waiting for."""
        if not any(save.cut.attempt == session.attempt for save in self.in_flight()):
            self.closings.end(session.attempt)

    def _sessions_in_use(self) -> set[str]:
        """Ids of the attached sessions and of those whose last save still goes on without them."""
        return {s.id for s in self.sessions.all()} | {save.session.id for save in self.in_flight()}

    def detach(self, request: pb.DetachRequest) -> pb.DetachReply:
        """A trainer leaves; with `wait`, once its save has ended or the deadline passed."""
        session = self.sessions.get(request.session)
        save = self._saves.get(session.local_rank)
        idle = save is None or save.over.is_set()
        if request.wait and save is not None:
            idle = save.over.wait(request.deadline_s or self.settings.save_deadline_s)
        last = session.last_commit
        self.reports.left(session, step=self.keeper.step_of(session.local_rank), idle=idle)
        self.sessions.close(session)
        for cancel in self._cancel_streams.pop(session.id, []):
            cancel()
        self._stopped_saving(session)
        self.keeper.dismiss(session.local_rank)
        self.log.info("trainer.detached", session=session.id, rank=session.rank, idle=idle)
        return pb.DetachReply(last_commit=last, idle=idle)

    # The end.

    def terminate(self, hurry: threading.Event) -> None:
        """Finish or abort what is in flight, by the deadline or `hurry`; afterwards nothing is half done."""
        self.stopping = True
        self.keeping.stop()
        deadline_s = time.monotonic() + self.settings.term_deadline_s
        self.closings.begin({save.cut.attempt for save in self.in_flight()})
        for save in self.in_flight():
            while not (hurry.is_set() or save.over.wait(0.05)) and time.monotonic() < deadline_s:
                pass
        for save in self.in_flight():
            save.cancel(Cause.STOPPING, "the sidecar had to stop before this save was durable")
        self.closings.end_all()
        for session in self.sessions.all():
            self.sessions.close(session)
        self.pool.shutdown(wait=False, cancel_futures=True)
