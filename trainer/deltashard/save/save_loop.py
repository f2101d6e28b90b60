"""When a cut is taken, for whoever asks: `step()`, `save()` and its `wait()`, SIGTERM, `close()`.

`wait` has the rules, `request` what is asked for. Whoever waits here is the training thread itself, so that every wait
has an end: a deadline, or the sidecar's absence.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time

from deltashard_proto.block_reason import BlockReason

from deltashard.attach.attachment import RunMember
from deltashard.attach.session import Link
from deltashard.attach.term_signal import TermHandler
from deltashard.cut import save_stream
from deltashard.errors import DeltashardError, FencedError, SaveFailed, UserError, WaitError
from deltashard.program import TrainingLoop
from deltashard.restore.open_attempt import AttemptOpener
from deltashard.save.handle import SaveHandle
from deltashard.save.order_book import OrderBook
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.records import SaveRecords
from deltashard.save.taker import SnapshotTaker
from deltashard.save.wait import MESSAGE, Asker, SnapshotGate
from deltashard.save.watchdog import BlockedBy

log = logging.getLogger("deltashard")

TERM_TRIES = 3
"""How often the cut that SIGTERM asks for is tried, within the grace."""
LONGEST_AWAY_S = 300.0
"""A `wait()` without a timeout ends when the sidecar was away for so long."""
APART_S = 60.0
"""A `wait()` without a timeout ends when the ranks have not come to the cut within so long."""
PROBE_S = 10.0
"""A `wait()` asks the sidecar so often whether it is there at all."""


class SaveLoop:
    """Cuts, from the wish to durable; on the training thread, but for `wait` and `_on_sigterm`."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        outcomes: SnapshotOutcomes,
        taker: SnapshotTaker,
        *,
        opener: AttemptOpener,
        grace_s: float | None,
        orders: OrderBook | None,
    ) -> None:
        """`grace_s`: after SIGTERM an urgent save may take so long; None leaves SIGTERM alone.

        `orders`: when there are several ranks, which cut together; None: this process is alone.
        """
        self._tracking = loop.program.tracking
        self._loaders = loop.loaders
        self._clock = loop.clock
        self._stance = loop.stance
        self._attachment = member.attachment
        self._session = member.attachment.session
        self._attempt = member.attempt
        self._opener = opener
        self._outcomes = outcomes
        self._taker = taker
        self._precopy = outcomes.precopy
        self._requests = records.requests
        self._setbacks = records.setbacks
        self._watchdog = records.watchdog
        self._orders = orders
        self._thread = threading.current_thread()
        term = TermHandler(grace_s=grace_s, notice=self._on_sigterm) if grace_s is not None else None
        self.term = term if term is not None and term.install() else None
        """None: SIGTERM is left alone."""

    def gate(self, *, at_step: bool = False) -> SnapshotGate:
        """What holds now; `at_step`: within `step()`, where what was done since the last one is what this step is."""
        return SnapshotGate.of(
            torn=self._stance.torn,
            stepped=not at_step and self._clock.stepped and bool(self._tracking.optimizers),
            accumulating=not self._clock.whole,
            moved=self._stance.moved or self._loaders.moved,
            in_flight=self._outcomes.in_flight,
            # A link whose news is not applied yet does not count: nothing is known of the save before.
            away=self._attachment.link is None,
            unopened=self._attempt.late is not None,
            backing_off=self._setbacks.backing_off,
        )

    def ask(self, handle: SaveHandle) -> None:
        """`save()`: cut at once if the program stands at the end of a step, else by the next `step()`."""
        mine = threading.current_thread() is self._thread
        here = mine and self.gate().not_at_boundary is None
        if here and handle.exact:
            handle.asked_step = self._clock.step
        if here and self._orders is not None and not handle.exact:
            self._outcomes.apply()
            if self._outcomes.join(handle):
                return
        self._requests.add(handle)
        self._clock.notice()
        if here:
            self.boundary(at_step=False)

    def boundary(self, *, at_step: bool, asker: Asker | None = None) -> None:
        """Apply news, open the attempt if nobody did, cut what is due and possible."""
        self._attempt.refuse_closed("step()")
        self._thread = threading.current_thread()
        self._clock.attend()
        self._outcomes.apply()
        if not self._attempt.opened:
            self._opener.open_unrestored()
            self._outcomes.opened()
        elif self._attempt.late is not None:
            self._open_late(patient=asker is None)
        if at_step:
            self._stance.first_step_done()
        due = self._clock.due
        term = self.term is not None and self.term.until_s is not None
        if self._clock.urgent and self._requests.urgent is None:
            self._requests.hurry("urgent")
        if at_step and self._requests:
            self._requests.bind_exact(self._clock.step, whole=self.gate(at_step=True).not_at_boundary is None)
        if self._orders is not None:
            self._cut_together(self._orders, at_step=at_step)
        elif due or self._requests or self._requests.urgent or term:
            self._try_cut(due=due, at_step=at_step, asker=asker)
        elif self._clock.near:
            self._begin_ahead(self._clock.wanted_at, at_step=at_step)
        asked = bool(self._requests) or self._requests.urgent is not None
        if asked:
            self._clock.notice()
        self._watchdog.check(
            lambda: self._block(at_step=at_step),
            asked=asked,
            timed=self._orders is None or self._orders.conductor.leads,
        )
        if term and self.term is not None:
            if self._orders is None:
                self._finish_term(self.term, at_step=at_step)
            else:
                self._finish_term_together(self.term)

    def _open_late(self, *, patient: bool) -> DeltashardError | None:
        """Try to open the attempt that the store had no room for; why not. `patient`: only where a try is due."""
        self._clock.notice()
        link = self._attachment.link
        if link is None or (patient and self._setbacks.backing_off):
            return None
        try:
            error = self._opener.open_late(link)
        except FencedError as fenced:
            self._session.fence(fenced)
            self._outcomes.apply()  # tells who waits, and raises
            raise
        if error is None:
            self._setbacks.hurry()
            return None
        self._setbacks.first(BlockReason.UNOPENED)  # it was said when training began
        self._setbacks.failed(BlockReason.UNOPENED, error)
        self._requests.fail(
            SaveFailed(
                f"nothing can be saved yet: {error.what}",
                where="save",
                remedy="make room in the store, or give the right to write; training goes on, and saves begin then",
            )
        )
        return error

    def _try_cut(self, *, due: bool, at_step: bool, asker: Asker | None = None) -> None:
        urgent = self._requests.urgent is not None
        asked = urgent or bool(self._requests)
        asker = asker or (Asker.URGENT if urgent else Asker.REQUEST if asked else Asker.TIMER)
        wait = self.gate(at_step=at_step).why(asker)
        if wait is not None:
            self._put_off(wait, quiet=asked and not due)
            return
        link = self._attachment.link
        if link is None:
            self._put_off(BlockReason.AWAY)
            return
        if asker is Asker.TIMER and self._precopy.put_off(link, self._clock.wanted_at):
            self._clock.notice()
            return
        if (veto := self._taker.veto()) is not None:
            self._requests.fail(veto)
            return
        latest_s = self.term.until_s if asker is Asker.TERM and self.term is not None else None
        self._taker.take(
            link, self._requests.reason, urgent=urgent, latest_s=math.inf if latest_s is None else latest_s
        )

    def _begin_ahead(self, step: int, *, at_step: bool) -> None:
        """A cut is near, at the end of `step`: what can be copied before need not be copied then."""
        link = self._attachment.link
        if link is not None and self.gate(at_step=at_step).why(Asker.TIMER) is None:
            self._precopy.near(link, step)

    def _block(self, *, at_step: bool) -> BlockedBy:
        """Why a save that is due was not taken at this boundary."""
        reason = self.gate(at_step=at_step).why(Asker.TIMER)
        failure = self._setbacks.last
        if reason is BlockReason.AWAY:
            return BlockedBy(
                reason=reason, message=f"the sidecar has been away for {self._session.away_s:.0f} s"
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
        if self._orders is not None and self._orders.why_off:
            return BlockedBy(
                reason=BlockReason.RANKS, message=self._orders.why_off, rank=self._orders.conductor.rank_off
            )
        return BlockedBy(reason=BlockReason.NOT_ASKED, message=MESSAGE[BlockReason.NOT_ASKED])

    # With other ranks.

    def _cut_together(self, orders: OrderBook, *, at_step: bool) -> None:
        """Take the cut that is ordered for this boundary; have one ordered for what is wanted."""
        if self._take_ordered(orders, at_step=at_step):
            return
        step = self._clock.step
        orders.conductor.lead(self._precopy.lead_s)
        if (coming := orders.conductor.coming) is not None and coming > step:
            self._begin_ahead(coming, at_step=at_step)
        if self._requests.exact_at(step) and self.gate(at_step=at_step).why(Asker.REQUEST) is None:
            orders.await_exact(lambda: self._take_ordered(orders, at_step=at_step))
            self._take_ordered(orders, at_step=at_step)  # what was ordered while that was given up
        elif self._requests.anywhere or self._requests.urgent is not None:
            orders.wish(reason=self._requests.reason, urgent=self._requests.urgent is not None)
        if orders.conductor.pending:
            self._clock.notice()

    def _take_ordered(self, orders: OrderBook, *, at_step: bool, close: bool = False) -> bool:
        """Cut what is due here; False: nothing is, or not here."""
        cut = orders.ordered()
        self._pay_missed(orders, last=close)
        if cut is None:
            return False
        wait = self.gate(at_step=at_step).why(Asker.CLOSE if close else Asker.WAITER)
        if wait is not None and wait not in (BlockReason.AWAY, BlockReason.FLIGHT):
            self._put_off(wait, quiet=True)
            return False  # of all ranks alike: the next step that is whole
        orders.conductor.taken(cut)
        link = self._attachment.link
        if wait is not None or link is None:
            wait = wait or BlockReason.AWAY
            self._outcomes.decline_later(cut)
            self._outcomes.send_decline()
            self._put_off(wait)
            self._requests.fail(
                SaveFailed(
                    f"this rank has no part in the cut of step {self._clock.step}: {MESSAGE[wait]}",
                    where="save",
                    remedy="the next save covers its rows",
                )
            )
            return False
        if (veto := self._taker.veto()) is not None:
            self._outcomes.decline_later(cut)
            self._outcomes.send_decline()
            if close:
                raise veto
            self._requests.fail(veto)
            return False
        latest_s = math.inf if self.term is None or self.term.until_s is None else self.term.until_s
        # A rank that still ends its last step when others close cuts by a reason of its own.
        reason = "close" if close and self._requests.urgent is None else self._requests.reason
        self._taker.take(link, reason, urgent=self._requests.urgent is not None, latest_s=latest_s, cut=cut)
        if not self._outcomes.in_flight:
            self._outcomes.decline_later(cut)
            self._outcomes.send_decline()
        orders.sampled(cut)
        return True

    def _pay_missed(self, orders: OrderBook, *, last: bool = False) -> None:
        """Say which cut this rank has no part in; `last`: it ends no step any more."""
        if (missed := orders.conductor.missed(last=last)) is not None:
            self._outcomes.decline_later(missed)
        self._outcomes.send_decline()

    def _finish_term_together(self, term: TermHandler) -> None:
        """SIGTERM came: the group was asked for a cut. Until it is due, train on; then make it durable and leave."""
        if self._outcomes.in_flight or self._outcomes.committed_step == self._clock.step:
            self.drain(time.monotonic() + term.left_s)
        over = (
            term.left_s <= 0
            or self._session.link is None
            or bool(self._orders and self._orders.conductor.down)
        )
        if self._outcomes.committed_step == self._clock.step or over:
            self._outcomes.check_snapshot(time.monotonic() + term.left_s)
            term.chain()
        else:
            self._requests.hurry(self._requests.urgent or "sigterm", fresh=False)
            self._clock.notice()

    def _put_off(self, wait: BlockReason, *, quiet: bool = False) -> None:
        """No cut now: remember why for who asked, and count what was due."""
        self._requests.put_off(MESSAGE[wait])
        if wait in (BlockReason.STEPPED, BlockReason.ACCUMULATING, BlockReason.MOVED):
            return  # the next optimizer step takes it
        # Nobody else would say that the sidecar is away; the rest passes by itself.
        if not (quiet and wait in (BlockReason.FLIGHT, BlockReason.BACK_OFF)):
            self._setbacks.skipped(wait)

    # Waiting.

    def wait(self, handle: SaveHandle, timeout_s: float | None) -> None:
        """Let a save end; what `SaveHandle.wait` does."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if threading.current_thread() is not self._thread:
            self._wait_elsewhere(handle, until_s)
            return
        try:
            with self._staying():
                self._wait_here(handle, until_s)
        finally:
            # What was ordered for this step while this rank stood here: by the next one it would be another step.
            if self._orders is not None and self._orders.conductor.cut_at(self._clock.step) is not None:
                self._take_ordered(self._orders, at_step=False)

    def _staying(self) -> contextlib.AbstractContextManager[None]:
        """Within, this rank ends no step, which the others are told when they want a cut."""
        return contextlib.nullcontext() if self._orders is None else self._orders.conductor.stay()

    def _wait_here(self, handle: SaveHandle, until_s: float | None) -> None:
        probe_s = time.monotonic() + PROBE_S
        apart_s = time.monotonic() + APART_S
        while True:
            self._clock.expect()
            self._outcomes.apply()
            if handle.done:
                return
            if handle.cut is None:
                if (gone := self.gate().not_at_boundary) is not None:
                    raise WaitError(
                        "the cut has not happened yet, and this thread is the one that has to take it: "
                        + MESSAGE[gone],
                        where=f"wait() for {handle.reason!r}",
                        remedy="call save() right after step(), or wait() after the next step()",
                    )
                # Still where the last step() left the program: the cut can be taken here, after the one in flight.
                if self.gate().why(Asker.WAITER) in (None, BlockReason.UNOPENED):
                    self.boundary(at_step=False, asker=Asker.WAITER)
                    if handle.done or handle.cut is not None:
                        continue
                if self._orders is not None and until_s is None and time.monotonic() > apart_s:
                    raise WaitError(
                        f"the ranks do not come to a cut of step {self._clock.step}: {self._orders.why_off}",
                        where=f"wait() for {handle.reason!r}",
                        remedy="save() and wait() on every rank after the same step, or wait() after the next step()",
                    )
            left_s = 1.0 if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return
            probe_s = self._probe(probe_s)
            if until_s is None and (lost := self._never(handle)) is not None:
                self._requests.drop(handle, lost)
                return
            self._clock.pause(min(left_s, 0.2))

    def _wait_elsewhere(self, handle: SaveHandle, until_s: float | None) -> None:
        """On another thread than the one that trains, which alone settles handles."""
        probe_s = time.monotonic() + PROBE_S
        while not handle.settled.wait(
            1.0 if until_s is None else min(1.0, max(0.0, until_s - time.monotonic()))
        ):
            if until_s is not None:
                if time.monotonic() >= until_s:
                    return
                continue
            probe_s = self._probe(probe_s)
            lost = self._session.fenced or self._never(handle)
            if lost is not None and not handle.done:
                raise lost

    def _never(self, handle: SaveHandle) -> SaveFailed | None:
        """Why nobody will ever tell how this save ended; None: somebody may."""
        if self._session.away_s > LONGEST_AWAY_S:
            return SaveFailed(
                f"the sidecar has been away for {LONGEST_AWAY_S:.0f} s: "
                + (
                    "this was never cut" if handle.cut is None else "whether this became durable is not known"
                ),
                where=f"wait() for {handle.reason!r}",
                remedy="look at the sidecar's log; saves go on when it is back",
            )
        if not self._thread.is_alive():
            return SaveFailed(
                "the training thread has ended without close()",
                where=f"wait() for {handle.reason!r}",
                remedy="close() the Checkpointer on it, or use it as a context manager",
            )
        return None

    def _probe(self, probe_s: float) -> float:
        """Now and then, while somebody waits anyway: does the sidecar answer at all? Returns when to ask again."""
        if time.monotonic() < probe_s:
            return probe_s
        link = self._session.link
        if link is not None and not link.answers(save_stream.HOLD_S):
            self._session.doubt(link, "it does not answer")
        return time.monotonic() + PROBE_S

    def drain(self, until_s: float) -> bool:
        """Let the save in flight end; False when it has not by `until_s`."""
        while self._outcomes.in_flight:
            self._clock.expect()
            self._outcomes.apply()
            left_s = until_s - time.monotonic()
            if not self._outcomes.in_flight:
                break
            if left_s <= 0:
                return False
            self._clock.pause(min(left_s, 0.2))
        return True

    # The last cut.

    def finish(self, until_s: float) -> None:
        """Make the last step boundary durable, or raise."""
        self.drain(until_s)
        self._outcomes.apply()
        self._requests.refuse_unbound(self._clock.step)
        self._setbacks.closing()
        self._outcomes.check_snapshot(until_s)
        with self._staying():
            if self._orders is not None:
                self._pay_missed(self._orders, last=True)
            try:
                self._finish_here(until_s)
            except SaveFailed as error:
                step = self._clock.step
                if self._outcomes.committed_step != step or self._requests.exact_at(step):
                    raise
                self._requests.fail(error)
                log.warning("step %d is durable, but the further save of it did not happen: %s", step, error)

    def _finish_here(self, until_s: float) -> None:
        last: Exception | None = None
        before, tried = self._setbacks.last, False
        while self._needs_cut():
            gate = self.gate()
            wait = gate.why(Asker.CLOSE)
            if wait in (BlockReason.TORN, BlockReason.STEPPED):
                raise SaveFailed(
                    MESSAGE[wait],
                    where="close()",
                    remedy="step() must be the last statement of the loop body",
                )
            if time.monotonic() >= until_s:
                raise self._not_durable(last)
            if tried and self._orders is None and self._outcomes.committed_step == self._clock.step:
                raise SaveFailed(f"it failed: {last or self._setbacks.last}", where="close()")
            link = self._attachment.link
            if self._setbacks.removed is not None and (tried or link is None):
                raise SaveFailed(
                    f"step {self._clock.step} is not durable: {self._setbacks.removed}",
                    where=self._attachment.url,
                    remedy="there is no run to wait for; another process begins it anew",
                )
            if wait is BlockReason.UNOPENED:
                last = self._open_late(patient=True) or last
                wait = self.gate().why(Asker.CLOSE)
            if wait is None and link is not None and not self._resting:
                tried = True
                self._say_inexact(gate)
                last = self._last_cut(link, until_s) or last
                if self._setbacks.last is not before and isinstance(self._setbacks.last, UserError):
                    raise self._not_durable(last)  # trying again does not help
            if not self._outcomes.in_flight:
                self._clock.expect()
                self._clock.pause(min(0.2, max(0.0, until_s - time.monotonic())))
            elif not self.drain(until_s):
                last = SaveFailed("the save is still uploading", where="close()")
            self._outcomes.apply()

    @property
    def _resting(self) -> bool:
        """Whether the last cut waits for the back-off; what other ranks have ordered does not."""
        ordered = self._orders is not None and self._orders.conductor.cut_at(self._clock.step) is not None
        return self._setbacks.backing_off and not ordered

    def _not_durable(self, last: Exception | None) -> SaveFailed:
        """The error of close(), with where and remedy of the failure that caused it, if the user can act on that."""
        what = f"step {self._clock.step} is not durable"
        failure = self._setbacks.last
        if isinstance(failure, UserError):
            return SaveFailed(f"{what}: {failure.what}", where=failure.where, remedy=failure.remedy)
        return SaveFailed(
            f"{what}: {last or failure or 'the sidecar is away'}",
            where=self._attachment.url,
            remedy="the newest committed checkpoint is whole; "
            + (
                "look at the sidecar's log for the store's errors"
                if self._orders is None or not self._orders.why_off
                else "close() on every rank after the same step"
            ),
        )

    def close(self) -> None:
        """Give SIGTERM back, and tell who waits for what is not cut."""
        if self.term is not None:
            self.term.remove()
        self._requests.fail(SaveFailed("the checkpointer was closed", where="save"))

    def _say_inexact(self, gate: SnapshotGate) -> None:
        """The last cut cannot wait for a whole step: what a resumed run will not have, or have twice."""
        accumulating = BlockReason.ACCUMULATING in gate.holds
        if accumulating and self._tracking.has_gradients and self._setbacks.first("unfinished"):
            log.warning(
                "the last step() ended no step of an optimizer that the Checkpointer was given: gradients accumulated "
                "since then are not in the checkpoint that close() takes"
            )
        if self._stance.moved and self._setbacks.first("moved"):
            log.warning(
                "a forward pass in training mode ran after the last step(): the checkpoint that close() takes has what "
                "it moved (buffers, random numbers). Evaluate with torch.no_grad(), or after model.eval()"
            )

    def _last_cut(self, link: Link, until_s: float) -> Exception | None:
        """Take the cut of close(); returns why it failed, or could not be taken yet."""
        if self._orders is not None:
            if self._orders.conductor.down or self._orders.conductor.left:
                raise SaveFailed(
                    f"step {self._clock.step} is not durable: {self._orders.why_off}",
                    where="close()",
                    remedy="close() on every rank after the same step; see what ended the other rank",
                )
            if self._take_ordered(self._orders, at_step=False, close=True):
                return None
            self._orders.wish(reason="close", urgent=True)
            return SaveFailed(self._orders.why_off, where="close()") if self._orders.why_off else None
        if (veto := self._taker.veto()) is not None:
            raise veto
        handle = SaveHandle(reason="close", pin=None, metadata={}, waiter=self.wait)
        self._requests.add(handle)
        for each in [] if (coarse := self._outcomes.coarse) is None else coarse.handles:
            # Pins and metadata mean the checkpoint with 8 bits from now on.
            self._requests.add(SaveHandle(reason="close", pin=each.pin, metadata=each.metadata))
        self._taker.take(link, "close", latest_s=until_s)
        return handle.error

    def _needs_cut(self) -> bool:
        step = self._clock.step
        if self._requests.open:
            return step > 0
        if step not in {self._outcomes.committed_step, self._attempt.resumed_step}:
            return step > 0
        # What a run leaves behind has 8 bits; several ranks do not agree on whether it has.
        return self._orders is None and self._outcomes.coarse is not None

    def _on_sigterm(self) -> None:
        self._requests.hurry("sigterm")
        self._clock.notice()

    def _finish_term(self, term: TermHandler, *, at_step: bool) -> None:
        """SIGTERM came: the urgent cut was taken, if one was possible; now make it durable and let the signal act."""
        step = self._clock.step

        def unfinished() -> bool:
            return self.gate(at_step=at_step).not_at_boundary is not None

        unsaved = not self._outcomes.in_flight and self._outcomes.committed_step != step
        if unsaved and term.left_s > 0 and self._session.link is not None and unfinished():
            return  # in the middle of gradient accumulation, say: the next step() comes here again
        for _ in range(TERM_TRIES):
            # An older save may be uploading, or the sidecar busy with its end: then there is room a moment later.
            self.drain(time.monotonic() + term.left_s)
            durable = self._outcomes.committed_step == step
            if durable and not self._outcomes.check_snapshot(time.monotonic() + term.left_s):
                break
            if term.left_s <= 0 or self._session.link is None:
                break
            if unfinished():
                return
            self._requests.hurry(self._requests.urgent or "sigterm", fresh=False)
            self._try_cut(due=False, at_step=at_step, asker=Asker.TERM)
        self.drain(time.monotonic() + term.left_s)
        term.chain()
