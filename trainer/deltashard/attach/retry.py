"""How long a call goes on without a sidecar: attach, open and `restore()` begin again until a deadline.

Only `SidecarGone` is met so (`rpc_error` has the table). A sidecar may die at any instant of these calls: none of them
leaves anything half done that the next try does not do again, since opening wins another slot of the log and a restore
writes every row and tensor anew, in place.
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
"""From the first time that the sidecar was gone."""
BACKOFF = Backoff(first_s=0.05, longest_s=1.0)
WARN_AFTER_S = 5.0
"""A sidecar that is back sooner is no warning's worth: one of a pod may just be starting."""
MAX_REASONS = 5


class Retry:
    """The tries of one call; on one thread."""

    def __init__(
        self,
        what: str,
        *,
        deadline_s: float = DEADLINE_S,
        pause: Callable[[float], object],
        final: type[SidecarUnavailable | RestoreFailed] = SidecarUnavailable,
        last_log_error: Callable[[], str] = str,
    ) -> None:
        """`what` is tried; `pause` waits so many seconds, or less; `last_log_error`: the end of the sidecar's log."""
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
        """When the deadline is over (monotonic); the clock runs from the first time that it is asked for."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        return self._began_s + self._deadline_s

    @contextlib.contextmanager
    def try_once(self) -> Iterator[None]:
        """A try: a sidecar that is gone within is noted; raises the final error when the deadline is over."""
        try:
            yield
        except SidecarGone as gone:
            self.record_failure(gone)
            raise

    def record_failure(self, gone: SidecarGone) -> None:
        """The sidecar is gone; raises the final error, with the reasons so far, when the deadline is over."""
        over = time.monotonic() >= self.until_s
        text = str(gone)
        if text not in self._reasons:
            self._reasons[text] = None
            waited_s = time.monotonic() - self.until_s + self._deadline_s
            level = logging.WARNING if waited_s >= WARN_AFTER_S else logging.INFO
            log.log(level, "%s: the sidecar is gone, and is tried again: %s", self._what, text)
        if over:
            raise self._error() from gone

    def pause(self) -> None:
        self._failures += 1
        self._pause(min(BACKOFF.delay_s(self._failures), max(0.0, self.until_s - time.monotonic())))

    def _error(self) -> SidecarUnavailable | RestoreFailed:
        reasons = list(self._reasons)
        more = len(reasons) - MAX_REASONS
        told = "; then ".join(reasons[-MAX_REASONS:])
        words = self._last_log_error()
        return self._final(
            f"no sidecar that stays, within {self._deadline_s:g} s: "
            + (f"(and {more} more reasons) " if more > 0 else "")
            + told
            + (f". The last words of its log: {words}" if words else ""),
            where=self._what,
            remedy="see what ends the sidecar (its memory limit, its node), then start again",
        )
