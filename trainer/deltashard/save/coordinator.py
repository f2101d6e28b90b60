"""Snapshots of several ranks: a rank proposes a snapshot, all ranks order it, and the boundary at its step takes it.

    boundary   wait for the verdict of an open round -> take the due snapshot -> propose the requested one
    exact      a save bound to this step holds the boundary until all ranks have answered; all must request it

The sums of replicated tensors are compared with every snapshot. If they differ between ranks, saving stops with an
error,
because one rank's values would be saved for all.
"""

from __future__ import annotations

import logging
import time

from deltashard_proto.block_reason import BlockReason

from deltashard.attach.attachment import RunMember
from deltashard.errors import RanksDiffer, SaveFailed
from deltashard.group.coordinator_thread import ANSWER_S, CoordinatorThread
from deltashard.group.snapshot_round import Proposal
from deltashard.program import TrainingLoop
from deltashard.restore.collective import check_replicas_equal
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.records import SaveRecords
from deltashard.save.snapshot_gate import MESSAGE, Asker
from deltashard.save.taker import SnapshotTaker
from deltashard.state.replica import sums

log = logging.getLogger("deltashard")

EXACT_TIMEOUT_S = 2 * ANSWER_S
"""Seconds for which a boundary waits for the other ranks on behalf of an exact save."""


class SnapshotCoordinator:
    """Coordinates the snapshots of one rank with the other ranks; used on the training thread only."""

    def __init__(
        self,
        coordinator_thread: CoordinatorThread,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        outcomes: SnapshotOutcomes,
        taker: SnapshotTaker,
    ) -> None:
        self.coordinator_thread = coordinator_thread
        self._program = loop.program
        self._clock = loop.clock
        self._attachment = member.attachment
        self._listener = member.listener
        self._requests = records.requests
        self._failure_tracker = records.failure_tracker
        self._outcomes = outcomes
        self._taker = taker
        self._cancelled = 0
        self._reported = False

    @property
    def cancel_reason(self) -> str:
        """Reason why the last round was cancelled; empty if there was no round or one is due."""
        return self.coordinator_thread.down_reason or self.coordinator_thread.cancel_reason

    @property
    def is_due(self) -> bool:
        """Whether a snapshot is ordered for the current step."""
        return self.coordinator_thread.due_at(self._clock.step) is not None

    def at_boundary(self, *, at_step: bool) -> None:
        """Take the snapshot ordered for this boundary; propose one if a save is requested."""
        if self.take_ordered(at_step=at_step):
            return
        step, coordinator_thread = self._clock.step, self.coordinator_thread
        coordinator_thread.set_lead(self._outcomes.precopy.lead_s)
        if (due_step := coordinator_thread.due_step) is not None and due_step > step:
            self._taker.begin_precopy(due_step, at_step=at_step)
        if (
            self._requests.exact_at(step)
            and self._taker.gate(at_step=at_step).block_reason(Asker.REQUEST) is None
        ):
            self._await_exact(step, at_step=at_step)
            self.take_ordered(at_step=at_step)  # an order may arrive while the wait gives up
        elif self._requests.has_inexact or self._requests.urgent is not None:
            self.request(reason=self._requests.reason, urgent=self._requests.urgent is not None)
        if coordinator_thread.pending:
            self._clock.request_boundary()

    def take_ordered(self, *, at_step: bool, close: bool = False) -> bool:
        """Take the due snapshot once the boundary's verdict is known; return whether one was taken."""
        self.coordinator_thread.wait_for_verdict(self._clock.step)
        self._report_cancelled()
        self._check_replicas_equal()
        snapshot_id = self.coordinator_thread.due_at(self._clock.step)
        self.decline_missed(last=close)
        if snapshot_id is None:
            return False
        wait = self._taker.gate(at_step=at_step).block_reason(Asker.CLOSE if close else Asker.WAITER)
        if wait is not None and wait not in (BlockReason.SIDECAR_DISCONNECTED, BlockReason.IN_FLIGHT):
            self._taker.record_blocked(wait, quiet=True)
            return False  # the same on all ranks: taken at the next whole step
        self.coordinator_thread.mark_taken(snapshot_id)
        link = self._attachment.link
        if wait is not None or link is None:
            wait = wait or BlockReason.SIDECAR_DISCONNECTED
            self._decline(snapshot_id)
            self._taker.record_blocked(wait)
            self._requests.fail(
                SaveFailed(
                    f"this rank has no part in the snapshot of step {self._clock.step}: {MESSAGE[wait]}",
                    where="save",
                    remedy="the next save covers its rows",
                )
            )
            return False
        if (veto := self._taker.veto()) is not None:
            self._decline(snapshot_id)
            if close:
                raise veto
            self._requests.fail(veto)
            return False
        urgent = self._requests.urgent is not None
        # A rank that is still ending its last step when the others close gives another reason.
        reason = "close" if close and not urgent else self._requests.reason
        self._taker.take(link, reason, urgent=urgent, snapshot_id=snapshot_id)
        if not self._outcomes.in_flight:
            self._decline(snapshot_id)
        self.coordinator_thread.publish_sums(snapshot_id, sums(self._program.tracking.replicas, snapshot_id))
        return True

    def decline_missed(self, *, last: bool = False) -> None:
        """Decline the snapshot in which this rank takes no part; `last`: this rank ends no further step."""
        if (missed := self.coordinator_thread.take_missed(last=last)) is not None:
            self._outcomes.decline_later(missed)
        self._outcomes.send_decline()

    def request(self, *, reason: str, urgent: bool) -> None:
        """Propose a snapshot; it is ordered once all ranks can take it."""
        if self.coordinator_thread.down_reason:
            self._failure_tracker.skipped("no group")
            return
        self.coordinator_thread.request(Proposal(reason=reason, urgent=urgent))

    def _decline(self, snapshot_id: int) -> None:
        self._outcomes.decline_later(snapshot_id)
        self._outcomes.send_decline()

    def _await_exact(self, step: int, *, at_step: bool) -> None:
        """Hold the boundary at `step` until its snapshot is taken; fail its exact saves if other ranks do not join."""
        until_s = time.monotonic() + EXACT_TIMEOUT_S
        with self.coordinator_thread.hold_step():
            while not self.coordinator_thread.down_reason and time.monotonic() < until_s:
                self._clock.clear_wake()
                if self.take_ordered(at_step=at_step):
                    return
                self.coordinator_thread.request(Proposal(reason=self._requests.reason, at=step, exact=True))
                self._clock.pause(0.2)
        self.coordinator_thread.withdraw_exact()
        self._requests.fail_exact(
            step,
            f"not all ranks requested it after the same step: {self.cancel_reason or 'no answer in time'}",
        )

    def _report_cancelled(self) -> None:
        if self.coordinator_thread.cancelled == self._cancelled:
            return
        self._cancelled = self.coordinator_thread.cancelled
        self._failure_tracker.skipped("round cancelled")
        self._requests.record_blocked(self.coordinator_thread.cancel_reason)

    def _check_replicas_equal(self) -> None:
        if not self.coordinator_thread.sums or self._reported:
            return
        self._reported = True
        try:
            check_replicas_equal(self._program, self.coordinator_thread.sums)
        except RanksDiffer as error:
            log.error("%s", error)  # noqa: TRY400 - the message is complete without a traceback
            self._listener.emit("replicas_differ", error=str(error), step=self._clock.step)
            self._requests.fail(error)
