"""Begin and end of saves. A failed save affects no other part of the sidecar.

Each rank has at most one save in flight. An urgent save replaces a periodic one that is staging, and waits for one that
is uploading.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.write.precision import encoded_alike
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.deciding.measurements import Cost, MeasuredSave
from deltashard_sidecar.deciding.step_meter import Reading
from deltashard_sidecar.maintenance import MaintenanceLoop
from deltashard_sidecar.parts import Parts
from deltashard_sidecar.policy import chooses_bits, format_directive
from deltashard_sidecar.run.bit_choice import VisibleRanks
from deltashard_sidecar.run.snapshot_content import SnapshotContent
from deltashard_sidecar.save.joint_commit import JointCommits
from deltashard_sidecar.save.preparation import Preparation
from deltashard_sidecar.save.save import Save
from deltashard_sidecar.save.sink import PERIODIC, PartSink, SaveDecisions, decline
from deltashard_sidecar.save_orders import SaveOrders
from deltashard_sidecar.session.attachment import Attachment
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.trainer_control import TrainerControl

URGENT_WAIT_S = 3.0
"""Longest wait of an urgent save for one that is uploading; after it the save is refused, and requested again later."""
BRIEF_WAIT_S = float(os.environ.get("DELTASHARD_BRIEF_WAIT_S", "1"))
"""Longest wait of a save for an end that is already under way."""
ENCODE_NICENESS = 10
"""Niceness of encoding threads: on shared cores (a laptop) training and the copy of a save take precedence."""


class SaveRefused(Exception):
    """A save was refused; `reply` has cause and message."""

    def __init__(self, snapshot_id: int, cause: Cause, message: str) -> None:
        super().__init__(message)
        failed = pb.SaveReply.Failed(snapshot_id=snapshot_id, cause=cause, message=message)
        self.reply = pb.SaveReply(failed=failed)


def _yield_to_training() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENCODE_NICENESS)


class SaveService:
    """Begins and ends every save. Thread-safe: its own state is only the ranks that died, by local rank."""

    def __init__(
        self, parts: Parts, *, control: TrainerControl, maintenance: MaintenanceLoop, orders: SaveOrders
    ) -> None:
        self.pool = ThreadPoolExecutor(
            parts.settings.threads, thread_name_prefix="encode", initializer=_yield_to_training
        )
        self._parts = parts
        self._run = parts.run
        self._joint = JointCommits()
        self._lost_ranks: dict[int, tuple[Attachment, int]] = {}
        self._control = control
        self._maintenance = maintenance
        self._orders = orders

    def begin(self, session: Session, begin: pb.SaveRequest.Begin) -> Save:
        """Begin a save; raises `SaveRefused`, after reporting to peers that this rank's part will not arrive."""
        attempt = session.attempt
        if attempt is not None and (why := self._run.still_removed(session.attachment, attempt)) is not None:
            self._parts.metrics.failures.labels(Cause.REMOVED).inc()
            raise SaveRefused(begin.snapshot_id, Cause.REMOVED, why)
        try:
            return self._start(session, begin)
        except SaveRefused:
            if attempt is not None and session.attachment.world_size > 1:
                decline(self._run, session.attachment, attempt, begin.snapshot_id, joint=self._joint)
            raise

    def prepare(
        self, session: Session, begin: pb.SaveRequest.Begin, preparation: Preparation
    ) -> Iterator[pb.SaveReply]:
        """Grant blocks for an upcoming save of this session, and reply with what a save that began now would cover."""
        running, why = self._parts.in_flight_saves.of_rank(session.attachment.local_rank), self._run.removed
        attempt = 0
        try:
            attempt = _attempt_of(session, begin)
        except SaveRefused as refused:
            why = str(refused)
        if why is None and running is not None and not running.has_ended:
            why = "another save of this rank is in flight"
        if why is not None:
            yield pb.SaveReply(prepared=pb.SaveReply.Prepared(refused=why))
            return
        content = self._content(session, attempt, begin, self._ranks(session))
        since = self._since(session, attempt, begin, content)
        granted = preparation.grant()
        if session.attachment.rank == 0:
            self._parts.decider.precopy_started()
        crash_point("stage.prepared")
        prepared = pb.SaveReply.Prepared(covers=content.covers, fresh_first=since is not None)
        yield pb.SaveReply(prepared=prepared)
        yield pb.SaveReply(blocks=pb.SaveReply.Blocks(granted=granted))

    def trainer_lost(self, session: Session) -> None:
        """Withdraw a dead rank from the saves of its attempt that it had not begun itself."""
        attempt, attachment = session.attempt, session.attachment
        if attempt is None or attachment.world_size == 1:
            return
        self._lost_ranks[attachment.local_rank] = attachment, attempt
        in_flight = self._parts.in_flight_saves.in_flight()
        for snapshot_id in {
            save.decisions.snapshot_id for save in in_flight if save.decisions.attempt == attempt
        }:
            self._decline_for_lost(attempt, snapshot_id)

    def trainer_reattached(self, session: Session) -> None:
        _, lost_attempt = self._lost_ranks.get(session.attachment.local_rank, (None, None))
        if lost_attempt is not None and lost_attempt == session.attempt:
            del self._lost_ranks[session.attachment.local_rank]

    def _decline_for_lost(self, attempt: int, snapshot_id: int) -> None:
        for attachment, lost_attempt in list(self._lost_ranks.values()):
            last = self._parts.in_flight_saves.of_rank(attachment.local_rank)
            brought = last is not None and (last.decisions.attempt, last.decisions.snapshot_id) == (
                attempt,
                snapshot_id,
            )
            if lost_attempt == attempt and not brought:
                decline(self._run, attachment, attempt, snapshot_id, joint=self._joint, process_died=True)

    def _start(self, session: Session, begin: pb.SaveRequest.Begin) -> Save:
        _attempt_of(session, begin)
        parts, rank = self._parts, session.attachment.local_rank
        self._wait_for_previous(rank, begin)
        parts.keeper.copies_stopped(rank)
        save = parts.in_flight_saves.begin(rank, lambda: self._create(session, begin))
        if save is None:
            raise SaveRefused(begin.snapshot_id, Cause.BUSY, "another save of this rank is in flight")
        if begin.urgent:
            self._control.urgent_started(session)
        self._control.write_control_line(session)
        if begin.tracking_faults:
            parts.activity.tracking_fault(begin.tracking_faults, step=begin.step)
            parts.metrics.tracking_faults.inc(begin.tracking_faults)
        self._decline_for_lost(save.decisions.attempt, save.decisions.snapshot_id)
        save.log.info("save.started", reason=save.decisions.reason, covers=save.decisions.content.covers)
        return save

    def _create(self, session: Session, begin: pb.SaveRequest.Begin) -> Save:
        """Plan and create the save. Called under the lock of `InFlightSaves`, so the save cannot end before."""
        attempt = _attempt_of(session, begin)  # another may have been opened while an urgent save waited
        parts, decisions = self._parts, self._plan(session, attempt, begin)
        save = Save(
            session=session,
            decisions=decisions,
            sink=PartSink(
                self._run,
                session.attachment,
                decisions,
                joint=self._joint,
                expected=lambda: self._expected(decisions),
            ),
            keeper=parts.keeper,
            submit=self.pool.submit,
            metrics=parts.metrics,
            log=parts.log,
            ended=self._ended,
        )
        self._control.save_started(session, attempt, step=begin.step)
        if session.attachment.rank == 0:
            # The trainer waits at the boundary of that step, so its control line does not change.
            reading = Reading(begin.step, parts.keeper.step_time_s(session.attachment.local_rank))
            parts.decider.save_started(
                MeasuredSave(
                    snapshot_id=decisions.snapshot_id, started=reading, timed=decisions.reason in PERIODIC
                ),
                planned_steps=begin.planned_steps,
                partial=begin.pls_target > 0,
            )
        return save

    def _plan(self, session: Session, attempt: int, begin: pb.SaveRequest.Begin) -> SaveDecisions:
        """Decide what the save contains and how long it may block training, without a request to the store."""
        parts, active_policy, attachment = self._parts, self._control.active_policy, session.attachment
        ranks = self._ranks(session)
        content = self._content(session, attempt, begin, ranks)
        if content.override:
            parts.log.info(
                "save.content_overridden",
                snapshot_id=begin.snapshot_id,
                covers=content.covers,
                why=content.override,
            )
        waits = session.waits_for_stall
        if waits:
            parts.log.warning(
                "save.waiting_for_stall", aborted=session.stall_aborts, snapshot_id=begin.snapshot_id
            )
        # A save that is larger than the arena can only proceed as batches are encoded: abort and retry take longer.
        waits |= (
            content.covers is None and attachment.raw_bytes > parts.settings.blocks * parts.keeper.block_bytes
        )
        closing = begin.urgent or begin.reason == "close"
        return SaveDecisions(
            attempt=attempt,
            snapshot_id=begin.snapshot_id,
            step=begin.step,
            reason=begin.reason,
            urgent=begin.urgent,
            content=content,
            stall_budget_s=0.0 if waits else parts.settings.stall_budget_s,
            deadline_s=parts.settings.save_deadline_s,
            since=self._since(session, attempt, begin, content),
            samples=chooses_bits(active_policy.policy) and (attachment.rank == 0 or ranks.is_complete),
            layout=session.layout,
            orders=self._orders.open(),
            directive_text=None
            if active_policy.directive is None
            else format_directive(active_policy.directive),
            profile=parts.decider.text(closing=closing) if attachment.rank == 0 else None,
        )

    def _content(
        self, session: Session, attempt: int, begin: pb.SaveRequest.Begin, ranks: VisibleRanks
    ) -> SnapshotContent:
        attachment, policy, expected = (
            session.attachment,
            self._control.active_policy.policy,
            self._parts.decider.expected(),
        )
        return self._run.snapshot_contents.decide(
            self._run.state(), attachment, attempt, begin, policy, expected, ranks
        )

    def _since(
        self, session: Session, attempt: int, begin: pb.SaveRequest.Begin, content: SnapshotContent
    ) -> int | None:
        """Return the trainer's newest commit if the save marks which rows changed since then; otherwise None."""
        commit = begin.since_commit_seq if begin.HasField("since_commit_seq") else None
        # IMPORTANT: a trainer that requests all rows must not rely on its marks.
        if commit is None or begin.full or commit == content.covers:
            return None
        state, attachment = self._run.state(), session.attachment
        alike = encoded_alike(state, attempt, commit, tables=attachment.tables, precision=content.precision)
        return commit if alike else None

    def _ranks(self, session: Session) -> VisibleRanks:
        others = (s.attachment for s in self._parts.sessions.all() if s.attempt == session.attempt)
        found = {attachment.rank: attachment for attachment in (*others, session.attachment)}
        tables = {table.fqn: table for attachment in found.values() for table in attachment.tables}
        return VisibleRanks(
            tables=tuple(tables.values()), is_complete=len(found) == session.attachment.world_size
        )

    def _expected(self, decisions: SaveDecisions) -> set[int]:
        """Return this pod's ranks that contribute to the snapshot: they train in its attempt, or are saving it."""
        trains = {s.attachment.rank for s in self._parts.sessions.all() if s.attempt == decisions.attempt}
        saves = {
            save.attachment.rank
            for save in self._parts.in_flight_saves.in_flight()
            if (save.decisions.attempt, save.decisions.snapshot_id)
            == (decisions.attempt, decisions.snapshot_id)
        }
        return trains | saves

    def _wait_for_previous(self, rank: int, begin: pb.SaveRequest.Begin) -> None:
        """Wait for the previous save of the rank; raises `SaveRefused` if it is still in flight.

        An urgent save cancels one that is staging and waits up to `URGENT_WAIT_S` for one that is uploading. Any other
        save waits only for an end under way: an abort, the close of a stream, or a notification.
        """
        running = self._parts.in_flight_saves.of_rank(rank)
        if running is None:
            return
        if begin.urgent and running.staging and not running.decisions.urgent:
            running.cancel(Cause.SUPERSEDED, f"an urgent save ({begin.reason}) takes its place")
        brief = running.staging or running.has_ended
        timeout_s = URGENT_WAIT_S if begin.urgent else BRIEF_WAIT_S if brief else 0.0
        if running.finished.wait(timeout_s) and running.stream_finished.wait(BRIEF_WAIT_S):
            return
        self._parts.metrics.skipped.inc()
        raise SaveRefused(
            begin.snapshot_id,
            Cause.BUSY,
            f"snapshot {running.decisions.snapshot_id} is {running.state.value.lower()}",
        )

    def _ended(self, save: Save) -> None:
        parts, decisions, commit, rank0 = self._parts, save.decisions, save.commit, save.attachment.rank == 0
        # Several saves of the pod may form one checkpoint: one of them counts it.
        same = [
            s.attachment.local_rank
            for s in parts.in_flight_saves.newest()
            if s.decisions.snapshot_id == decisions.snapshot_id
        ]
        if commit is not None and save.attachment.local_rank == min(same, default=save.attachment.local_rank):
            parts.metrics.committed(step=commit.step, baseline=commit.baseline, durable_s=commit.durable_s)
            facts = {"seq": commit.seq, "baseline": commit.baseline, "stored_bytes": commit.stored_bytes}
            save.log.info("save.committed", durable_s=round(commit.durable_s, 3), **facts)
        parts.activity.ended(save)
        self._orders.ended(save)
        self._control.ended(save)
        if rank0:
            parts.decider.save_ended(decisions.snapshot_id, self._cost(save))
        # In this order: a save is in flight before the request for it is withdrawn.
        urgent_pending = self._control.is_urgent_pending(decisions.attempt)
        others = (each for each in parts.in_flight_saves.in_flight() if each is not save)
        if not urgent_pending and all(each.decisions.attempt != decisions.attempt for each in others):
            parts.markers.end(decisions.attempt)
        full = commit is None and save.failure[0] is Cause.FULL
        if rank0 and (commit is not None or full):
            self._maintenance.due(self._run.log_of(save.attachment), decisions.attempt, full=full)

    def _cost(self, save: Save) -> Cost | None:
        commit, seal = save.commit, save.sealed
        if commit is None or seal is None:
            return None
        entry = self._run.log_of(save.attachment).state.checkpoints.get(commit.seq)
        stall_s = seal.stall_s if entry is None else entry.stall_s  # of the slowest rank
        return Cost(stall_s=stall_s, slowdown_s=seal.slowdown_s, durable_s=commit.durable_s)


def _attempt_of(session: Session, begin: pb.SaveRequest.Begin) -> int:
    """Return the attempt of a session's save; raises `SaveRefused` if the session must not commit."""
    attempt, fence = session.attempt, session.fence
    if fence is not None:
        raise SaveRefused(begin.snapshot_id, *fence)
    if attempt is None:
        raise SaveRefused(begin.snapshot_id, Cause.INVALID, "no attempt is open: call restore() first")
    return attempt
