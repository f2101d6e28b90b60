"""Takes snapshots on behalf of `step()`, `save()` and its `wait()`, and SIGTERM; `closing` takes the last one.

`snapshot_gate` has the rules and `request` the pending requests. Waits run on the training thread, so every wait ends
by a deadline or because the sidecar is disconnected.
"""

from __future__ import annotations

import contextlib
import threading
import time

from deltashard_proto.block_reason import BlockReason

from deltashard.attach.attachment import RunMember
from deltashard.attach.term_signal import TermHandler
from deltashard.errors import DeltashardError, FencedError, SaveFailed, WaitError
from deltashard.group.coordinator_thread import CoordinatorThread
from deltashard.program import TrainingLoop
from deltashard.restore.open_attempt import AttemptOpener
from deltashard.save.coordinator import SnapshotCoordinator
from deltashard.save.handle import InFlightSave, SaveHandle
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.records import SaveRecords
from deltashard.save.snapshot_gate import MESSAGE, Asker
from deltashard.save.taker import SnapshotTaker
from deltashard.save.watchdog import BlockedBy
from deltashard.snapshot import save_stream

TERM_TRIES = 3
"""Number of tries of the snapshot requested by SIGTERM, within the grace period."""
MAX_DISCONNECTED_S = 300.0
"""Seconds without a sidecar after which a `wait()` without a timeout ends."""
OPEN_LATE_INTERVAL_S = 60.0
"""Seconds without an agreed snapshot of all ranks after which a `wait()` without a timeout ends."""
PROBE_S = 10.0
"""Seconds between checks of a `wait()` that the sidecar answers."""


class SaveLoop:
    """Takes snapshots and waits for their commits; used on the training thread, except `wait`."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        outcomes: SnapshotOutcomes,
        taker: SnapshotTaker,
        *,
        opener: AttemptOpener,
        coordinator: SnapshotCoordinator | None,
    ) -> None:
        """`coordinator` is None without other ranks."""
        self._clock = loop.clock
        self._step_boundary = loop.step_boundary
        self._attachment = member.attachment
        self._session = member.attachment.session
        self._attempt = member.attempt
        self._opener = opener
        self._outcomes = outcomes
        self._taker = taker
        self._requests = records.requests
        self._failure_tracker = records.failure_tracker
        self._watchdog = records.watchdog
        self._term = records.term
        self._ranks = coordinator
        self._thread = threading.current_thread()

    def submit(self, handle: SaveHandle) -> None:
        """Implement `save()`: take the snapshot at once at the end of a step, otherwise at the next `step()`."""
        mine = threading.current_thread() is self._thread
        if mine and (flight := self._outcomes.copying) is not None:
            self._join_in_flight(flight, handle)
            return
        here = mine and self._taker.gate().not_at_boundary is None
        if here and handle.exact:
            handle.requested_step = self._clock.step
        if here and self._ranks is not None and not handle.exact:
            self._outcomes.apply()
            if self._outcomes.join(handle):
                return
        self._requests.add(handle)
        self._clock.request_boundary()
        if here:
            self.boundary(at_step=False)

    def _join_in_flight(self, flight: InFlightSave, handle: SaveHandle) -> None:
        """Join a request to `flight` while it is copied; a pin or metadata can no longer be added."""
        if not handle.exact:
            flight.handles.append(handle)
            return
        handle.finish(
            error=SaveFailed(
                f"it was requested while the snapshot of step {flight.step} was copied, which takes no further pin or "
                "metadata",
                where=f"save({handle.reason!r})",
                remedy="call save() right after step(), not in a getter of state= or a signal handler",
            )
        )

    def boundary(self, *, at_step: bool, asker: Asker | None = None) -> None:
        """Apply events, open the attempt if it is not open, and take a due or requested snapshot if possible."""
        self._attempt.check_open("step()")
        self._thread = threading.current_thread()
        self._clock.ack()
        self._outcomes.apply()
        if not self._attempt.opened:
            self._opener.open_unrestored()
            self._outcomes.opened()
        elif self._attempt.late is not None:
            self.open_late(patient=asker is None)
        if at_step:
            self._step_boundary.first_step_done()
        due = self._clock.due
        term = self._term is not None and self._term.until_s is not None
        if self._clock.urgent and self._requests.urgent is None:
            self._requests.request_urgent("urgent")
        if at_step and self._requests:
            self._requests.bind_exact(
                self._clock.step, whole=self._taker.gate(at_step=True).not_at_boundary is None
            )
        if self._ranks is not None:
            self._ranks.at_boundary(at_step=at_step)
        elif due or self._requests or self._requests.urgent or term:
            self._try_snapshot(due=due, at_step=at_step, asker=asker)
        elif self._clock.near:
            self._taker.begin_precopy(self._clock.wanted_at, at_step=at_step)
        asked = bool(self._requests) or self._requests.urgent is not None
        if asked:
            self._clock.request_boundary()
        self._watchdog.check(
            lambda: self._block(at_step=at_step),
            asked=asked,
            timed=self._ranks is None or self._ranks.coordinator_thread.is_leader,
        )
        if term and self._term is not None:
            if self._ranks is None:
                self._finish_term(self._term, at_step=at_step)
            else:
                self._finish_term_collective(self._term, self._ranks.coordinator_thread)

    def open_late(self, *, patient: bool) -> DeltashardError | None:
        """Retry to open the attempt after a full store; return the error, if any. `patient`: respect the back-off."""
        self._clock.request_boundary()
        link = self._attachment.link
        if link is None or (patient and self._failure_tracker.backing_off):
            return None
        try:
            error = self._opener.open_late(link)
        except FencedError as fenced:
            self._session.fence(fenced)
            self._outcomes.apply()  # fails pending saves, and raises
            raise
        if error is None:
            self._failure_tracker.skip_backoff()
            return None
        self._failure_tracker.is_first_report(BlockReason.UNOPENED)  # reported when training began
        self._failure_tracker.failed(BlockReason.UNOPENED, error)
        self._requests.fail(
            SaveFailed(
                f"nothing can be saved yet: {error.what}",
                where="save",
                remedy="make room in the store, or grant write access; training continues, and saves begin then",
            )
        )
        return error

    def _try_snapshot(self, *, due: bool, at_step: bool, asker: Asker | None = None) -> None:
        urgent = self._requests.urgent is not None
        asked = urgent or bool(self._requests)
        asker = asker or (Asker.URGENT if urgent else Asker.REQUEST if asked else Asker.TIMER)
        wait = self._taker.gate(at_step=at_step).block_reason(asker)
        if wait is not None:
            self._taker.record_blocked(wait, quiet=asked and not due)
            return
        link = self._attachment.link
        if link is None:
            self._taker.record_blocked(BlockReason.SIDECAR_DISCONNECTED)
            return
        if asker is Asker.TIMER and self._outcomes.precopy.should_postpone(link, self._clock.wanted_at):
            self._clock.request_boundary()
            return
        if (veto := self._taker.veto()) is not None:
            self._requests.fail(veto)
            return
        self._taker.take(link, self._requests.reason, urgent=urgent)

    def _block(self, *, at_step: bool) -> BlockedBy:
        reason = self._taker.gate(at_step=at_step).block_reason(Asker.TIMER)
        failure = self._failure_tracker.last
        if reason is BlockReason.SIDECAR_DISCONNECTED:
            return BlockedBy(
                reason=reason,
                message=f"the sidecar has been disconnected for {self._session.disconnected_s:.0f} s",
            )
        if reason is not None and reason is not BlockReason.BACK_OFF:
            return BlockedBy(reason=reason, message=MESSAGE[reason])
        if failure is not None:
            vetoed = isinstance(failure, DeltashardError) and failure.where == "validate="
            return BlockedBy(
                reason=BlockReason.VETOED if vetoed else BlockReason.BACK_OFF,
                message=f"the last one failed: {failure}",
                remedy=failure.remedy if isinstance(failure, DeltashardError) else "",
            )
        if self._ranks is not None and self._ranks.cancel_reason:
            return BlockedBy(
                reason=BlockReason.RANKS,
                message=self._ranks.cancel_reason,
                rank=self._ranks.coordinator_thread.cancelled_by,
            )
        return BlockedBy(reason=BlockReason.NOT_REQUESTED, message=MESSAGE[BlockReason.NOT_REQUESTED])

    def _finish_term(self, term: TermHandler, *, at_step: bool) -> None:
        """After SIGTERM's urgent snapshot, make it durable and let the signal act."""
        step = self._clock.step

        def unfinished() -> bool:
            return self._taker.gate(at_step=at_step).not_at_boundary is not None

        unsaved = not self._outcomes.in_flight and self._outcomes.committed_step != step
        if unsaved and term.remaining_s > 0 and self._session.link is not None and unfinished():
            return  # for example during gradient accumulation: the next step() continues here
        for _ in range(TERM_TRIES):
            # An older save may be uploading, or the sidecar finishing it; a retry then succeeds.
            self._outcomes.drain(time.monotonic() + term.remaining_s)
            durable = self._outcomes.committed_step == step
            if durable and not self._outcomes.check_snapshot(time.monotonic() + term.remaining_s):
                break
            if term.remaining_s <= 0 or self._session.link is None:
                break
            if unfinished():
                return
            self._requests.request_urgent(self._requests.urgent or "sigterm", fresh=False)
            self._try_snapshot(due=False, at_step=at_step, asker=Asker.TERM)
        self._outcomes.drain(time.monotonic() + term.remaining_s)
        term.chain()

    def _finish_term_collective(self, term: TermHandler, coordinator_thread: CoordinatorThread) -> None:
        """After SIGTERM, train until the group's snapshot is due; then make it durable and let the signal act."""
        self._outcomes.drain(time.monotonic() + term.remaining_s)
        over = term.remaining_s <= 0 or self._session.link is None or coordinator_thread.down_reason
        if self._outcomes.committed_step == self._clock.step or over:
            self._outcomes.check_snapshot(time.monotonic() + term.remaining_s)
            term.chain()
        else:
            self._requests.request_urgent(self._requests.urgent or "sigterm", fresh=False)
            self._clock.request_boundary()

    def wait(self, handle: SaveHandle, timeout_s: float | None) -> None:
        """Implement `SaveHandle.wait`."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if threading.current_thread() is not self._thread:
            self._wait_elsewhere(handle, until_s)
            return
        if (flight := self._outcomes.copying) is not None:
            if handle.done:
                return
            raise WaitError(
                f"the snapshot of step {flight.step} is being copied by this thread",
                where=f"wait() for {handle.reason!r}",
                remedy="call wait() in the training loop, not in a getter of state= or a signal handler",
            )
        try:
            with (
                contextlib.nullcontext()
                if self._ranks is None
                else self._ranks.coordinator_thread.hold_step()
            ):
                self._wait_here(handle, until_s)
        finally:
            # Take an order for this step that arrived while this rank waited; at the next step it would be missed.
            if self._ranks is not None and self._ranks.is_due:
                self._ranks.take_ordered(at_step=False)

    def _wait_here(self, handle: SaveHandle, until_s: float | None) -> None:
        probe_s = time.monotonic() + PROBE_S
        apart_s = time.monotonic() + OPEN_LATE_INTERVAL_S
        while True:
            self._clock.clear_wake()
            self._outcomes.apply()
            if handle.done:
                return
            if handle.snapshot_id is None:
                if (gone := self._taker.gate().not_at_boundary) is not None:
                    raise WaitError(
                        "the snapshot is not taken yet, and only this thread can take it: " + MESSAGE[gone],
                        where=f"wait() for {handle.reason!r}",
                        remedy="call save() right after step(), or wait() after the next step()",
                    )
                # The program is still at the last step(), so the snapshot can be taken here, after the one in flight.
                if self._taker.gate().block_reason(Asker.WAITER) in (None, BlockReason.UNOPENED):
                    self.boundary(at_step=False, asker=Asker.WAITER)
                    if handle.done or handle.snapshot_id is not None:
                        continue
                if self._ranks is not None and until_s is None and time.monotonic() > apart_s:
                    raise WaitError(
                        f"the ranks do not agree on a snapshot of step {self._clock.step}: {self._ranks.cancel_reason}",
                        where=f"wait() for {handle.reason!r}",
                        remedy="save() and wait() on every rank after the same step, or wait() after the next step()",
                    )
            remaining_s = 1.0 if until_s is None else until_s - time.monotonic()
            if remaining_s <= 0:
                return
            probe_s = self._probe(probe_s)
            if until_s is None and (lost := self._unknown_outcome_reason(handle)) is not None:
                self._requests.drop(handle, lost)
                return
            self._clock.pause(min(remaining_s, 0.2))

    def _wait_elsewhere(self, handle: SaveHandle, until_s: float | None) -> None:
        probe_s = time.monotonic() + PROBE_S
        while not handle.finished.wait(
            1.0 if until_s is None else min(1.0, max(0.0, until_s - time.monotonic()))
        ):
            if until_s is not None:
                if time.monotonic() >= until_s:
                    return
                continue
            probe_s = self._probe(probe_s)
            lost = self._session.fenced or self._unknown_outcome_reason(handle)
            if lost is not None and not handle.done:
                raise lost

    def _unknown_outcome_reason(self, handle: SaveHandle) -> SaveFailed | None:
        """Return an error if the outcome of this save can no longer become known."""
        if self._session.disconnected_s > MAX_DISCONNECTED_S:
            return SaveFailed(
                f"the sidecar has been disconnected for {MAX_DISCONNECTED_S:.0f} s: "
                + (
                    "no snapshot was taken"
                    if handle.snapshot_id is None
                    else "it is unknown whether this save became durable"
                ),
                where=f"wait() for {handle.reason!r}",
                remedy="check the sidecar's log; saves continue when it is attached again",
            )
        if not self._thread.is_alive():
            return SaveFailed(
                "the training thread has ended without close()",
                where=f"wait() for {handle.reason!r}",
                remedy="call close() on that thread, or use the Checkpointer as a context manager",
            )
        return None

    def _probe(self, probe_s: float) -> float:
        """Check that the sidecar answers, if it is time; return the time of the next check."""
        if time.monotonic() < probe_s:
            return probe_s
        link = self._session.link
        if link is not None and not link.is_alive(save_stream.HOLD_S):
            self._session.suspect(link, "it does not answer")
        return time.monotonic() + PROBE_S
