"""Retries calls while the sidecar is gone: attach, open and `restore()` start again until a deadline.

Only `SidecarGone` is retried (see the table in `rpc_error`). A sidecar may die at any instant of these calls. The next
try repeats everything: opening wins another slot of the log, and a restore writes all rows and tensors in place again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from deltashard_checkpoint.backoff import Backoff

from deltashard.errors import RestoreFailed, SidecarGone, SidecarUnavailable

log = logging.getLogger("deltashard")

DEADLINE_S = 300.0
"""Seconds from the first loss of the sidecar."""
BACKOFF = Backoff(first_s=0.05, longest_s=1.0)
WARN_AFTER_S = 5.0
"""Seconds without a sidecar before a warning, since a pod's sidecar may be starting."""
MAX_REASONS = 5


class Retry:
    """The tries of one call, on one thread."""

    def __init__(
        self,
        what: str,
        *,
        deadline_s: float = DEADLINE_S,
        pause: Callable[[float], object],
        final: type[SidecarUnavailable | RestoreFailed] = SidecarUnavailable,
        last_log_error: Callable[[], str] = str,
    ) -> None:
        """`what` names the call; `pause` waits at most the given seconds; `last_log_error` reads the sidecar's log."""
        self._what = what
        self._deadline_s = deadline_s
        self._pause = pause
        self._final = final
        self._last_log_error = last_log_error
        self._began_s: float | None = None
        self._failures = 0
        self._reasons: dict[str, None] = {}

    @property
    def until_s(self) -> float:
        """Monotonic time of the deadline; the first access starts the clock."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        return self._began_s + self._deadline_s

    @contextlib.contextmanager
    def try_once(self) -> Iterator[None]:
        """Context of one try: records a loss of the sidecar, and raises the final error after the deadline."""
        try:
            yield
        except SidecarGone as gone:
            self.record_failure(gone)
            raise

    def record_failure(self, gone: SidecarGone) -> None:
        """Record a loss of the sidecar; after the deadline, raise the final error with all reasons."""
        over = time.monotonic() >= self.until_s
        text = str(gone)
        if text not in self._reasons:
            self._reasons[text] = None
            waited_s = time.monotonic() - self.until_s + self._deadline_s
            level = logging.WARNING if waited_s >= WARN_AFTER_S else logging.INFO
            log.log(level, "%s: the sidecar is gone, retrying: %s", self._what, text)
        if over:
            raise self._error() from gone

    def pause(self) -> None:
        self._failures += 1
        self._pause(min(BACKOFF.delay_s(self._failures), max(0.0, self.until_s - time.monotonic())))

    def _error(self) -> SidecarUnavailable | RestoreFailed:
        reasons = list(self._reasons)
        more = len(reasons) - MAX_REASONS
        listed = "; then ".join(reasons[-MAX_REASONS:])
        last_error = self._last_log_error()
        return self._final(
            f"no sidecar stayed attached within {self._deadline_s:g} s: "
            + (f"(and {more} more reasons) " if more > 0 else "")
            + listed
            + (f". Last error in its log: {last_error}" if last_error else ""),
            where=self._what,
            remedy="find out what ends the sidecar (its memory limit, its node), then start again",
        )
