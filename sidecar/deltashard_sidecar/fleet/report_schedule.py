"""Time of a sidecar's next report. Pure: maps clock readings and replies to the time of the next report.

at once         the first; a change (1/s, `BURST` together), unless the last report failed; a nudge (1 in 5 s)
accepted (200)  after `next_s` of the reply, +-10 %
not leading     at once, on a new connection, `NOT_LEADING_RETRIES` times
rejected        after `PAUSE_S`, which leaves time to fix the cause
no reply        after a random part of an exponential back-off, so that many sidecars spread over a minute
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from deltashard_checkpoint.backoff import Backoff, uniform_random

BACKOFF = Backoff(first_s=2.0, longest_s=60.0, jitter=1.0)
UNKNOWN_POD = Backoff(first_s=2.0, longest_s=60.0, jitter=0.1)
"""The controller may learn of a pod later than the pod starts."""
PAUSE_S: Mapping[int, float] = {401: 60.0, **dict.fromkeys((400, 403, 409, 413), 300.0)}
NOT_LEADING_RETRIES, NOT_LEADING_DELAY_S = 6, 0.2
BURST = 3
NUDGE_S = 5.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 3600.0
"""Limits of the interval that a reply requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSchedule:
    """Due time of the next report, and the state that it follows from."""

    due_s: float = 0.0
    failures: int = 0
    not_leading: int = 0
    """Consecutive ones at the end that a non-leading replica answered."""
    full_s: float = 0.0
    nudged_s: float = float("-inf")

    def changed(self, now_s: float) -> Self:
        at_s = self.due_s if self.failures else max(now_s, self.full_s - (BURST - 1))
        return replace(self, due_s=min(self.due_s, at_s))

    def nudged(self, now_s: float) -> Self:
        return self if now_s - self.nudged_s < NUDGE_S else replace(self, due_s=now_s, nudged_s=now_s)

    def accepted(self, next_s: float, now_s: float, uniform: Callable[[], float] = uniform_random) -> Self:
        pause_s = min(max(next_s, MIN_INTERVAL_S), MAX_INTERVAL_S) * (0.9 + 0.2 * uniform())
        full_s = max(self.full_s, now_s) + 1.0
        return replace(self, due_s=now_s + pause_s, failures=0, not_leading=0, full_s=full_s)

    def failed(
        self,
        status: int,
        now_s: float,
        *,
        retry_after_s: float = 0.0,
        uniform: Callable[[], float] = uniform_random,
    ) -> Self:
        """Schedule the retry after a failure. `status` 0: no reply; `retry_after_s` 0: the reply has none."""
        failures = self.failures + 1
        retry_now = status == 421 and self.not_leading < NOT_LEADING_RETRIES
        if retry_now:
            pause_s = NOT_LEADING_DELAY_S
        elif (asked_s := PAUSE_S.get(status) or min(retry_after_s, MAX_INTERVAL_S)) > 0:
            pause_s = asked_s * (1.0 + 0.1 * uniform())
        else:
            pause_s = (UNKNOWN_POD if status == 404 else BACKOFF).delay_s(failures, uniform)
        not_leading = self.not_leading + 1 if retry_now else 0
        return replace(self, due_s=now_s + pause_s, failures=failures, not_leading=not_leading)
