"""What keeps saves from being taken: counted, said once per cause until a save succeeds, and backed off from."""

from __future__ import annotations

import logging
import time

from deltashard_checkpoint.backoff import Backoff
from deltashard_proto.block_reason import BlockReason
from deltashard_proto.cause import Cause

from deltashard.attach.attachment import Listener
from deltashard.errors import EnvironmentFault
from deltashard.save.handle import Stats
from deltashard.tracking.step_clock import StepClock

log = logging.getLogger("deltashard")

# Not random: ranks fail together, and are to try again together.
BACKOFF = Backoff(first_s=0.5, longest_s=60.0, jitter=0.0)
CLOSING_BACKOFF = Backoff(first_s=0.5, longest_s=5.0, jitter=0.0)
"""While `close()` waits for its last save."""


class SaveFailureTracker:
    """Failures and skips of one Checkpointer; on the training thread, but for `skip_backoff`."""

    def __init__(self, clock: StepClock, stats: Stats, listener: Listener) -> None:
        self._clock = clock
        self._stats = stats
        self._listener = listener
        self._not_before_s = 0.0
        self._failures = 0
        self._backoff = BACKOFF
        self._reported: set[str] = set()
        self.last: BaseException | None = None
        """The newest failure since the last commit; None: there is none."""
        self.run_removed: BaseException | None = None
        """The run was removed under this trainer: nothing of it is saved; None: it was not."""

    @property
    def backing_off(self) -> bool:
        return time.monotonic() < self._not_before_s

    def is_first_report(self, what: str) -> bool:
        """Whether `what` is said for the first time since the last commit; from now on it was."""
        if what in self._reported:
            return False
        self._reported.add(what)
        return True

    def failed(self, cause: str, error: BaseException) -> None:
        """Count it, say it once per cause until a save succeeds, and do not try again at every step."""
        self.last = error
        self._stats.failures[cause] += 1
        if cause != "busy":
            self._failures += 1
            self._not_before_s = time.monotonic() + self._backoff.delay_s(self._failures)
        step = self._clock.step
        if cause == Cause.REMOVED:
            self.run_removed = error
            if self.is_first_report(cause):
                log.error("nothing is saved any more, from step %d on, and training goes on: %s", step, error)
        elif self.is_first_report(cause):
            # Of an error in the program the next save fails as well, until somebody mends it.
            passes = isinstance(error, EnvironmentFault) and cause != "validate"
            covers = "the next save covers its rows" if passes else "it is tried again"
            log.warning("a save failed at step %d, %s: %s", step, covers, error)
        self._listener.emit("save_failed", cause=cause, error=str(error), step=step)

    def vetoed(self, failure: BaseException) -> None:
        self.last = failure
        self.skipped(BlockReason.VETOED)

    def skipped(self, cause: str) -> None:
        self._stats.skipped[str(cause)] += 1  # plain text, not a member of an enum: people print this
        self._listener.emit("skipped", cause=cause, step=self._clock.step)

    def committed(self) -> None:
        """A save succeeded: everything may be said, and tried, anew."""
        self._reported.clear()
        self.last = self.run_removed = None
        self.skip_backoff()

    def skip_backoff(self) -> None:
        """The next try does not wait for the back-off, later ones do."""
        self._not_before_s, self._failures = 0.0, 0

    def use_closing_backoff(self) -> None:
        """`close()` takes the last save: it is tried at once, and again sooner than others are."""
        self._backoff = CLOSING_BACKOFF
        self.skip_backoff()
