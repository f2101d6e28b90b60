"""When a cut is taken, for whoever asks: `step()`, `save()` and its `wait()`, SIGTERM, `close()`.

`wait` has the rules. What was asked for stays asked for until it is cut, but an exact save (see `handle`) only as long
as its step lasts. Whoever waits here is the training thread itself, so that every wait has an end: a deadline, or the
sidecar's absence.
"""

from __future__ import annotations

import logging
import threading
import time

from deltashard_proto.arena_layout import SAVE_AT_STEP, URGENT

from deltashard.attach.session import Link
from deltashard.attach.term_signal import TermHandler
from deltashard.errors import SaveFailed, WaitError
from deltashard.save import save_stream
from deltashard.save.handle import SaveHandle
from deltashard.save.saving import Saving
from deltashard.save.wait import Asker, Standing, Wait

log = logging.getLogger("deltashard")

TERM_TRIES = 3
"""How often the cut that SIGTERM asks for is tried, within the grace."""
LONGEST_AWAY_S = 300.0
"""A `wait()` without a timeout ends when the sidecar was away for so long."""
PROBE_S = 10.0
"""A `wait()` asks the sidecar so often whether it is there at all."""


class Asking(Saving):
    """Cuts, from the wish to durable."""

    def _standing(self, *, at_step: bool = False) -> Standing:
        """`at_step`: within `step()`, where what was done since the last one is what this step is."""
        return Standing.of(
            torn=self._stance.torn,
            stepped=not at_step and self._tracking.stepped and bool(self._tracking.optimizers),
            accumulating=not self._step_is_boundary,
            moved=self._stance.moved or any(loader.moved for loader in self._loaders.values()),
            in_flight=self._flight is not None,
            # A link whose news is not applied yet does not count: nothing is known of the save before.
            away=(link := self._session.link) is None or link.line is not self._line,
            backing_off=time.monotonic() < self._not_before_s,
        )

    def _ask(self, handle: SaveHandle) -> None:
        """`save()`: cut at once if the program stands at the end of a step, else by the next `step()`."""
        mine = threading.current_thread() is self._thread
        here = mine and self._standing().gone is None
        if here and handle.exact:
            handle.asked_step = self._step
        self._requests.append(handle)
        self._attention = True
        if here:
            self._boundary(at_step=False)

    def _boundary(self, *, at_step: bool, asker: Asker | None = None) -> None:
        self._refuse_closed("step()")
        self._thread = threading.current_thread()
        self._attention = False
        self._apply_events()
        if not self._opened:
            self._open_unrestored()
        if at_step and not self._stance.called:
            self._stance.first_step_done()
        line = self._line
        steps_due = self._step >= line[SAVE_AT_STEP]
        term = self._term is not None and self._term.until_s is not None
        if line[URGENT] and self._urgent is None:
            self._hurry("urgent")
        if at_step and self._requests:
            self._bind_exact()
        if steps_due or self._requests or self._urgent or term:
            self._try_cut(due=steps_due, at_step=at_step, asker=asker)
        if self._requests or self._urgent:
            self._attention = True
        if term and self._term is not None:
            self._finish_term(self._term, at_step=at_step)

    def _bind_exact(self) -> None:
        """This is the step that exact saves of before mean; those of an older one are lost, by name."""
        whole = self._standing(at_step=True).gone is None
        for handle in [handle for handle in self._requests if handle.exact]:
            if handle.asked_step is None:
                handle.asked_step = self._step if whole else None
            elif handle.asked_step != self._step:
                self._requests.remove(handle)
                handle.settle(
                    error=SaveFailed(
                        f"step {handle.asked_step} was not cut, because {handle.kept or 'another save was'}, and "
                        "training has gone on: this pin and metadata were not meant for a later step",
                        where=f"save({handle.reason!r})",
                        remedy="wait() for it before the next step, or save() again",
                    )
                )

    def _try_cut(self, *, due: bool, at_step: bool, asker: Asker | None = None) -> None:
        asked = self._urgent is not None or bool(self._requests)
        urgent = self._urgent is not None
        asker = asker or (Asker.URGENT if urgent else Asker.REQUEST if asked else Asker.TIMER)
        standing = self._standing(at_step=at_step)
        wait = standing.why(asker)
        if wait is not None:
            self._put_off(wait, quiet=asked and not due)
            return
        link = self._session.link
        if link is None:
            self._put_off(Wait.AWAY)
            return
        if (veto := self._veto()) is not None:
            self._fail_requests(veto)
            return
        reason = self._urgent or (self._requests[0].reason if self._requests else "timer")
        latest_s = self._term.until_s if asker is Asker.TERM and self._term is not None else None
        if latest_s is None:
            self._take_cut(link, reason, urgent=urgent)
        else:
            self._take_cut(link, reason, urgent=urgent, latest_s=latest_s)

    def _put_off(self, wait: Wait, *, quiet: bool = False) -> None:
        """No cut now: remember why for who asked, and count what was due."""
        for handle in self._requests:
            handle.kept = wait.said
        if wait is Wait.TORN and wait not in self._said:
            self._said.add(wait)
            log.warning("no checkpoint is cut at step %d: %s", self._step, wait.said)
        if wait in (Wait.STEPPED, Wait.ACCUMULATING, Wait.MOVED):
            return  # the next optimizer step takes it
        # Nobody else would say that the sidecar is away; the rest passes by itself.
        self._skip(wait, quiet=quiet and wait in (Wait.FLIGHT, Wait.BACK_OFF))

    # Waiting.

    def _wait(self, handle: SaveHandle, timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if threading.current_thread() is not self._thread:
            self._wait_elsewhere(handle, until_s)
            return
        probe_s = time.monotonic() + PROBE_S
        while True:
            self._awake.clear()
            self._apply_events()
            if handle.done:
                return
            if handle.cut is None:
                if (gone := self._standing().gone) is not None:
                    raise WaitError(
                        f"the cut has not happened yet, and this thread is the one that has to take it: {gone.said}",
                        where=f"wait() for {handle.reason!r}",
                        remedy="call save() right after step(), or wait() after the next step()",
                    )
                # Still where the last step() left the program: the cut can be taken here, after the one in flight.
                if self._standing().why(Asker.WAITER) is None:
                    self._boundary(at_step=False, asker=Asker.WAITER)
                    if handle.done or handle.cut is not None:
                        continue
            left_s = 1.0 if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return
            probe_s = self._probe(probe_s)
            if until_s is None and (lost := self._never(handle)) is not None:
                if handle in self._requests:
                    self._requests.remove(handle)
                handle.settle(error=lost)
                return
            self._awake.wait(min(left_s, 0.2))

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

    def _drain(self, until_s: float) -> bool:
        """Let the save in flight end; False when it has not by `until_s`."""
        while self._flight is not None:
            self._awake.clear()
            self._apply_events()
            left_s = until_s - time.monotonic()
            if self._flight is None:
                break
            if left_s <= 0:
                return False
            self._awake.wait(min(left_s, 0.2))
        return True

    # The last cut.

    def _finish(self, until_s: float) -> None:
        """Make the last step boundary durable, or raise."""
        last: Exception | None = None
        self._drain(until_s)
        self._apply_events()
        self._refuse_unbound()
        while self._needs_cut():
            standing = self._standing()
            wait = standing.why(Asker.CLOSE)
            if wait in (Wait.TORN, Wait.STEPPED):
                raise SaveFailed(
                    wait.said, where="close()", remedy="step() must be the last statement of the loop body"
                )
            if time.monotonic() >= until_s:
                why = last or "; ".join(f"{cause}: {n}" for cause, n in self.stats.failures.items())
                raise SaveFailed(
                    f"step {self._step} is not durable: {why or 'the sidecar is away'}",
                    where=self.url,
                    remedy="the newest committed checkpoint is whole; look at the sidecar's log for the store's errors",
                )
            link = self._session.link
            if wait is None and link is not None:
                self._say_inexact(standing)
                last = self._last_cut(link, until_s) or last
            if self._flight is None:
                self._awake.clear()
                self._awake.wait(min(0.2, max(0.0, until_s - time.monotonic())))
            elif not self._drain(until_s):
                last = SaveFailed("the save is still uploading", where="close()")
            self._apply_events()

    def _refuse_unbound(self) -> None:
        """Exact saves that were asked for after the last `step()`: no step they could mean will come."""
        for handle in [h for h in self._requests if h.exact and h.asked_step != self._step]:
            self._requests.remove(handle)
            handle.settle(
                error=SaveFailed(
                    "it was asked for between two steps, and close() came before the second",
                    where=f"save({handle.reason!r})",
                    remedy="save() right after step()",
                )
            )

    def _say_inexact(self, standing: Standing) -> None:
        """The last cut cannot wait for a whole step: what a resumed run will not have, or have twice."""
        accumulating = Wait.ACCUMULATING in standing.holds
        if accumulating and "unfinished" not in self._said and self._tracking.has_gradients:
            self._said.add("unfinished")
            log.warning(
                "the last step() ended no optimizer step: gradients accumulated since the optimizer's last one are not "
                "in the checkpoint that close() takes"
            )
        if self._stance.moved and "moved" not in self._said:
            self._said.add("moved")
            log.warning(
                "a forward pass in training mode ran after the last step(): the checkpoint that close() takes has what "
                "it moved (buffers, random numbers). Evaluate with torch.no_grad(), or after model.eval()"
            )

    def _last_cut(self, link: Link, until_s: float) -> Exception | None:
        """Take the cut of close(); returns why it failed."""
        if (veto := self._veto()) is not None:
            raise veto
        handle = SaveHandle(reason="close", pin=None, metadata={}, waiter=self._wait)
        self._requests.append(handle)
        self._take_cut(link, "close", latest_s=until_s)
        return handle.error

    def _needs_cut(self) -> bool:
        if any(not handle.done for handle in self._requests):
            return self._step > 0
        return self._step > 0 and self._step not in {self._committed_step, self._resumed_step}

    def _on_sigterm(self) -> None:
        self._hurry("sigterm")
        self._attention = True

    def _finish_term(self, term: TermHandler, *, at_step: bool) -> None:
        """SIGTERM came: the urgent cut was taken, if one was possible; now make it durable and let the signal act."""

        def unfinished() -> bool:
            return self._standing(at_step=at_step).gone is not None

        unsaved = self._flight is None and self._committed_step != self._step
        if unsaved and term.left_s > 0 and self._session.link is not None and unfinished():
            return  # in the middle of gradient accumulation, say: the next step() comes here again
        for _ in range(TERM_TRIES):
            # An older save may be uploading, or the sidecar busy with its end: then there is room a moment later.
            self._drain(time.monotonic() + term.left_s)
            if self._committed_step == self._step or term.left_s <= 0 or self._session.link is None:
                break
            if unfinished():
                return
            self._urgent = self._urgent or "sigterm"
            self._try_cut(due=False, at_step=at_step, asker=Asker.TERM)
        self._drain(time.monotonic() + term.left_s)
        term.chain()
