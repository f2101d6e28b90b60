"""Attach and open an attempt, before the first step.

Opening wins a slot of the commit log and thereby fences every older trainer of the run. Rank 0 opens for all ranks of
a group (`collective`); the other ranks then attach again with the attempt it won.

A store that is full or read-only accepts no entry. Its contents are restored, training begins, and the attempt is
opened late, with a request built from the sidecar's reply (`OpenRequest.basis`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.rank import Rank, check_unchanged
from deltashard.attach.retry import DEADLINE_S, Retry
from deltashard.attach.session import Link
from deltashard.errors import (
    DeltashardError,
    NotRestored,
    RestoreFailed,
    SidecarGone,
    SidecarUnavailable,
    UserError,
)
from deltashard.group.coordinator_thread import CoordinatorThread
from deltashard.program import Program, TrainingLoop
from deltashard.restore.collective import CollectiveRestore
from deltashard.restore.recovery_plan import RecoveryPlan

log = logging.getLogger("deltashard")

LATE_DEADLINE_S = 15.0
"""Limit of the time that training waits for a late open; the sidecar's own limit is shorter."""


def attach_request(program: Program, rank: Rank, attempt: int | None, layout: str) -> pb.AttachRequest:
    """Build the Attach request of this process; `attempt` is the open attempt, if any, with its `layout`."""
    request = pb.AttachRequest(
        protocol_min=TRAINER_PROTOCOL.least,
        protocol_max=TRAINER_PROTOCOL.most,
        rank=rank.number,
        local_rank=rank.local,
        world_size=rank.world_size,
        tables=[table_message(schema) for schema in program.schemas],
        boxes=[box_message(box) for box in program.boxes],
        fingerprint=program.fingerprint,
        pid=os.getpid(),
        blob_bytes=program.dense_bytes,
        layout=layout,
    )
    if attempt is not None:
        request.attempt = attempt
    return request


class AttemptOpener:
    """Opens attempts over the current link; on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        *,
        apply_notifications: Callable[[], None],
        fresh: bool,
        coordinator_thread: CoordinatorThread | None,
        plan: RecoveryPlan,
    ) -> None:
        """`apply_notifications` raises `FencedError`; `fresh`: start from scratch although the run has checkpoints.

        `coordinator_thread` is None if this process is the only rank.
        """
        self._program = loop.program
        self._clock = loop.clock
        self._rank = member.rank
        self._attempt = member.attempt
        self._attachment = member.attachment
        self._listener = member.listener
        self._apply_notifications = apply_notifications
        self._fresh = fresh
        self._coordinator_thread = coordinator_thread
        self._plan = plan
        self.partially_restored = False
        """Whether a restore wrote into the model and did not finish; only `Restorer` sets it."""
        self._last_request = pb.OpenRequest()

    def retry(self, what: str, deadline_s: float, final: type[SidecarUnavailable | RestoreFailed]) -> Retry:
        """Create the retry budget of one call; after `deadline_s` without a sidecar it raises `final`."""
        last_log_error = self._attachment.session.last_log_error
        return Retry(
            what, deadline_s=deadline_s, pause=self._clock.pause, final=final, last_log_error=last_log_error
        )

    def link(self, retry: Retry) -> Link:
        """Wait for the sidecar and return its link, with notifications applied; raises the final error of `retry`."""
        session = self._attachment.session
        before = session.refused
        while True:
            self._clock.clear_wake()
            self._apply_notifications()
            link = self._attachment.link
            if link is not None:
                return link
            refused = session.refused
            # A refusal that another attempt caused does not apply to this one.
            if refused is not None and refused is not before and refused[0] == self._attempt.granted[0]:
                raise refused[1]
            retry.record_failure(SidecarGone(session.disconnect_reason, where=self._attachment.run))
            self._clock.pause(0.2)

    def join_ranks(self, **call: object) -> CollectiveRestore | None:
        """Join the other ranks, which must make the same `call`; None: this process is the only rank.

        Raises `RanksDiffer` when the calls differ, and `UserError` when the process group changed.
        """
        check_unchanged(self._rank, "restore(), or the first step()")
        if self._rank.alone:
            return None
        attachment = self._attachment
        policy = attachment.policy
        facts = {
            "world size": self._rank.world_size,
            "run": attachment.run,
            "url": attachment.url,
            "encoding": f"{policy.encoding}, {policy.state_encoding}, {policy.differential}",
            "optimizers": [view.class_name for view in self._program.tracking.optimizers],
            "fresh": self._fresh,
            "recovery": self._plan.terms,
        } | {f"restore({name}=)": repr(value) for name, value in call.items()}
        link = attachment.link
        return CollectiveRestore(self._rank, self._program, facts, None if link is None else link.reply)

    def open(
        self, wanted: pb.OpenRequest, retry: Retry, collective: CollectiveRestore | None
    ) -> tuple[Link, pb.OpenReply]:
        """Open an attempt, retrying over sidecar restarts; returns the link that knows the attempt, and the reply.

        Raises `FencedError`, `UserError`, `RestoreFailed`, or the final error of `retry`.
        """

        def ask(together: pb.OpenRequest) -> pb.OpenReply:
            while True:
                try:
                    with retry.try_once():
                        link = self.link(retry)
                        request = pb.OpenRequest(session=link.session)
                        request.MergeFrom(wanted)
                        request.MergeFrom(together)
                        self._last_request = request
                        return link.open(request)
                except SidecarGone:
                    # It may have won the slot and died before it replied: the next try wins another slot.
                    retry.pause()

        if collective is None:
            reply = ask(pb.OpenRequest())
            link = self.link(retry)
        else:
            reply = collective.open(ask)
            with collective.reporting_failure("received" if reply.HasField("resume_seq") else "restored"):
                link = self._attach_to_attempt(reply, retry)
        if reply.log_damage:
            log.warning("run %r: %s", wanted.from_run or self._attachment.run, reply.log_damage)
            self._listener.emit(
                "fell_back" if reply.fell_back else "log_damaged",
                seq=reply.resume_seq if reply.HasField("resume_seq") else None,
                step=reply.step,
                why=reply.log_damage,
            )
        return link, reply

    def _attach_to_attempt(self, reply: pb.OpenReply, retry: Retry) -> Link:
        """Attach this rank's sidecar to the attempt that rank 0's sidecar opened for all."""
        self._attempt.grant(reply.attempt, reply.layout)
        link = self.link(retry)
        if self._rank.number == 0:
            return link
        while link.attempt != reply.attempt:
            again = self._attachment.session.reattach(until_s=retry.until_s)
            if again is not None:
                self._attachment.adopt(again)
            link = self.link(retry)
        return link

    def _late_request(self, reply: pb.OpenReply) -> pb.OpenRequest:
        request = pb.OpenRequest()
        request.CopyFrom(self._last_request)
        if request.from_run:  # another run was read; this run resumes nothing
            request.from_run, request.which = "", "none"
            del request.exclude_seqs[:]
        request.basis.CopyFrom(reply.basis)
        return request

    def open_late(self, link: Link) -> DeltashardError | None:
        """Try to open the attempt that this process already trains under; returns why it is not open, or None.

        Raises `FencedError` when another trainer has continued the run.
        """
        request = self._attempt.late
        if request is None:
            return None
        request.session = link.session
        try:
            reply = link.open(request, deadline_s=LATE_DEADLINE_S)
        except SidecarGone as gone:
            self._attachment.session.suspect(
                link, str(gone)
            )  # it may be stopped: training must not wait for it again
            return gone
        except (RestoreFailed, SidecarUnavailable, UserError) as error:
            return error
        self._attempt.begin(reply.attempt, resumed_step=self._attempt.resumed_step)
        log.info("attempt %d is open: saves begin", reply.attempt)
        return None

    def open_unrestored(self) -> None:
        """Open an attempt at the first `step()` of a program without a successful `restore()` call."""
        if self.partially_restored:
            raise NotRestored(
                "restore() failed after it had begun to write into the model, whose state now matches no step",
                where=self._attachment.run,
                remedy="call restore() again; to train without the checkpoint, build model and Checkpointer again",
            )
        collective = self.join_ranks(which="not called")
        retry = self.retry("the first step()", DEADLINE_S, SidecarUnavailable)
        wanted = pb.OpenRequest(which="none" if self._fresh else "latest")
        _, reply = self.open(wanted, retry, collective)
        if reply.HasField("resume_seq"):
            raise NotRestored(
                f"run {self._attachment.run!r} has checkpoints (the newest is of step {reply.step}), and restore() was "
                "not called",
                where=self._attachment.url,
                remedy="call restore() before the loop, pass fresh=True to start over, or choose another run name",
            )
        if collective is not None:
            collective.agree("restored")
        # Nothing was resumed, so this first step is not saved yet.
        self.begin(reply, step=self._clock.step, resumed=False, collective=collective)

    def begin(
        self,
        reply: pb.OpenReply,
        *,
        step: int,
        resumed: bool = True,
        collective: CollectiveRestore | None = None,
    ) -> None:
        """Begin training after `step` under the opened attempt; `resumed`: `restore()` set the model to that step."""
        if reply.HasField("basis"):
            log.warning(
                "no checkpoint is saved yet, because the store takes no entry: %s. Training continues from step %d; "
                "the store is retried, and saves begin when it accepts one",
                reply.deferred_reason,
                step,
            )
            self._clock.request_boundary()
        self._attempt.begin(
            None if reply.HasField("basis") else reply.attempt,
            resumed_step=step if resumed else None,
            late=self._late_request(reply) if reply.HasField("basis") else None,
        )
        self._clock.set(step)
        if collective is not None:
            collective.release_sent()
        self._plan.training_started(reply, "" if collective is None else collective.name)
        if self._coordinator_thread is not None and collective is not None:
            self._coordinator_thread.begin(collective.prefix)
