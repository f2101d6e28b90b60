"""Attach, and open an attempt: what happens before the first step.

Opening wins a slot of the commit log and so fences every older trainer of the run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import Attachment
from deltashard.attach.lifecycle import Attempt
from deltashard.attach.listener import Listener
from deltashard.attach.rank import refuse_several
from deltashard.attach.session import OPEN_DEADLINE_S, Link
from deltashard.errors import NotRestored, SidecarUnavailable
from deltashard.program import Program
from deltashard.tracking.stance import Stance
from deltashard.tracking.step_clock import StepClock

log = logging.getLogger("deltashard")


def attach_request(program: Program, attempt: int | None) -> pb.AttachRequest:
    """What an Attach says of this process and its tables; `attempt` is the one that is open, if any."""
    request = pb.AttachRequest(
        protocol_min=TRAINER_PROTOCOL.least,
        protocol_max=TRAINER_PROTOCOL.most,
        rank=0,
        local_rank=0,
        world_size=1,
        tables=[table_message(schema) for schema in program.schemas],
        boxes=[box_message(box) for box in program.boxes],
        fingerprint=program.fingerprint,
        pid=os.getpid(),
        blob_bytes=program.dense_bytes,
    )
    if attempt is not None:
        request.attempt = attempt
    return request


class AttemptOpener:
    """Opens attempts over the link that counts; on the training thread only."""

    def __init__(
        self,
        attachment: Attachment,
        attempt: Attempt,
        *,
        clock: StepClock,
        stance: Stance,
        listener: Listener,
        hear: Callable[[], None],
        fresh: bool,
    ) -> None:
        """`hear` applies news, and raises `FencedError`; `fresh`: begin anew although the run has checkpoints."""
        self._attachment = attachment
        self._attempt = attempt
        self._clock = clock
        self._stance = stance
        self._listener = listener
        self._hear = hear
        self._fresh = fresh

    def link(self) -> Link:
        """The link whose news is applied; waits for the sidecar, and raises `SidecarUnavailable` when it stays away."""
        until_s = time.monotonic() + OPEN_DEADLINE_S
        while True:
            self._clock.expect()
            self._hear()
            link = self._attachment.link
            if link is not None:
                return link
            if time.monotonic() >= until_s:
                raise SidecarUnavailable(
                    "the sidecar is away", where=self._attachment.run, remedy="look at its log"
                )
            self._clock.pause(0.2)

    def open(
        self, link: Link, *, which: str, from_run: str | None, exclude: Sequence[int], takeover: bool
    ) -> pb.OpenReply:
        """Ask for an attempt; raises `FencedError`, `UserError` or `RestoreFailed`."""
        # A process group may have been made since the Checkpointer was.
        refuse_several("restore(), or the first step()")
        request = pb.OpenRequest(
            session=link.session,
            which=which,
            from_run=from_run or "",
            exclude_seqs=exclude,
            takeover=takeover,
        )
        reply = link.open(request)
        if reply.log_damage:
            log.warning("run %r: %s", from_run or self._attachment.run, reply.log_damage)
            self._listener.emit(
                "fell_back" if reply.fell_back else "log_damaged",
                seq=reply.resume_seq if reply.HasField("resume_seq") else None,
                step=reply.step,
                why=reply.log_damage,
            )
        return reply

    def open_unrestored(self) -> None:
        """The first `step()` of a program that never called `restore()`."""
        link = self.link()
        reply = self.open(
            link, which="none" if self._fresh else "latest", from_run=None, exclude=(), takeover=False
        )
        if reply.HasField("resume_seq"):
            raise NotRestored(
                f"run {self._attachment.run!r} has checkpoints (the newest is of step {reply.step}), and restore() was "
                "not called",
                where=self._attachment.url,
                remedy="call restore() before the loop; fresh=True begins anew; or choose another run name",
            )
        # Nothing was resumed: even this first step is not saved yet.
        self.begin(reply, step=self._clock.step, resumed=False)

    def begin(self, reply: pb.OpenReply, *, step: int, resumed: bool = True) -> None:
        """Train on after `step` under the attempt that was opened; `resumed`: `restore()` left the model there."""
        self._attempt.begin(reply.attempt, resumed_step=step if resumed else None)
        self._clock.set(step)
        self._stance.settle()
