"""Counts, reports and backs off from failures and skips of saves."""

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

# No jitter: ranks fail together and retry together.
BACKOFF = Backoff(first_s=0.5, longest_s=60.0, jitter=0.0)
CLOSING_BACKOFF = Backoff(first_s=0.5, longest_s=5.0, jitter=0.0)
"""Back-off while `close()` waits for its last save."""


class SaveFailureTracker:
    """Failures and skips of a Checkpointer; used on the training thread, except `skip_backoff`."""

    def __init__(self, clock: StepClock, stats: Stats, listener: Listener) -> None:
        self._clock = clock
        self._stats = stats
        self._listener = listener
        self._not_before_s = 0.0
        self._failures = 0
        self._backoff = BACKOFF
        self._reported: set[str] = set()
        self.last: BaseException | None = None
        """Newest failure since the last commit."""
        self.run_removed: BaseException | None = None
        """Error that reported that the run was removed from the store, after which nothing is saved."""

    @property
    def backing_off(self) -> bool:
        return time.monotonic() < self._not_before_s

    def is_first_report(self, what: str) -> bool:
        """Return whether `what` is reported for the first time since the last commit, and record the report."""
        if what in self._reported:
            return False
        self._reported.add(what)
        return True

    def failed(self, cause: str, error: BaseException) -> None:
        """Count the failure, log it once per cause until a save succeeds, and start the back-off."""
        self.last = error
        self._stats.failures[cause] += 1
        if cause != "busy":
            self._failures += 1
            self._not_before_s = time.monotonic() + self._backoff.delay_s(self._failures)
        step = self._clock.step
        if cause == Cause.REMOVED:
            self.run_removed = error
            if self.is_first_report(cause):
                log.error("saving stopped at step %d, and training continues: %s", step, error)
        elif self.is_first_report(cause):
            # After an error in the program the next save fails too, until the program is fixed.
            passes = isinstance(error, EnvironmentFault) and cause != "validate"
            covers = "the next save covers its rows" if passes else "it is retried"
            log.warning("a save failed at step %d, %s: %s", step, covers, error)
        self._listener.emit("save_failed", cause=cause, error=str(error), step=step)

    def vetoed(self, failure: BaseException) -> None:
        self.last = failure
        self.skipped(BlockReason.VETOED)

    def skipped(self, cause: str) -> None:
        self._stats.skipped[str(cause)] += 1  # plain text instead of an enum member, for printing
        self._listener.emit("skipped", cause=cause, step=self._clock.step)

    def committed(self) -> None:
        """Reset reports and back-off after a commit."""
        self._reported.clear()
        self.last = self.run_removed = None
        self.skip_backoff()

    def skip_backoff(self) -> None:
        """Let the next try skip the back-off; later tries use it again."""
        self._not_before_s, self._failures = 0.0, 0

    def use_closing_backoff(self) -> None:
        """Use the shorter back-off of `close()`, and try at once."""
        self._backoff = CLOSING_BACKOFF
        self.skip_backoff()
