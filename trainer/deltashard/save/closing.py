"""The last snapshot: `close()` makes the last step boundary durable or raises the reason why it is not.

No further step follows, so this snapshot is also taken in states in which an earlier boundary would wait, with a
warning
about what is inexact. Without other ranks, a last snapshot whose bits were chosen below 8 is taken again with 8 bits.
"""

from __future__ import annotations

import contextlib
import logging
import time

from deltashard_proto.block_reason import BlockReason

from deltashard.attach.attachment import RunMember
from deltashard.attach.session import Link
from deltashard.errors import SaveFailed, UserError
from deltashard.program import TrainingLoop
from deltashard.save.coordinator import SnapshotCoordinator
from deltashard.save.handle import SaveHandle
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.records import SaveRecords
from deltashard.save.save_loop import SaveLoop
from deltashard.save.snapshot_gate import MESSAGE, Asker, SnapshotGate
from deltashard.save.taker import SnapshotTaker

log = logging.getLogger("deltashard")


class LastSnapshot:
    """Takes the last snapshot of a Checkpointer; used on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        outcomes: SnapshotOutcomes,
        taker: SnapshotTaker,
        *,
        save_loop: SaveLoop,
        coordinator: SnapshotCoordinator | None,
    ) -> None:
        """`coordinator` is None without other ranks."""
        self._tracking = loop.program.tracking
        self._clock = loop.clock
        self._step_boundary = loop.step_boundary
        self._attachment = member.attachment
        self._attempt = member.attempt
        self._requests = records.requests
        self._failure_tracker = records.failure_tracker
        self._outcomes = outcomes
        self._taker = taker
        self._save_loop = save_loop
        self._ranks = coordinator

    def finish(self, until_s: float) -> None:
        """Make the last step boundary durable by `until_s` (monotonic), or raise."""
        if self._outcomes.copying is not None:
            raise SaveFailed(
                "close() was called during a snapshot, by a signal handler or a getter of state=",
                where="close()",
                remedy="set a flag in the handler, and close after step()",
            )
        self._outcomes.drain(until_s)
        self._outcomes.apply()
        self._requests.fail_unbound(self._clock.step)
        self._failure_tracker.use_closing_backoff()
        self._outcomes.check_snapshot(until_s)
        with contextlib.nullcontext() if self._ranks is None else self._ranks.coordinator_thread.hold_step():
            if self._ranks is not None:
                self._ranks.decline_missed(last=True)
            try:
                self._finish(until_s)
            except SaveFailed as error:
                step = self._clock.step
                if self._outcomes.committed_step != step or self._requests.exact_at(step):
                    raise
                self._requests.fail(error)
                log.warning("step %d is durable, but saving it again failed: %s", step, error)

    def _finish(self, until_s: float) -> None:
        last: Exception | None = None
        before, tried = self._failure_tracker.last, False
        while self._is_needed():
            gate = self._taker.gate()
            wait = gate.block_reason(Asker.CLOSE)
            self._raise_failure(wait, last, tried=tried, late=time.monotonic() >= until_s)
            if wait is BlockReason.UNOPENED:
                last = self._save_loop.open_late(patient=True) or last
                wait = self._taker.gate().block_reason(Asker.CLOSE)
            link = self._attachment.link
            if wait is None and link is not None and not self._is_backing_off:
                tried = True
                self._warn_inexact(gate)
                last = self._take(link, until_s) or last
                if self._failure_tracker.last is not before and isinstance(
                    self._failure_tracker.last, UserError
                ):
                    raise self._not_durable(last)  # retrying does not help
            if not self._outcomes.in_flight:
                self._clock.clear_wake()
                self._clock.pause(min(0.2, max(0.0, until_s - time.monotonic())))
            elif not self._outcomes.drain(until_s):
                last = SaveFailed("the save is still uploading", where="close()")
            self._outcomes.apply()

    def _is_needed(self) -> bool:
        step = self._clock.step
        if self._requests.open or step not in {self._outcomes.committed_step, self._attempt.resumed_step}:
            return step > 0
        # Ranks do not agree on whether a snapshot was stored with fewer bits.
        return self._ranks is None and self._outcomes.coarse is not None

    def _raise_failure(
        self, wait: BlockReason | None, last: Exception | None, *, tried: bool, late: bool
    ) -> None:
        """Raise the error that ends the retries; `last` is the failure of the previous try."""
        step = self._clock.step
        if wait in (BlockReason.TORN, BlockReason.STEPPED):
            raise SaveFailed(
                MESSAGE[wait], where="close()", remedy="step() must be the last statement of the loop body"
            )
        if late:
            raise self._not_durable(last)
        if tried and self._ranks is None and self._outcomes.committed_step == step:
            raise SaveFailed(f"it failed: {last or self._failure_tracker.last}", where="close()")
        if self._failure_tracker.run_removed is not None and (tried or self._attachment.link is None):
            raise SaveFailed(
                f"step {step} is not durable: {self._failure_tracker.run_removed}",
                where=self._attachment.url,
                remedy="there is no run to wait for; start the run again with a new process",
            )

    @property
    def _is_backing_off(self) -> bool:
        return self._failure_tracker.backing_off and not (self._ranks is not None and self._ranks.is_due)

    def _take(self, link: Link, until_s: float) -> Exception | None:
        """Take the last snapshot; return the error if it failed or cannot be taken yet."""
        if self._ranks is not None:
            return self._take_collective(self._ranks)
        if (veto := self._taker.veto()) is not None:
            raise veto
        handle = SaveHandle(reason="close", pin=None, metadata={})
        self._requests.add(handle)
        for each in [] if (coarse := self._outcomes.coarse) is None else coarse.handles:
            # Pins and metadata move to the checkpoint with 8 bits.
            self._requests.add(SaveHandle(reason="close", pin=each.pin, metadata=each.metadata))
        self._taker.take(link, "close", latest_s=until_s)
        return handle.error

    def _take_collective(self, ranks: SnapshotCoordinator) -> Exception | None:
        if ranks.coordinator_thread.down_reason or ranks.coordinator_thread.rank_closed:
            raise SaveFailed(
                f"step {self._clock.step} is not durable: {ranks.cancel_reason}",
                where="close()",
                remedy="call close() on every rank after the same step; check why the other rank ended",
            )
        if ranks.take_ordered(at_step=False, close=True):
            return None
        ranks.request(reason="close", urgent=True)
        return SaveFailed(ranks.cancel_reason, where="close()") if ranks.cancel_reason else None

    def _warn_inexact(self, gate: SnapshotGate) -> None:
        """Warn about state that a resumed run will miss or repeat, since `close()` cannot wait for a whole step."""
        accumulating = BlockReason.ACCUMULATING in gate.reasons
        if (
            accumulating
            and self._tracking.has_gradients
            and self._failure_tracker.is_first_report("unfinished")
        ):
            log.warning(
                "the last step() ended no step of an optimizer given to the Checkpointer: the checkpoint of close() "
                "misses the gradients accumulated since then"
            )
        if self._step_boundary.moved and self._failure_tracker.is_first_report("moved"):
            log.warning(
                "a forward pass in training mode ran after the last step(): the checkpoint of close() contains the "
                "buffers and random numbers that it changed. Evaluate with torch.no_grad(), or after model.eval()"
            )

    def _not_durable(self, last: Exception | None) -> SaveFailed:
        """Return the error of `close()`, with `where` and `remedy` of the cause if that is a user error."""
        what = f"step {self._clock.step} is not durable"
        failure = self._failure_tracker.last
        if isinstance(failure, UserError):
            return SaveFailed(f"{what}: {failure.what}", where=failure.where, remedy=failure.remedy)
        return SaveFailed(
            f"{what}: {last or failure or 'the sidecar is away'}",
            where=self._attachment.url,
            remedy="the newest committed checkpoint is complete; "
            + (
                "check the sidecar's log for errors of the store"
                if self._ranks is None or not self._ranks.cancel_reason
                else "call close() on every rank after the same step"
            ),
        )
